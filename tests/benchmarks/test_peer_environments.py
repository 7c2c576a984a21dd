"""The environments of the peers can be made again, with the Python that is there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import environments


def test_a_peer_gets_the_python_of_the_project_and_pinned_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(environments, "uv", lambda *arguments: asked.append(tuple(map(str, arguments))))
    python = tmp_path / "peers" / "trl-grpo" / "bin" / "python"
    python.parent.mkdir(parents=True)
    assert environments.peer_python("trl-grpo", tmp_path) == python
    made, installed = asked
    # uv would look for another one of that version, and download it where there is none.
    assert made[:2] == ("venv", "--quiet")
    assert made[made.index("--python") + 1] == sys.executable
    assert installed[installed.index("--constraints") + 1] == str(environments.CONSTRAINTS)
    assert "trl==1.16.0" in installed
    assert environments.peer_python("trl-grpo", tmp_path) == python
    assert len(asked) == 2


def test_what_constrains_peers_is_pinned_and_hashed() -> None:
    blocks = re.split(r"\n(?=\S)", environments.CONSTRAINTS.read_text().split("\n", 1)[1].strip())
    assert len(blocks) > 50
    for block in blocks:
        name, *hashes = block.replace("\\\n", "").split()
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", name)
        # There are two builds of torch, and that for CPUs comes from an index of its own.
        assert bool(hashes) == (not name.startswith("torch=="))


@pytest.mark.slow(stands_for="test_what_constrains_peers_is_pinned_and_hashed")
@pytest.mark.parametrize("peer", environments.PEERS)
def test_a_peer_s_versions_go_together(peer: str) -> None:
    """With the package index: what it says that they need."""
    environments.install(peer, Path(sys.executable), "--dry-run", "--reinstall")
