"""The watch over the driver's event loop sees the calls that it is there for. No Ray runs here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import loop_watch
import pytest

from rljob_trainer.aside import aside
from rljob_trainer.data.ahead import ReadAhead
from rljob_trainer.learner import bundles
from rljob_trainer.rollout import handle


class NoRayError(Exception):
    """Raised in place of what would ask Ray."""


def refuse(*_: Any, **__: Any) -> Any:
    raise NoRayError


async def in_the_loop(function: Callable[[], Any]) -> Any:
    """``aside``, taken out."""
    return function()


CALLS: dict[str, Callable[[], Awaitable[Any]]] = {
    "_remote": lambda: handle.RayEngine.start("0", None),  # type: ignore[arg-type]
    "placement_group": lambda: bundles.reserve(1, {"CPU": 1}, 1.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_ray_that_is_not_made_aside_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for owner, called in loop_watch.OF_RAY:
        monkeypatch.setattr(owner, called, refuse)
    monkeypatch.setattr(loop_watch, "found", {})
    loop_watch.watch_ray()

    async def calling() -> None:
        with pytest.raises(NoRayError):
            await CALLS[name]()

    for module in (handle, bundles):
        monkeypatch.setattr(module, "aside", aside)
    asyncio.run(calling())
    assert list(loop_watch.found) == []
    for module in (handle, bundles):
        monkeypatch.setattr(module, "aside", in_the_loop)
    asyncio.run(calling())
    (seen,) = loop_watch.found
    assert seen.startswith(f"ray.{name} at ")


def test_a_wait_for_rows_that_are_still_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Future, "result", Future.result)
    monkeypatch.setattr(loop_watch, "found", {})
    loop_watch.watch_futures()

    async def taking(ahead: ReadAhead[int], *, in_loop: bool) -> None:
        take = lambda: ahead.take(0, 0)  # noqa: E731
        assert (take() if in_loop else await aside(take)) == 0

    def rows() -> ReadAhead[int]:
        def read(epoch: int, position: int) -> list[int]:
            time.sleep(0.1)
            return [position]

        return ReadAhead(read, 100, 1)

    asyncio.run(taking(rows(), in_loop=False))
    assert list(loop_watch.found) == []
    asyncio.run(taking(rows(), in_loop=True))
    (seen,) = loop_watch.found
    assert seen.startswith("Future.result at ")
    assert "ahead.py" in seen


def test_data_that_are_read_in_the_loop_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hook itself is called here: it could not be taken away from this process again."""
    monkeypatch.setattr(loop_watch, "found", {})
    for opened in ("rows.jsonl", "rows.txt"):
        loop_watch.audit("open", (str(tmp_path / opened), "r", 0))
    assert list(loop_watch.found) == []

    async def reading() -> None:
        for opened in ("rows.jsonl", "rows.txt"):
            loop_watch.audit("open", (str(tmp_path / opened), "r", 0))

    asyncio.run(reading())
    (seen,) = loop_watch.found
    assert "rows.jsonl" in seen
