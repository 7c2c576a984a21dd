"""Lines for logs: aligned under their titles, quiet otherwise."""

from __future__ import annotations

import io

from rljob_trainer.telemetry.open_view import open_view
from rljob_trainer.telemetry.plain import PlainView
from rljob_trainer.telemetry.view import JobSummary, Pace, Present, ShownStep

METRICS = {
    "reward/mean": 0.4321,
    "response/length/mean": 123.4,
    "response/length/clip_ratio": 0.034,
    "actor/entropy": 1.2345,
    "actor/clip_fraction": 0.1,
    "actor/grad_norm": 0.5,
    "age/max": 0.0,
    "throughput/tokens_per_second": 14_567.0,
    "timing/step_seconds": 0.51,
}
JOB = JobSummary(name="quickstart", algorithm="grpo", model="llama", output="runs/q", total_steps=330)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def view_and_text() -> tuple[PlainView, io.StringIO, Clock]:
    text, clock = io.StringIO(), Clock()
    return PlainView(text, monotonic=clock), text, clock


def test_first_line_says_what_runs_second_what_the_columns_are() -> None:
    view, text, _ = view_and_text()
    view.start(JOB)
    first, titles = text.getvalue().splitlines()
    assert first == "quickstart: grpo, llama, sync, output runs/q"
    assert titles.split()[:2] == ["step", "reward"]
    assert titles.split()[-1] == "left"


def test_every_cell_ends_under_its_title() -> None:
    view, text, clock = view_and_text()
    view.start(JOB)
    for step, factor in ((1, 1e-6), (25, 1.0), (330, 1e6)):
        clock.now += 100_000
        metrics = {name: value * factor for name, value in METRICS.items() if "ratio" not in name}
        view.step(ShownStep(step, metrics | {"response/length/clip_ratio": 0.034, "actor/clip_fraction": 1.0}))
    _, titles, *lines = text.getvalue().splitlines()
    assert len(lines) == 3
    ends = [
        i
        for i in range(len(titles))
        if titles[i] != " " and titles[i + 1 : i + 2] in ("", " ") and titles[i - 3 : i + 1] != "step"
    ]
    for line in lines:
        assert len(line) == len(titles)
        for end in ends[:-1]:
            assert line[end] != " ", (line, titles)
            assert line[end + 1] == " ", (line, titles)


def test_a_missing_metric_is_a_dash_and_the_eta_counts_down() -> None:
    view, text, clock = view_and_text()
    view.start(JOB)
    clock.now = 2.0
    view.step(ShownStep(1, {}))
    line = text.getvalue().splitlines()[-1]
    assert line.split() == ["1/330", *["–"] * 11, "10m58s"]  # 329 steps of 2 s


def test_messages_are_lines_and_what_goes_on_only_after_a_minute() -> None:
    view, text, clock = view_and_text()
    view.start(JOB)
    view.message("checkpoint of step 10 written")
    before = text.getvalue()
    for second in range(59):
        clock.now = second
        view.show(Present("trainer waits for 12/32 samples", ["engine 0 works"]))
    assert text.getvalue() == before
    for second in range(59, 130):
        clock.now = second
        view.show(Present("trainer waits for 12/32 samples", ["engine 0 works"]))
    assert text.getvalue().count("trainer waits for 12/32 samples; engine 0 works\n") == 2


def test_a_pipe_gets_plain_lines() -> None:
    with open_view(io.StringIO()) as view:
        assert isinstance(view, PlainView)


def test_pace_is_that_of_the_latest_steps() -> None:
    clock = Clock()
    pace = Pace(total_steps=100, first_step=41, clock=clock, latest=2)
    assert pace.remaining is None
    for step, now in ((41, 10.0), (42, 12.0), (43, 14.0)):
        clock.now = now
        pace.step(step)
    assert pace.step_seconds == 2.0
    assert pace.remaining == 57 * 2.0
    clock.now = 15.0
    assert pace.remaining == 57 * 2.0 - 1.0
    assert pace.elapsed == 15.0
    assert Pace(None, clock=clock).remaining is None


def test_what_the_first_step_waited_for_does_not_count_into_the_pace_of_later_ones() -> None:
    clock = Clock()
    pace = Pace(total_steps=10, clock=clock)
    for step, now in ((1, 40.0), (2, 41.0), (3, 42.0)):
        clock.now = now
        pace.step(step)
    assert (pace.step_seconds, pace.remaining) == (1.0, 7.0)


def test_after_a_resume_the_time_left_is_that_of_this_process_s_steps() -> None:
    """Parts start for 40 s, then 59 steps of 3 s are left."""
    clock = Clock()
    pace = Pace(total_steps=100, first_step=41, clock=clock)
    clock.now = 43.0
    pace.step(41, 3.0)
    assert (pace.step_seconds, pace.remaining) == (3.0, 59 * 3.0)


def test_validation_before_the_first_step_does_not_count_into_the_pace() -> None:
    clock = Clock()
    pace = Pace(total_steps=10, clock=clock)
    for step, now in ((0, 100.0), (1, 103.0), (2, 106.0)):
        clock.now = now
        pace.step(step)
    assert pace.step_seconds == 3.0
