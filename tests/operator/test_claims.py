"""Two operators over one namespace: one acts there, the other waits until the first has gone, and says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from simulation import World
from test_api_server import serving

from rljob_operator import claims
from rljob_operator.api_server import ApiServer
from rljob_operator.claims import Claims

SPACE = "space"
JOB = World().observed().job


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same proportions as in earnest."""
    for name, seconds in (("LEASE", 2.4), ("HOLD", 1.8), ("RENEW", 0.2), ("LOOK", 0.1), ("PAUSE", 0.05)):
        monkeypatch.setattr(claims, f"{name}_SECONDS", seconds)


@dataclass
class Server:
    """The part of an API server that keeps Leases, with the checks of their versions, and events."""

    leases: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    refuses: bool = False
    written: int = 0

    async def answer(self, request: web.Request, _number: int) -> web.Response:
        if request.path.endswith("/events"):
            self.events.append(await request.json())
            return web.json_response({}, status=201)
        if self.refuses:
            return web.json_response({"reason": "Forbidden", "message": "leases is forbidden"}, status=403)
        name = request.path if request.method != "POST" else f"{request.path}/{claims.CLAIM}"
        known = self.leases.get(name)
        if request.method == "POST":
            if known is not None:
                return web.json_response({"reason": "AlreadyExists"}, status=409)
            return self._keep(name, await request.json())
        if known is None:
            return web.json_response({"reason": "NotFound"}, status=404)
        if request.method == "DELETE":
            del self.leases[name]
        if request.method == "PUT":
            body = await request.json()
            if body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
                return web.json_response({"reason": "Conflict"}, status=409)
            return self._keep(name, body)
        return web.json_response(known)

    def _keep(self, name: str, lease: dict[str, Any]) -> web.Response:
        self.written += 1
        lease["metadata"] |= {"resourceVersion": str(self.written), "uid": lease["metadata"].get("uid", str(len(name)))}
        self.leases[name] = lease
        return web.json_response(lease)


@dataclass
class Installation:
    """One of them, with what it watches."""

    claims: Claims
    wanted: set[str]
    changes: list[str]
    task: asyncio.Task[None]

    async def vanish(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Start = Callable[[str], Installation]


@asynccontextmanager
async def installations(server: Server) -> AsyncIterator[Start]:
    started: list[Installation] = []

    def start(name: str) -> Installation:
        wanted, changes = {SPACE}, []
        made = Claims(api, name, lambda: True, lambda: wanted, changes.append)
        started.append(Installation(made, wanted, changes, asyncio.create_task(made.run())))
        return started[-1]

    async with serving(server.answer) as (api, _):
        assert isinstance(api, ApiServer)
        yield start
        for each in started:
            await each.vanish()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_second_does_nothing_says_so_and_takes_over_when_the_first_has_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "rljob_operator")
    server, both = Server(), 0
    async with installations(server) as start:
        first = start("a/operator")
        await until(lambda: first.claims.holds(SPACE))
        second = start("b/operator")
        await until(lambda: second.claims.other(SPACE) == "a/operator")
        assert not second.claims.holds(SPACE)
        assert second.changes == [SPACE]
        assert dict(second.claims.others) == {SPACE: "a/operator"}
        assert "another operator (a/operator) manages the RLJobs of the namespace space" in caplog.text
        assert await second.claims.tell(JOB) > 3000
        await second.claims.tell(JOB)
        (event,) = server.events
        assert (event["type"], event["reason"], event["involvedObject"]["name"]) == ("Warning", "OtherOperator", "job")
        assert "another operator (a/operator) manages" in event["message"]
        # However long: it stays so.
        await asyncio.sleep(1.2 * claims.LEASE_SECONDS)
        assert (first.claims.holds(SPACE), second.claims.holds(SPACE)) == (True, False)
        await first.vanish()

        def taken_over() -> bool:
            nonlocal both
            both += first.claims.holds(SPACE) and second.claims.holds(SPACE)
            return second.claims.holds(SPACE)

        await until(taken_over)
        assert both == 0
        assert second.changes == [SPACE, SPACE]
        assert second.claims.other(SPACE) == ""
        assert "b/operator acts in the namespace space, previously claimed by a/operator" in caplog.text


async def test_of_many_that_begin_at_once_one_gets_the_namespace() -> None:
    async with installations(Server()) as start:
        all_of_them = [start(f"{name}/operator") for name in "abcdef"]
        await until(lambda: any(each.claims.holds(SPACE) for each in all_of_them))
        for _ in range(20):
            assert sum(each.claims.holds(SPACE) for each in all_of_them) <= 1
            await asyncio.sleep(0.05)


async def test_another_replica_of_the_same_installation_goes_on_at_once() -> None:
    server = Server()
    async with installations(server) as start:
        first = start("a/operator")
        await until(lambda: first.claims.holds(SPACE))
        await first.vanish()
        (lease,) = server.leases.values()
        acquired = lease["spec"]["acquireTime"]
        successor = start("a/operator")
        async with asyncio.timeout(claims.LEASE_SECONDS / 2):
            await until(lambda: successor.claims.holds(SPACE))
        (lease,) = server.leases.values()
        assert lease["spec"]["acquireTime"] == acquired


async def test_a_namespace_without_jobs_is_given_back() -> None:
    server = Server()
    async with installations(server) as start:
        first = start("a/operator")
        await until(lambda: first.claims.holds(SPACE))
        first.wanted.clear()
        await until(lambda: not server.leases)
        assert not first.claims.holds(SPACE)
        second = start("b/operator")
        await until(lambda: second.claims.holds(SPACE))


async def test_a_claim_that_somebody_deletes_does_not_make_two_act() -> None:
    server = Server()
    async with installations(server) as start:
        first = start("a/operator")
        await until(lambda: first.claims.holds(SPACE))
        second = start("b/operator")
        await until(lambda: second.claims.other(SPACE) != "")
        server.leases.clear()
        for _ in range(40):
            assert not (first.claims.holds(SPACE) and second.claims.holds(SPACE))
            await asyncio.sleep(0.02)
        assert first.claims.holds(SPACE)


async def test_who_may_not_claim_acts_on_nothing_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(refuses=True)
    async with installations(server) as start:
        only = start("a/operator")
        await until(lambda: "nothing is done in the namespace space until it can be claimed" in caplog.text)
        assert not only.claims.holds(SPACE)
        await asyncio.sleep(0.3)
        assert caplog.text.count("leases is forbidden") == 1
        server.refuses = False
        await until(lambda: only.claims.holds(SPACE))
        # Its right is taken away: what it holds runs out.
        server.refuses = True
        await until(lambda: not only.claims.holds(SPACE))
