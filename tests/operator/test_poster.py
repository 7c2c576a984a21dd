"""The poster of events keeps `kubectl describe` readable and never costs a job anything."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web
from simulation import World
from test_api_server import serving

from rljob_operator import events
from rljob_operator.actions import Event
from rljob_operator.events import Poster
from rljob_operator.observed import JobView

STARTED = Event("Normal", "Starting", "attempt 1")
UNREACHABLE = Event("Warning", "RayUnreachable", "no answer")


@dataclass
class Posts:
    """A poster, its clock, and what the server has got of it."""

    now: float = 0.0
    refused: bool = False
    got: list[dict[str, Any]] = field(default_factory=list)
    poster: Poster = field(init=False)

    @property
    def told(self) -> list[tuple[str, str]]:
        """Job and reason of each."""
        return [(post["involvedObject"]["uid"], post["reason"]) for post in self.got]


@asynccontextmanager
async def posting() -> AsyncIterator[Posts]:
    posts = Posts()

    async def take(request: web.Request, _number: int) -> web.Response:
        assert request.path == "/api/v1/namespaces/space/events"
        if posts.refused:
            return web.json_response({"reason": "Forbidden", "message": "space is being terminated"}, status=403)
        posts.got.append(await request.json())
        return web.json_response({}, status=201)

    async with serving(take) as (api, _):
        posts.poster = Poster(api, clock=lambda: posts.now)
        yield posts


JOB = World().observed().job


def job(uid: str = "uid") -> JobView:
    return replace(JOB, uid=uid)


async def test_a_reason_is_told_once_a_minute_of_each_job() -> None:
    async with posting() as posts:
        await posts.poster.post(job(), [STARTED, UNREACHABLE, STARTED])
        posts.now = 59.9
        await posts.poster.post(job(), [UNREACHABLE])
        assert posts.told == [("uid", "Starting"), ("uid", "RayUnreachable")]
        await posts.poster.post(job("another"), [UNREACHABLE])
        assert posts.told[2:] == [("another", "RayUnreachable")]
        posts.now = 60.0
        await posts.poster.post(job(), [UNREACHABLE])
        assert posts.told[3:] == [("uid", "RayUnreachable")]


async def test_a_lost_event_is_logged_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rljob_operator.events")
    async with posting() as posts:
        posts.refused = True
        await posts.poster.post(job(), [STARTED])
        assert [record.getMessage() for record in caplog.records] == [
            "space/job: the event Starting could not be posted: 403 Forbidden: space is being terminated"
        ]
        posts.refused = False
        await posts.poster.post(job(), [STARTED, UNREACHABLE])
        assert posts.told == [("uid", "RayUnreachable")]


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        pytest.param("a" * 1024, "a" * 1024, id="as long as it may be"),
        pytest.param("a" * 1025, "a" * 1021 + "…", id="a letter too long"),
        pytest.param("é" * 1000, "é" * 510 + "…", id="two bytes a letter"),
        pytest.param("a" + "值" * 1000, "a" + "值" * 340 + "…", id="no letter is cut in two"),
    ],
)
async def test_a_note_has_at_most_the_bytes_that_kubernetes_takes(message: str, kept: str) -> None:
    async with posting() as posts:
        await posts.poster.post(job(), [Event("Warning", "InvalidSpec", message)])
        assert posts.got[0]["message"] == kept
        assert len(kept.encode()) <= 1024


async def test_what_was_told_is_forgotten_when_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_KEPT", 100)
    async with posting() as posts:
        for index in range(1000):
            posts.now = float(index)  # sixty of them are of the last minute
            await posts.poster.post(job(f"job {index}"), [STARTED])
            assert len(posts.poster._last) <= 101
        assert len(posts.got) == 1000
        # Those of the last minute are still known.
        await posts.poster.post(job("job 960"), [STARTED])
        assert len(posts.got) == 1000
