"""A leader whose lease runs out looks at everything again, and soon: whether the machine was busy for a moment, or the
API server away for long."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from rljob_operator import leader, watching
from rljob_operator.api_server import ApiServer
from rljob_operator.leader import Leader


class Leases:
    """The part of an API server that holds one Lease."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None

    async def get(self, _request: web.Request) -> web.Response:
        if self.lease is None:
            return web.json_response({"reason": "NotFound", "message": "no such lease"}, status=404)
        return web.json_response(self.lease)

    async def put(self, request: web.Request) -> web.Response:
        self.lease = await request.json()
        version = int(self.lease["metadata"].get("resourceVersion", "0")) + 1
        self.lease["metadata"]["resourceVersion"] = str(version)
        return web.json_response(self.lease)


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not there():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_lapse_that_ends_by_the_next_renewal_is_a_new_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "RENEW_SECONDS", 1.0)
    monkeypatch.setattr(leader, "RETRY_SECONDS", 0.2)
    leases, begun = Leases(), []
    app = web.Application()
    app.router.add_get("/apis/coordination.k8s.io/v1/namespaces/ours/leases/it", leases.get)
    app.router.add_put("/apis/coordination.k8s.io/v1/namespaces/ours/leases/it", leases.put)
    app.router.add_post("/apis/coordination.k8s.io/v1/namespaces/ours/leases", leases.put)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        async with ApiServer(Configuration(host=f"http://127.0.0.1:{port}")) as api:
            ours = Leader(api, "ours", "it", "us", on_gain=lambda: begun.append(time.monotonic()))
            task = asyncio.create_task(ours.run())
            try:
                await until(lambda: bool(begun))
                held = len(begun)
                # The process gets no time for longer than the lease holds.
                time.sleep(1.2)  # noqa: ASYNC251
                assert not ours.leads
                await until(lambda: ours.leads)
                await until(lambda: len(begun) > held)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
    finally:
        await runner.cleanup()


async def test_an_api_server_that_is_back_is_noticed_within_ten_seconds_however_long_it_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the operator's own schedule: whoever leads has all jobs looked at, and tries to lead with pauses that don't
    grow. (A namespace's claim is renewed with the lease, and nobody waits for what the watches are late with.)"""
    pauses: list[float] = []
    sleep, tried = asyncio.sleep, asyncio.Event()

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 200:
            tried.set()
        await sleep(0)

    async with ApiServer(Configuration(host="http://127.0.0.1:9")) as api:
        monkeypatch.setattr(asyncio, "sleep", noted)
        task = asyncio.create_task(Leader(api, "ours", "it", "us").run())
        try:
            async with asyncio.timeout(60):
                await tried.wait()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    # The server may come back just after a try has begun that nobody answers any more.
    longest_try = leader.RENEW_SECONDS - leader.RETRY_SECONDS
    assert longest_try + max(pauses) <= 7
    # The same of the watches, each of which connects anew.
    assert max(itertools.islice(watching.Endless(), 1000)) <= 7
