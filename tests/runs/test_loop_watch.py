"""The watch over the driver's event loop sees the calls that it is there for. No Ray runs here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import loop_watch
import pytest

from rljob_trainer.aside import aside
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
