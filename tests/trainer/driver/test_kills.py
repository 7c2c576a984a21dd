"""Twelve kills over the three pipelines (``python -m benchmarks.kills`` does 200): nothing lost, nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.kills.runs import Victim, check, run_to_the_end


@pytest.mark.parametrize("mode", ["oneStepOff", "fullyAsync"])
def test_every_prompt_ends_once_within_its_age_whoever_is_killed(tmp_path: Path, mode: str) -> None:
    victims: list[Victim] = ["engine", "driver", "rank", "all"]
    story = run_to_the_end(mode, tmp_path, victims, seed=11)
    assert len(story.kills) == 4
    assert story.starts == 4
    check(tmp_path / "output", mode, story.undone)


def test_sync_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    run_to_the_end("sync", tmp_path / "whole", [], seed=0)
    assert not (tmp_path / "whole" / "output" / "samples").exists()  # which the job switches off
    story = run_to_the_end("sync", tmp_path / "killed", ["driver", "engine", "rank", "all"], seed=12)
    assert len(story.kills) == 4
    assert check(tmp_path / "killed" / "output", "sync", story.undone) == check(tmp_path / "whole" / "output", "sync")
