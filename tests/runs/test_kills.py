"""Twelve kills over the three pipelines (``python -m benchmarks.kills`` does 200): nothing lost, nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from benchmarks.kills import runs
from benchmarks.kills.runs import Victim, check, run_to_the_end
from real_runs import Process, Runner
from warm import Forked, Warm


@pytest.fixture(autouse=True)
def _two_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what the benchmark trains: still more steps than there are kills and what they undo."""
    monkeypatch.setattr(runs, "EPOCHS", 2)


@contextmanager
def forked(folder: Path, warm: Warm) -> Iterator[None]:
    """The benchmark's runs in ``folder`` start as those of other tests do."""
    runner = Runner(folder, warm)

    def start(folder: Path, output: Path, number: int) -> Process | Forked:
        return runner.start("run", folder / "job.yaml", "--output", output)

    with patch.object(runs, "_start", start):
        yield


@pytest.mark.parametrize("mode", ["oneStepOff", "fullyAsync"])
def test_every_prompt_ends_once_within_its_age_whoever_is_killed(tmp_path: Path, warm: Warm, mode: str) -> None:
    victims: list[Victim] = ["engine", "driver", "rank", "all"]
    with forked(tmp_path, warm):
        story = run_to_the_end(mode, tmp_path, victims, seed=13)
    assert len(story.kills) == 4
    assert story.starts == 4
    check(tmp_path / "output", mode, story.undone)


def test_sync_ends_as_if_nothing_had_happened(tmp_path: Path, warm: Warm) -> None:
    with forked(tmp_path / "whole", warm):
        run_to_the_end("sync", tmp_path / "whole", [], seed=0)
    assert not (tmp_path / "whole" / "output" / "samples").exists()  # which the job switches off
    with forked(tmp_path / "killed", warm):
        story = run_to_the_end("sync", tmp_path / "killed", ["driver", "engine", "rank", "all"], seed=24)
    assert len(story.kills) == 4
    assert check(tmp_path / "killed" / "output", "sync", story.undone) == check(tmp_path / "whole" / "output", "sync")
