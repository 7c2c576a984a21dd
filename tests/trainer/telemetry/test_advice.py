"""Advice follows from two shares: who waits, and for how much of the time."""

from __future__ import annotations

import pytest

from rljob_trainer.telemetry.advice import Waiting, advice


def waiting(trainer: float, rollout: float, engines: int = 4, ranks: int = 4) -> Waiting:
    return Waiting(trainer, rollout, engines, ranks)


@pytest.mark.parametrize("mode", ["sync", "oneStepOff", "fullyAsync"])
def test_balanced_pools_and_shared_devices_need_none(mode: str) -> None:
    assert advice(mode, waiting(0.05, 0.09), colocated=False) is None  # type: ignore[arg-type]
    assert advice(mode, waiting(0.6, 0.4), colocated=True) is None  # type: ignore[arg-type]


def test_a_waiting_trainer_wants_as_many_engines_as_would_fill_its_wait() -> None:
    # Half of the time is waiting: engines twice as fast would end it, and halve the step.
    said = advice("fullyAsync", waiting(0.5, 0.0), colocated=False)
    assert said is not None
    assert "Rollout is the bottleneck: the trainer waits 50 % of the time." in said
    assert "rollout.replicas: 8 instead of 4" in said
    assert "2.00 times" in said


def test_pools_that_both_wait_wait_for_something_else() -> None:
    said = advice("fullyAsync", waiting(0.6, 0.9), colocated=False)
    assert said is not None
    assert "Both pools wait: the trainer 60 % of the time, engines 90 %." in said
    assert "onDeadline: end" in said
    assert "rollout.replicas" not in said
    # Batches that are made in turn leave both idle by themselves.
    said = advice("oneStepOff", waiting(0.3, 0.2), colocated=False)
    assert said is not None
    assert "onDeadline" not in said


def test_engines_with_nothing_to_do_give_their_devices_to_the_trainer() -> None:
    # A quarter of four engines' time is one engine; five ranks instead of four are 1.25 times as fast.
    said = advice("oneStepOff", waiting(0.02, 0.25), colocated=False)
    assert said is not None
    assert "The trainer is the bottleneck: engines are idle 25 % of the time." in said
    assert "rollout.replicas: 3 instead of 4" in said
    assert "1.25 times" in said


def test_more_is_not_promised_than_the_idle_engines_can_bring() -> None:
    # Three of four engines are idle, one rank: moving three devices would be four times as fast, and engines then just
    # keep up with that.
    said = advice("fullyAsync", waiting(0.0, 0.75, ranks=1), colocated=False)
    assert said is not None
    assert "4.00 times" in said
    said = advice("fullyAsync", waiting(0.0, 0.3, engines=1, ranks=1), colocated=False)
    assert said is not None
    assert "More trainer ranks" in said


def test_pools_that_work_in_turn_are_told_to_overlap_if_that_helps() -> None:
    # 60 % generation, 40 % training, one after the other: overlapped a step takes 60 %.
    said = advice("sync", waiting(0.6, 0.4), colocated=False)
    assert said is not None
    assert "oneStepOff" in said
    assert "1.67 times" in said
    assert advice("sync", waiting(0.95, 0.05), colocated=False) is None


def test_a_pool_that_did_nothing_at_all_is_no_division_by_zero() -> None:
    assert advice("fullyAsync", waiting(1.0, 0.0), colocated=False)
    assert advice("fullyAsync", waiting(0.0, 1.0), colocated=False)
    assert advice("sync", waiting(1.0, 0.0), colocated=False) is None
