"""Log records reach the person watching, each once."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from rljob_trainer.telemetry.logs import logs_shown
from rljob_trainer.telemetry.plain import PlainView


def test_records_become_messages_from_their_level_on() -> None:
    text = io.StringIO()
    ours, theirs = logging.getLogger("rljob_trainer.rewards"), logging.getLogger("somebody.else")
    with logs_shown(PlainView(text), "info"):
        ours.debug("too small")
        ours.info("engine %d is ready", 0)
        ours.warning("a reward timed out")
        theirs.info("chatter")
        theirs.warning("deprecated")
    ours.warning("after the run")
    assert text.getvalue().splitlines() == [
        "engine 0 is ready",
        "warning: a reward timed out",
        "warning: deprecated",
    ]


def test_a_traceback_is_shown_whole() -> None:
    text = io.StringIO()
    with logs_shown(PlainView(text), "error"):
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("rljob_trainer").exception("reward failed")
    assert text.getvalue().startswith("error: reward failed\nTraceback")
    assert "ValueError: boom" in text.getvalue()


def test_a_handler_that_writes_to_the_terminal_is_put_aside(capsys: pytest.CaptureFixture[str]) -> None:
    root, handler, text = logging.getLogger(), logging.StreamHandler(sys.stderr), io.StringIO()
    root.addHandler(handler)
    try:
        with logs_shown(PlainView(text)):
            logging.getLogger("rljob_trainer").warning("once")
            logging.getLogger("somebody").warning("once more")
        assert handler in root.handlers
    finally:
        root.removeHandler(handler)
    assert text.getvalue().splitlines() == ["warning: once", "warning: once more"]
    assert capsys.readouterr().err == ""


def test_logging_is_as_before_afterwards() -> None:
    ours = logging.getLogger("rljob_trainer")
    before = (ours.level, ours.propagate, list(ours.handlers), list(logging.getLogger().handlers))
    with logs_shown(PlainView(io.StringIO()), "debug"):
        assert ours.isEnabledFor(logging.DEBUG)
    assert (ours.level, ours.propagate, list(ours.handlers), list(logging.getLogger().handlers)) == before
