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

pytestmark = [pytest.mark.integrity, pytest.mark.usefixtures("three_epochs")]


@contextmanager
def forked(folder: Path, warm: Warm) -> Iterator[None]:
    """The benchmark's runs in ``folder`` start as those of other tests do."""
    runner = Runner(folder, warm)

    def start(folder: Path, output: Path, number: int) -> Process | Forked:
        return runner.start("run", folder / "job.yaml", "--output", output)

    with patch.object(runs, "_start", start):
        yield


@pytest.mark.slow(
    stands_for=[
        "test_sync_ends_as_if_nothing_had_happened",
        "tests/runs/test_environments.py::test_every_prompt_of_two_turns_ends_once_whoever_is_killed",
        "tests/runs/test_environments.py::test_every_episode_of_agents_ends_once_whoever_is_killed[oneStepOff]",
    ]
)
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
