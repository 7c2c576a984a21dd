"""Signals as a wish to stop: which ones ask, and which end the process at once."""

from __future__ import annotations

import os
import signal

import pytest

from rljob_trainer.control import signals
from rljob_trainer.control.signals import SAME_WISH_SECONDS, StopRequest


class ExitedError(Exception):
    """The process would be gone."""


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only item. A process that ends at once raises ``ExitedError`` with its code."""

    def leave(code: int) -> None:
        raise ExitedError(code)

    time = [1000.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: time[0])
    monkeypatch.setattr(os, "_exit", leave)
    return time


def test_a_second_signal_ends_the_process_at_once(now: list[float]) -> None:
    stop = StopRequest()
    stop.ask(signal.SIGINT)
    assert stop
    assert stop.sentence == "SIGINT"
    now[0] += SAME_WISH_SECONDS + 0.01
    with pytest.raises(ExitedError, match="143"):
        stop.ask(signal.SIGTERM)


def test_a_signal_that_comes_twice_at_once_asks_once(now: list[float]) -> None:
    """`timeout 1h rljob run` sends SIGTERM to the process and then to its group: the checkpoint must not be lost."""
    stop = StopRequest()
    for _ in range(3):
        stop.ask(signal.SIGTERM)
        now[0] += SAME_WISH_SECONDS / 4
    assert stop.signal == signal.SIGTERM
    now[0] += SAME_WISH_SECONDS
    with pytest.raises(ExitedError, match="143"):
        stop.ask(signal.SIGTERM)


def test_a_closed_terminal_only_ever_asks(now: list[float]) -> None:
    stop = StopRequest()
    for _ in range(3):
        stop.ask(signal.SIGHUP)
        now[0] += 10
    assert stop.signal == signal.SIGHUP
