"""Stages add up, shares cover the last ten minutes, and the timeline is what Perfetto reads. The clock is a number."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rljob_trainer.telemetry.timing import StageTimes, Stopwatch, Trace


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def times(clock: Clock) -> StageTimes:
    return StageTimes(clock=clock, wall_clock=lambda: 5000.0)


def one_step(times: StageTimes, clock: Clock) -> None:
    with times.stage("step"):
        with times.stage("generate"):
            clock.pass_(6)
        with times.stage("update"):
            clock.pass_(1)
            with times.stage("update_critic"):
                clock.pass_(2)
        clock.pass_(1)


def test_totals_count_a_stage_with_what_is_nested_in_it(times: StageTimes, clock: Clock) -> None:
    one_step(times, clock)
    one_step(times, clock)
    assert times.totals == pytest.approx({"step": 20, "generate": 12, "update": 6, "update_critic": 4})
    assert times.exclusive_totals == pytest.approx({"step": 2, "generate": 12, "update": 2, "update_critic": 4})


def test_a_lap_starts_where_the_previous_one_ended(times: StageTimes, clock: Clock) -> None:
    one_step(times, clock)
    assert times.lap() == pytest.approx({"step": 10, "generate": 6, "update": 3, "update_critic": 2})
    with times.stage("publish"):
        clock.pass_(0.5)
    assert times.lap() == pytest.approx({"publish": 0.5})
    assert times.lap() == {}


def test_shares_are_exclusive_and_add_up_to_one(times: StageTimes, clock: Clock) -> None:
    one_step(times, clock)
    shares = times.shares()
    assert shares == pytest.approx({"generate": 0.6, "update_critic": 0.2, "update": 0.1, "other": 0.1})
    assert list(shares) == ["generate", "update_critic", "update", "other"]


def test_shares_count_what_is_under_way_once(times: StageTimes, clock: Clock) -> None:
    with times.stage("step"), times.stage("update"):
        clock.pass_(1)
        with times.stage("update_actor"):
            clock.pass_(3)
            assert times.shares() == pytest.approx({"update_actor": 0.75, "update": 0.25})


def test_shares_forget_what_is_older_than_the_window(clock: Clock) -> None:
    times = StageTimes(window=600, clock=clock)
    with times.stage("generate"):
        clock.pass_(600)
    with times.stage("update"):
        clock.pass_(600)
    assert times.shares() == pytest.approx({"update": 1})
    assert times.totals["generate"] == pytest.approx(600)


def test_a_stage_longer_than_the_window_counts_with_its_part_inside(clock: Clock) -> None:
    times = StageTimes(window=600, clock=clock)
    with times.stage("generate"):
        clock.pass_(3000)
    with times.stage("update"):
        clock.pass_(300)
    assert times.shares() == pytest.approx({"generate": 0.5, "update": 0.5}, abs=0.02)


def test_shares_of_overlapping_tasks_are_shares_of_their_sum(times: StageTimes, clock: Clock) -> None:
    async def work(name: str, begin: asyncio.Event, end: asyncio.Event) -> None:
        with times.stage(name):
            begin.set()
            await end.wait()

    async def main() -> None:
        end = asyncio.Event()
        begins = [asyncio.Event(), asyncio.Event()]
        async with asyncio.TaskGroup() as group:
            for name, begin in zip(("generate", "update"), begins, strict=True):
                group.create_task(work(name, begin, end))
            for begin in begins:
                await begin.wait()
            clock.pass_(4)
            end.set()

    asyncio.run(main())
    assert times.totals == pytest.approx({"generate": 4, "update": 4})
    assert times.shares() == pytest.approx({"generate": 0.5, "update": 0.5})


def test_a_stage_that_raises_is_counted(times: StageTimes, clock: Clock) -> None:
    def fail() -> None:
        with times.stage("reward"):
            clock.pass_(2)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert times.totals == pytest.approx({"reward": 2})
    with times.stage("advantage"):  # the stack is clean again
        clock.pass_(1)
    assert times.shares()["advantage"] == pytest.approx(1 / 3)


def test_a_misspelt_stage_is_refused(times: StageTimes) -> None:
    with pytest.raises(ValueError, match="'generation' is not a stage"), times.stage("generation"):
        pass


def test_shares_before_anything_has_happened(times: StageTimes) -> None:
    assert times.shares() == {}


def test_memory_is_bounded(clock: Clock) -> None:
    times = StageTimes(clock=clock)
    times.trace = Trace(limit=100)
    for _ in range(2000):
        one_step(times, clock)
    assert len(times._recent._buckets) <= 62
    document = times.trace.document()
    assert sum(event["ph"] == "X" for event in document["traceEvents"]) == 100
    assert document["otherData"]["earlier_spans_dropped"] == 7900


def test_stopwatch(clock: Clock) -> None:
    with Stopwatch(clock) as watch:
        clock.pass_(2)
        assert watch.seconds == 2
        clock.pass_(1)
    clock.pass_(10)
    assert watch.seconds == 3


def test_timeline_is_chrome_trace_json(times: StageTimes, clock: Clock, tmp_path: Path) -> None:
    one_step(times, clock)
    times.trace.span("engine 0", "generate", 5000.5, 5005.5)
    times.trace.span("publication", "publish", 5009, 5010)
    path = tmp_path / "timeline.json"
    times.trace.write(path)
    document = json.loads(path.read_text())
    events = document["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(rows.values()) == ["trainer", "learner update", "engine 0", "publication"]
    spans = {(rows[e["tid"]], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert spans == {
        ("trainer", "step"): (0, 10_000_000),
        ("trainer", "generate"): (0, 6_000_000),
        ("learner update", "update"): (6_000_000, 3_000_000),
        ("learner update", "update_critic"): (7_000_000, 2_000_000),
        ("engine 0", "generate"): (500_000, 5_000_000),
        ("publication", "publish"): (9_000_000, 1_000_000),
    }
    assert all(e["pid"] == 1 for e in events)


@pytest.mark.parametrize(
    ("stage", "row"),
    [
        ("generate", "trainer"),
        ("advantage", "trainer"),
        ("checkpoint", "trainer"),
        ("score", "learner score"),
        ("reference", "learner score"),
        ("update", "learner update"),
        ("publish", "publication"),
    ],
)
def test_each_stage_of_the_learner_and_the_publication_have_rows_of_their_own(
    times: StageTimes, clock: Clock, stage: str, row: str
) -> None:
    with times.stage(stage):
        clock.pass_(1)
    (span,) = times.trace._spans
    assert (span.row, span.name) == (row, stage)


def test_spans_that_cross_get_rows_of_their_own() -> None:
    trace = Trace()
    trace.span("engine 0", "a", 0, 2)
    trace.span("engine 0", "b", 1, 3)  # crosses a
    trace.span("engine 0", "c", 1, 2)  # nests in a
    trace.span("engine 0", "d", 3, 4)
    events = trace.document()["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    placed = {e["name"]: rows[e["tid"]] for e in events if e["ph"] == "X"}
    assert placed == {"a": "engine 0", "b": "engine 0 (2)", "c": "engine 0", "d": "engine 0"} or placed == {
        "a": "engine 0",
        "b": "engine 0 (2)",
        "c": "engine 0 (2)",
        "d": "engine 0",
    }
    for row in set(placed.values()):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and rows[e["tid"]] == row]
        for a in spans:
            for b in spans:
                assert (
                    a == b
                    or a[1] <= b[0]
                    or b[1] <= a[0]
                    or (a[0] <= b[0] and b[1] <= a[1])
                    or (b[0] <= a[0] and a[1] <= b[1])
                )
