"""Requests over a socket: answers, refusals, and finding the process that listens."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from testcluster import control


def serve(words: list[str]) -> str:
    if words == ["fail"]:
        raise ValueError("as asked")
    return " ".join(reversed(words))


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "control.sock"
    listening = control.listen(path)
    ended = threading.Event()

    def answer() -> None:
        listening.settimeout(0.05)
        while not ended.is_set():
            try:
                control.answer(listening, serve)
            except TimeoutError:
                continue

    thread = threading.Thread(target=answer)
    thread.start()
    yield path
    ended.set()
    thread.join()
    listening.close()


def test_a_request_gets_its_answer(socket_path: Path) -> None:
    assert control.ask(socket_path, "one two three") == "three two one"


def test_a_refusal_is_an_error_with_the_reason(socket_path: Path) -> None:
    with pytest.raises(control.RefusedError, match="as asked"):
        control.ask(socket_path, "fail")
    assert control.ask(socket_path, "still there") == "there still"


def test_the_listener_is_found_and_not_disturbed(socket_path: Path) -> None:
    assert control.listener_of(socket_path) == os.getpid()
    assert control.ask(socket_path, "a b") == "b a"


def test_nobody_listens_where_nobody_does(tmp_path: Path) -> None:
    assert control.listener_of(tmp_path / "nobody.sock") is None
    with pytest.raises(OSError, match="No such file"):
        control.ask(tmp_path / "nobody.sock", "hello")
