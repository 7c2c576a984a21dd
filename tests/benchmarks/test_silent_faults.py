"""Faults beneath the guards are named by a running job: ``python -m benchmarks.silent_faults``, shortened."""

from __future__ import annotations

import pytest
from benchmarks.silent_faults.__main__ import false_alarms, put_in
from benchmarks.silent_faults.faults import FAULTS


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS.values() if fault.fast])
def test_a_fault_is_named_within_a_step(name: str) -> None:
    outcome = put_in(FAULTS[name])
    assert outcome.named, f"{outcome.steps} steps later: {outcome.sentence}"


@pytest.mark.slow(stands_for="[sync]")
@pytest.mark.parametrize("sound", ["sync", "fullyAsync, recompute"])
def test_a_sound_run_says_nothing(sound: str) -> None:
    assert false_alarms(sound) == []
