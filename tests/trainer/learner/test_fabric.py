"""A trainer on several hosts says so when it has nothing but TCP between them."""

from __future__ import annotations

from pathlib import Path

from rljob_trainer.learner.fabric import adapters, missing_fabric


def test_only_ranks_on_several_hosts_need_adapters() -> None:
    assert missing_fabric([("10.0.0.1", ()), ("10.0.0.1", ())]) is None
    assert missing_fabric([("10.0.0.1", ("mlx5_0",)), ("10.0.0.2", ("mlx5_0",))]) is None
    said = missing_fabric([("10.0.0.1", ("mlx5_0",)), ("10.0.0.2", ())])
    assert said is not None
    assert "2 ranks are on 2 hosts, but no RDMA adapter is visible on 10.0.0.2" in said


def test_adapters_are_those_of_the_system(tmp_path: Path) -> None:
    assert adapters(tmp_path / "none") == ()
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert adapters(tmp_path) == ("mlx5_0", "mlx5_1")
