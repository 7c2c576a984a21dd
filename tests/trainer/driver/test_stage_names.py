"""The trainer's wait for a batch has a second name where published recipes give it one."""

from __future__ import annotations

import pytest

from rljob_trainer.driver.session import named_for
from rljob_trainer.telemetry.timing import StageTimes


@pytest.mark.parametrize("mode", ["sync", "oneStepOff", "fullyAsync"])
def test_in_one_step_off_the_wait_is_for_the_generation_of_the_step_before(mode: str) -> None:
    now = 0.0
    times = StageTimes(clock=lambda: now, wall_clock=lambda: now)
    stage = named_for(mode, times.stage)
    with stage("generate"):
        now += 3
    with stage("publish"):
        now += 1
    own = {"wait_prev_gen": 3.0, "generate": 0.0} if mode == "oneStepOff" else {"generate": 3.0}
    assert times.lap() == {"generate": 3.0, "publish": 1.0} | {n: s for n, s in own.items() if n == "wait_prev_gen"}
    assert times.exclusive_totals == own | {"publish": 1.0}
    assert times.shares() == {name: seconds / 4 for name, seconds in (own | {"publish": 1.0}).items() if seconds}
