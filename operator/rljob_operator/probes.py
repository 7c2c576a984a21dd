"""The operator's HTTP side: /healthz, /readyz and /metrics.

/healthz is answered by the event loop itself: while that stalls there is no answer, and the kubelet's patience ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from prometheus_client import generate_latest

from rljob_operator.access import Access, AccessDecision
from rljob_operator.metrics import Metrics

METRICS_PATH = "/metrics"


class Probes:
    """Serves the probes.

    Args:
        is_ready: whether the watches have delivered what there is.
        refresh: called before metrics are read.
        access: says who may read /metrics; None: everybody who reaches the port.
    """

    def __init__(
        self,
        metrics: Metrics,
        is_ready: Callable[[], bool],
        refresh: Callable[[], None] = lambda: None,
        access: Access | None = None,
    ) -> None:
        self._metrics = metrics
        self._is_ready = is_ready
        self._refresh = refresh
        self._access = access

    async def run(self, host: str, port: int) -> None:
        """Serves until cancelled."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/readyz", self._ready),
                web.get(METRICS_PATH, self._show),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _request: web.Request) -> web.Response:
        if not self._is_ready():
            return web.Response(status=503, text="the watches have not synced yet\n")
        return web.Response(text="ok\n")

    async def _show(self, request: web.Request) -> web.Response:
        if self._access is not None:
            verdict = await self._access.verdict(request.headers.get("Authorization", ""))
            if verdict is not AccessDecision.ALLOWED:
                asks = {"WWW-Authenticate": "Bearer"} if verdict is AccessDecision.UNKNOWN_READER else {}
                return web.Response(status=verdict.status, text=f"{verdict.words}\n", headers=asks)
        self._refresh()
        page = await asyncio.to_thread(generate_latest, self._metrics.registry)
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4"})
