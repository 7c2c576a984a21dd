"""How the operator's process ends."""

from __future__ import annotations

import asyncio
import logging

import pytest
from kubernetes.aio.client.configuration import Configuration

from rljob_operator import __main__ as program
from rljob_operator import credentials
from rljob_operator.inventory import UnwatchedError
from rljob_operator.operator import Operator, Options


def ended_by(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> int:
    """The exit code of an operator whose parts raise these."""

    async def login() -> Configuration:
        return Configuration("http://127.0.0.1:9")

    async def run(_: Operator) -> None:
        raise ExceptionGroup("unhandled errors in a TaskGroup", errors)

    monkeypatch.setattr(credentials, "login", login)
    monkeypatch.setattr(Operator, "run", run)
    return asyncio.run(program.run(Options()))


def test_one_that_hears_nothing_says_so_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert ended_by(monkeypatch, UnwatchedError("no watch covers them")) == 1
    assert caplog.messages == ["no watch covers them"]


def test_of_any_other_error_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        ended_by(monkeypatch, UnwatchedError("no watch covers them"), KeyError("another"))
    assert [type(error) for error in raised.value.exceptions] == [UnwatchedError, KeyError]
