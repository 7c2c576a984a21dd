"""The live view says what it should at every width, and leaves the terminal as it found it."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from rljob_trainer.telemetry.live import LiveView, _Painter
from rljob_trainer.telemetry.open_view import open_view
from rljob_trainer.telemetry.view import JobSummary, Present, ShownStep

JOB = JobSummary(name="quickstart", algorithm="grpo", model="llama", output="runs/q", total_steps=200)
METRICS = {
    "reward/mean": 0.5,
    "response/length/mean": 123.4,
    "response/length/clip_ratio": 0.034,
    "actor/entropy": 1.2345,
    "actor/clip_fraction": 0.1,
    "kl/reference": 0.0123,
    "throughput/tokens_per_second": 14_567.0,
    "validation/mean": 0.75,
}
DOING = "trainer waits for 12/32 samples; oldest running 4 s on engine 0 (4 s so far, times out in 59 min)"
SHARES = {"generate": 0.6, "update": 0.3, "other": 0.1}


def shown(view: LiveView, width: int, height: int = 40) -> list[str]:
    view._console = Console(record=True, width=width, height=height, file=io.StringIO(), force_terminal=True)
    view._console.print(view.picture())
    return view._console.export_text().splitlines()


def running_view(steps: int = 50) -> LiveView:
    now = [0.0]
    view = LiveView(clock=lambda: now[0])
    view._job = JOB
    view._pace._total = JOB.total_steps
    for step in range(1, steps + 1):
        now[0] += 2.0
        view.step(ShownStep(step, METRICS | {"reward/mean": step / steps}))
    view.show(Present(DOING, ["engines 0, 1 work on 20 requests, the oldest for 4 s on engine 0"], SHARES))
    now[0] += 5.0
    return view


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_picture_holds_the_facts_and_fits(width: int) -> None:
    lines = shown(running_view(), width)
    text = "\n".join(lines)
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= 24 if width >= 80 else len(lines) <= 28
    for fact in ("quickstart", "grpo", "step 50 of 200", "1 min 45 s, 4 min 55 s left", "reward 1.00"):
        assert fact in text, fact
    for figure, value in (
        ("validation", "0.750"),
        ("response length", "123"),
        ("truncated", "3.4 %"),
        ("entropy", "1.23"),
        ("KL to reference", "0.012"),
        ("clip fraction", "10 %"),
        ("tokens/s", "14.6k"),
    ):
        (line,) = [line for line in lines if figure in line]
        assert value in line
    assert "generate 60 %" in text
    assert DOING[: width - 10] in text
    assert "engines 0, 1 work on 20 requests, the oldest for 4 s on engine 0"[: width - 10] in text
    assert "explained variance" not in text  # this job has no critic


def test_a_stage_keeps_its_colour_when_another_one_takes_more_time() -> None:
    seen = []
    for shares in ({"generate": 0.6, "update": 0.3, "other": 0.1}, {"update": 0.6, "generate": 0.3, "other": 0.1}):
        view = running_view()
        view.show(Present(DOING, [], shares))
        parts = [*Console(width=100).render(view.picture())]
        marks = [i for i, part in enumerate(parts) if part.text == "■ "]
        seen.append({parts[i + 1].text.split()[0]: parts[i].style for i in marks})
    assert seen[0] == seen[1]
    assert len({str(style) for style in seen[0].values()}) == 3


def test_the_curve_rises_with_the_reward() -> None:
    lines = shown(running_view(), 100)
    plot = [[i for i, c in enumerate(line) if "⠁" <= c <= "⣿"] for line in lines]
    rows = [columns for columns in plot if columns]
    assert len(rows) == 7
    lefts = [columns[0] for columns in rows]
    assert lefts == sorted(lefts, reverse=True)


def test_the_first_picture_needs_no_step() -> None:
    view = LiveView(clock=lambda: 0.0)
    view._job = JOB
    assert "step 0 of 200" in "\n".join(shown(view, 80))


def test_rewards_that_are_not_numbers_leave_a_gap() -> None:
    view = running_view()
    for step, reward in ((51, math.nan), (52, math.inf), (53, 0.25)):
        view.step(ShownStep(step, {"reward/mean": reward}))
    assert "reward 0.250" in "\n".join(shown(view, 80))


def test_a_job_without_an_end_shows_no_bar() -> None:
    view = LiveView(clock=lambda: 0.0)
    view.step(ShownStep(7, METRICS))
    text = "\n".join(shown(view, 80))
    assert "step 7" in text
    assert "left" not in text
    assert "━" not in text


def test_shares_and_engines_are_those_of_the_moment_also_between_two_steps() -> None:
    view = running_view()
    view.show(Present("the trainer is working: advantage for 2 s", ["engine 0 waits for prompts"], {"update": 0.8}))
    text = "\n".join(shown(view, 100))
    assert "update 80 %" in text
    assert "generate" not in text
    assert "the trainer is working: advantage for 2 s" in text
    assert "engine 0 waits for prompts" in text


def test_the_painter_sleeps_until_something_changes() -> None:
    painted = threading.Semaphore(0)
    painter = _Painter(painted.release, interval=0.0)
    painter.start()
    assert not painted.acquire(timeout=0.2)
    painter.changed()
    assert painted.acquire(timeout=20)
    assert not painted.acquire(timeout=0.2)
    painter.stop()
    assert painter._thread is not None
    assert not painter._thread.is_alive()


PROGRAM = """
import sys, time
from rljob_trainer.telemetry.open_view import open_view
from rljob_trainer.telemetry.view import JobSummary, Present, ShownStep
with open_view() as view:
    view.start(JobSummary(name="quickstart", algorithm="grpo", model="llama", total_steps=200))
    view.step(ShownStep(1, {"reward/mean": 0.5}))
    view.message("a [bold]line[/bold] of log")
    view.show(Present("READY"))
    %s
"""


def hear_signals() -> None:
    """A shell starts background jobs deaf to some signals, and that is inherited."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def in_terminal(body: str, *, then: signal.Signals | None = None) -> tuple[str, int]:
    """Runs PROGRAM on a pseudo terminal, sends ``then`` once READY is drawn; returns the output and the exit code."""
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM % body],
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment,
        preexec_fn=hear_signals,
    )
    os.close(child)
    output, deadline, sent = b"", time.monotonic() + 60, False
    with contextlib.suppress(OSError):  # the terminal's other end is closed when the process has ended
        while time.monotonic() < deadline:
            if select.select([parent], [], [], 0.5)[0]:
                output += os.read(parent, 65536)
            if then and not sent and b"READY" in output:
                process.send_signal(then)
                sent = True
    os.close(parent)
    return output.decode(errors="replace"), process.wait(timeout=10)


def cursor_is_back(output: str) -> bool:
    return output.count("\x1b[?25l") >= 1 and output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")


def test_the_cursor_is_back_after_a_clean_end() -> None:
    output, code = in_terminal("pass")
    assert code == 0
    assert cursor_is_back(output)
    assert "a [bold]line[/bold] of log" in output


def test_the_cursor_is_back_after_an_exception_whose_traceback_is_whole() -> None:
    output, code = in_terminal("raise RuntimeError('boom')")
    assert code == 1
    assert cursor_is_back(output)
    assert "RuntimeError: boom" in output


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_cursor_is_back_after_a_signal(sent: signal.Signals) -> None:
    output, code = in_terminal("time.sleep(60)", then=sent)
    assert cursor_is_back(output)
    assert code == -sent  # and the process died of it, as its parent expects


def test_the_cursor_is_back_when_the_program_forgets_to_close() -> None:
    output, code = in_terminal("import threading; view.__class__.__exit__ = lambda *a: None")
    assert code == 0
    assert cursor_is_back(output)


def test_a_handler_of_the_driver_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        mine = lambda number, frame: None  # noqa: E731
        signal.signal(signal.SIGTERM, mine)
        with LiveView(Console(file=io.StringIO(), force_terminal=True, width=80)) as view:
            view.start(JOB)
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    view = LiveView(Console(file=io.StringIO(), force_terminal=True, width=80))
    view.start(JOB)
    view.close()
    view.close()


def test_a_terminal_gets_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_view(io.StringIO(), plain=False), LiveView)
