"""Limits of the mismatch, judged step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rljob_api.spec.algorithm import MismatchLimits
from rljob_trainer.checkpoints.folder import FolderCheckpoints
from rljob_trainer.control.mismatch_limits import MismatchError, MismatchWatch, RollBackError, start_again
from rljob_trainer.pipeline.parts import Apart

FINE = Apart("mismatch", kl=0.01, chi_square=0.02, effective_sample_size=0.98)
FAR = replace(FINE, kl=0.3)


class World:
    def __init__(self, **limits: Any) -> None:
        self.said: list[str] = []
        self.corrected = 0
        given = MismatchLimits(**({"kl": 0.1} | limits))
        self.limits = MismatchWatch(given, correct=self.correct, report=self.said.append)
        self.steps: Iterator[int] = iter(range(1, 1000))

    def correct(self) -> None:
        self.corrected += 1

    def look(self, *steps: Apart | None) -> dict[str, float]:
        return [self.limits.look(next(self.steps), apart) for apart in steps][-1]


def test_steps_within_the_limits_are_left_alone() -> None:
    world = World(chi_square=0.05, effective_sample_size=0.9)
    assert world.look(*[FINE] * 5)["mismatch/beyond_limits"] == 0
    assert (world.said, world.limits.sentence, world.limits.suspect) == ([], "", False)


def test_the_samples_that_are_most_apart_are_named() -> None:
    world = World(patience=1)
    world.limits.look(1, replace(FAR, worst="sample 2 of prompt 17 by 0.9 nats"))
    assert "differ too much: mismatch/kl 0.3 is above 0.1" in world.said[0]
    assert "(worst: sample 2 of prompt 17 by 0.9 nats)" in world.said[0]


@pytest.mark.parametrize(
    ("limits", "figures", "words"),
    [
        ({"kl": 0.1}, {"kl": 0.11}, "mismatch/kl 0.11 is above 0.1"),
        ({"kl": None, "chi_square": 0.5}, {"chi_square": 3.0}, "mismatch/chi_square 3 is above 0.5"),
        ({"effective_sample_size": 0.5}, {"effective_sample_size": 0.4},
         "mismatch/effective_sample_size 0.4 is below 0.5"),
        ({"kl": 0.1}, {"kl": float("nan")}, "mismatch/kl (not finite) is above 0.1"),
        ({"kl": 0.1}, {"family": "drift", "kl": 0.2, "chi_square": 0.0, "effective_sample_size": 1.0},
         "drift/kl 0.2 is above 0.1"),
    ],
)  # fmt: skip
def test_each_figure_has_its_limit(limits: dict[str, Any], figures: dict[str, Any], words: str) -> None:
    world = World(patience=1, **limits)
    world.look(replace(FINE, **figures))
    assert world.limits.sentence == f"{words} (1 steps in a row)"
    assert words in world.said[0]


def test_patience_counts_steps_in_a_row_and_the_sentence_comes_again_seldom() -> None:
    world = World(patience=3)
    world.look(FAR, FAR, FINE, FAR, FAR)
    assert world.said == []
    world.look(None)  # not judged: neither better nor worse
    world.look(FAR)
    assert len(world.said) == 1
    assert "step 7" in world.said[0]
    world.look(*[FAR] * 100)
    assert len(world.said) == 2


def test_the_correction_is_switched_on_once() -> None:
    world = World(action="correct", patience=2)
    assert world.look(FAR)["mismatch/correcting"] == 0
    assert world.look(FAR, FAR, FINE)["mismatch/correcting"] == 1
    assert world.corrected == 1
    again = World(action="correct", patience=1)
    again.limits.resumed(correcting=True)
    assert again.look(FAR)["mismatch/correcting"] == 1
    assert again.corrected == 0


def test_weights_are_suspect_from_the_first_step_beyond_a_limit() -> None:
    world = World(action="rollBack", patience=2)
    world.look(FAR)
    assert world.limits.suspect
    world.look(FINE)
    assert not world.limits.suspect
    world.look(FAR)
    with pytest.raises(RollBackError, match="2 steps in a row"):
        world.look(FAR)


def test_without_a_checkpoint_or_after_too_many_times_there_is_no_way_back(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, keep=1)
    with pytest.raises(MismatchError, match="no earlier checkpoint"):
        start_again(RollBackError("too far"), 1, 2, store, print)
    with pytest.raises(MismatchError, match="rolling back 2 times"):
        start_again(RollBackError("too far"), 3, 2, store, print)
