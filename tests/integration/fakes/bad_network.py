"""A reverse proxy between operator and API server that makes writes fail, and tells the test of each.

Reads pass through untouched. Watches can be cut, and their events told twice or in another order. A server that is away
looks like one: the connection is closed without an answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import aiohttp
from aiohttp import web
from kube.control_plane import ControlPlane

WRITES = {"POST", "PUT", "PATCH", "DELETE"}
LEFT_OUT = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}


class BadNetwork:
    """The proxy.

    Attributes:
        before: asked before each write (its number from 1, method, path): an HTTP status makes the write fail unseen by
            the server, None lets it through.
        after: told after each write that went through; by then the caller hasn't got the answer yet.
        lose_answer: says of a write that went through whether its answer is lost.
        hang: says of a write whether it gets neither to the server nor an answer.
        tell: what the watch of a path delivers instead of an event (a line of JSON): twice the same, some from before.
        down: every call is answered with 503, as by a load balancer without a server.
        forgets: a group that is left out when the API server says which there are; None: none.
        forgot: how often that was so.
        requests: when each request came (monotonic seconds), reads and watches included.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.before: Callable[[int, str, str], int | None] = lambda _number, _method, _path: None
        self.after: Callable[[int, str, str], None] = lambda _number, _method, _path: None
        self.lose_answer: Callable[[int], bool] = lambda _number: False
        self.hang: Callable[[int], bool] = lambda _number: False
        self.tell: Callable[[str, bytes], list[bytes]] = lambda _path, line: [line]
        self.down = False
        self.forgets: str | None = None
        self.forgot = 0
        self.requests: list[float] = []
        self.writes = 0
        self.address = ""
        self._watches: set[web.StreamResponse] = set()
        self._session: aiohttp.ClientSession | None = None

    async def run(self, started: asyncio.Event) -> None:
        connector = aiohttp.TCPConnector(ssl=False, limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            self._session = session
            app = web.Application(client_max_size=64 * 1024 * 1024)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
                started.set()
                await asyncio.Event().wait()
            finally:
                await runner.cleanup()

    def cut_watches(self) -> None:
        """Drops every open watch."""
        for response in self._watches:
            response.force_close()
            if response._payload_writer is not None and response._req is not None:
                transport = response._req.transport
                if transport is not None:
                    transport.abort()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(time.monotonic())
        if self.down:
            return web.Response(status=503, text="no server")
        number = 0
        if request.method in WRITES:
            self.writes += 1
            number = self.writes
            if self.hang(number):
                await asyncio.Event().wait()
            status = self.before(number, request.method, request.path)
            if status is not None:
                refusal = {"kind": "Status", "reason": "Injected", "message": "the test wants it", "code": status}
                return web.json_response(refusal, status=status)
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in LEFT_OUT}
        url = self._plane.server + request.path_qs
        data = await request.read() or None
        try:
            return await self._pass_on(request, number, url, headers, data)
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)

    async def _pass_on(
        self, request: web.Request, number: int, url: str, headers: dict[str, str], data: bytes | None
    ) -> web.StreamResponse:
        assert self._session is not None
        async with self._session.request(
            request.method, url, headers=headers, data=data, skip_auto_headers=("Content-Type",)
        ) as answer:
            if request.query.get("watch") == "true":
                return await self._stream(request, answer)
            body = await answer.read()
            if request.path == "/apis" and self.forgets is not None:
                self.forgot += 1
                said = json.loads(body)
                said["groups"] = [group for group in said["groups"] if group["name"] != self.forgets]
                body = json.dumps(said).encode()
            if number:
                self.after(number, request.method, request.path)
                if self.lose_answer(number) and request.transport is not None:
                    request.transport.abort()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in LEFT_OUT}
            return web.Response(status=answer.status, body=body, headers=kept)

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._watches.add(response)
        try:
            with suppress(ConnectionResetError, aiohttp.ClientError):
                async for chunk in _lines(answer.content):
                    for line in self.tell(request.path, chunk):
                        await response.write(line)
        finally:
            self._watches.discard(response)
        return response


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream, however long."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line + b"\n"
