"""The engines' rows of the timeline."""

from __future__ import annotations

import pytest

from rljob_trainer.pools.activity import Activity


def test_a_span_is_the_time_with_work_under_one_version() -> None:
    now = 99.0
    spans: list[tuple[str, str, float, float]] = []
    activity = Activity(lambda *span: spans.append(span), clock=lambda: now)
    activity.follow("0", 1, busy=False)  # nothing to do, nothing to tell
    now = 100.0
    activity.follow("0", 1, busy=True)
    now = 101.0
    activity.follow("1", 1, busy=True)
    activity.follow("0", 1, busy=True)  # still the same span
    now = 102.0
    activity.follow("0", 2, busy=True)  # new weights under way
    now = 104.0
    activity.follow("0", 2, busy=False)
    activity.follow("0", 2, busy=False)
    assert spans == [("engine 0", "version 1", 100.0, 102.0), ("engine 0", "version 2", 102.0, 104.0)]


def test_the_idle_ratio_is_the_mean_over_engines_of_the_time_without_work() -> None:
    now = 0.0
    activity = Activity(clock=lambda: now)
    assert activity.take_idle_ratio() is None
    activity.follow("0", 1, busy=True)
    activity.follow("1", 1, busy=False)
    now = 6.0
    activity.follow("0", 1, busy=False)
    activity.follow("1", 1, busy=True)
    now = 10.0
    assert activity.take_idle_ratio() == pytest.approx((0.4 + 0.6) / 2)
    now = 14.0
    activity.follow("1", 2, busy=True)  # cut by new weights, yet at work all the time
    now = 20.0
    assert activity.take_idle_ratio() == pytest.approx((1.0 + 0.0) / 2)
    activity.forget("0")
    now = 30.0
    assert activity.take_idle_ratio() == 0.0
