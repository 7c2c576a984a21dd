"""The engines' rows of the timeline."""

from __future__ import annotations

from itertools import count

from rljob_trainer.rollout.activity import Activity


def test_a_span_is_the_time_with_work_under_one_version() -> None:
    seconds = count(100)
    spans: list[tuple[str, str, float, float]] = []
    activity = Activity(clock=lambda: float(next(seconds)))
    activity.report = lambda *span: spans.append(span)
    activity.follow("0", 1, busy=False)  # nothing to do, nothing to tell
    activity.follow("0", 1, busy=True)  # 100
    activity.follow("1", 1, busy=True)  # 101
    activity.follow("0", 1, busy=True)  # still the same span
    activity.follow("0", 2, busy=True)  # new weights under way: 102 ends, 103 begins
    activity.follow("0", 2, busy=False)  # 104
    activity.follow("0", 2, busy=False)
    assert spans == [("engine 0", "version 1", 100.0, 102.0), ("engine 0", "version 2", 103.0, 104.0)]
