"""A leader whose lease runs out for a moment, because the machine is busy, looks at everything again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from rljob_operator import leader
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
