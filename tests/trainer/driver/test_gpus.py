"""A job that asks for more GPUs than the machine has is refused before anything waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_job import copy_job

from rljob_api import load_jobs, resolve
from rljob_api.resolved import ResolvedSpec
from rljob_trainer.cli import main
from rljob_trainer.driver import gpus, run
from rljob_trainer.errors import JobFileError

VLLM = {"engine": "vllm", "maxResponseTokens": 3}
SEPARATE = {
    "placement": "separate",
    "trainer": {"gpusPerReplica": 2},
    "rollout": VLLM | {"replicas": 2, "gpusPerReplica": 1},
}
COLOCATED = {"placement": "colocated", "trainer": {"gpusPerReplica": 2}, "rollout": VLLM}


def spec(**sections: Any) -> ResolvedSpec:
    [job] = load_jobs(yaml.safe_dump(copy_job(**sections)))
    return resolve(job).spec


def refusal(there: int, *, cuda_build: bool = True, **sections: Any) -> str:
    with pytest.raises(JobFileError) as refused:
        gpus.check_gpus(spec(**sections), there, cuda_build=cuda_build)
    assert refused.value.exit_code == 64
    return str(refused.value)


@pytest.mark.parametrize(("sections", "enough"), [({}, 0), (COLOCATED, 2), (SEPARATE, 4)])
def test_as_many_gpus_as_the_pools_take_are_enough(sections: dict[str, Any], enough: int) -> None:
    gpus.check_gpus(spec(**sections), enough, cuda_build=True)
    if enough:
        assert f"needs {enough} GPUs" in refusal(enough - 1, **sections)


def test_what_is_wanted_what_is_there_and_what_to_do_are_said() -> None:
    said = refusal(1, **SEPARATE)
    assert said.startswith("the job needs 4 GPUs (spec.trainer 2, spec.rollout 2), but this machine has 1: check `nv")
    assert "use `placement: colocated`, which needs 2;" in said
    assert "fewer replicas" in said
    assert "make install" not in said
    assert "make install ACCELERATOR=gpu" in refusal(0, cuda_build=False, **SEPARATE)
    one = refusal(0, placement="colocated", trainer={"gpusPerReplica": 1}, rollout=VLLM)
    assert one.startswith("the job needs 1 GPU (spec.trainer 1), but this machine has none: ")
    assert "placement" not in one
    assert "replicas" not in one


def test_gpus_that_torch_cannot_use_are_refused_at_once() -> None:
    said = refusal(2, cuda_build=False, **COLOCATED)
    assert said.startswith("the job needs 2 GPUs and this machine has 2, but torch here is a CPU build: ")
    assert "`make install ACCELERATOR=gpu` (in a container, use the GPU image" in said
    gpus.check_gpus(spec(), 2, cuda_build=False)


async def test_while_ray_has_not_counted_yet_others_go_on_and_then_nobody_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    went_on = asyncio.Event()
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0, "GPU": 2.0} if went_on.is_set() else {})
    asyncio.get_running_loop().call_later(0.2, went_on.set)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    await gpus.check_gpus_of_machine(spec(**COLOCATED))
    assert went_on.is_set()


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(copy_job(**COLOCATED)))
    return path


def test_a_run_on_this_machine_ends_before_a_rank_is_waited_for(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    async def assemble(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(run, "assemble", assemble)
    assert main(["run", str(job_file), "--output", str(job_file.parent / "run")]) == 64
    assert "the job needs 2 GPUs (spec.trainer 2), but this machine has none: " in capsys.readouterr().err


@pytest.mark.parametrize(("address", "by_role"), [("10.0.0.1:6379", False), ("10.0.0.1:6379", True), (None, True)])
def test_a_cluster_whose_nodes_come_later_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, address: str | None, by_role: bool
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(run, "check_gpus_of_machine", lambda spec: pytest.fail("it was asked"))
    asyncio.run(run.refuse_absent_gpus(spec(**COLOCATED), by_role=by_role))
