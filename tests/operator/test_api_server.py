"""Which calls are made again at once: those that a busy server refused, and those whose connection broke on the way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from rljob_operator import api_server
from rljob_operator.api_server import ApiError, ApiServer

PATH = "/api/v1/namespaces/default/configmaps"
Answer = Callable[[web.Request, int], Awaitable[web.Response]]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_server, "BUSY_PAUSES", (0.01, 0.01))


@asynccontextmanager
async def serving(answer: Answer, call_seconds: float = 30.0) -> AsyncIterator[tuple[ApiServer, list[str]]]:
    """A client of a server whose n-th call (from 1) is answered so, and the calls it gets."""
    calls: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        calls.append(request.method)
        return await answer(request, len(calls))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with ApiServer(configuration, call_seconds=call_seconds) as api:
            yield api, calls
    finally:
        await runner.cleanup()


def cut(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_server_is_asked_again(status: int) -> None:
    async def busy_twice(_request: web.Request, number: int) -> web.Response:
        return web.json_response({"reason": "busy"}, status=status) if number < 3 else web.json_response({"a": 1})

    async with serving(busy_twice) as (api, calls):
        assert await api.create(PATH, {}) == {"a": 1}
        assert calls == ["POST"] * 3


async def test_a_broken_connection_is_no_answer_and_the_call_is_made_again() -> None:
    async def broken_twice(request: web.Request, number: int) -> web.Response:
        return cut(request) if number < 3 else web.json_response({"reason": "AlreadyExists"}, status=409)

    async with serving(broken_twice) as (api, calls):
        with pytest.raises(ApiError) as caught:
            await api.create(PATH, {})
        assert caught.value.conflict  # the server did what it was asked to the first time: the caller looks again
        assert calls == ["POST"] * 3


async def test_connections_that_always_break_end_in_an_error() -> None:
    async def broken(request: web.Request, _number: int) -> web.Response:
        return cut(request)

    async with serving(broken) as (api, calls):
        with pytest.raises(ApiError) as caught:
            await api.create(PATH, {})
        assert (caught.value.status, caught.value.cut_off, caught.value.passing) == (0, True, True)
        assert calls == ["POST"] * 3


async def test_a_silent_server_is_not_asked_again() -> None:
    async def silent(_request: web.Request, _number: int) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(silent, call_seconds=0.2) as (api, calls):
        with pytest.raises(ApiError, match="no answer in time") as caught:
            await api.create(PATH, {})
        assert (caught.value.status, caught.value.cut_off) == (0, False)
        assert calls == ["POST"]


async def test_a_server_that_is_away_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def no_pause(_seconds: float) -> None:
        raise AssertionError("it was asked again")

    async with ApiServer(Configuration(host=address)) as api:
        monkeypatch.setattr(api_server.asyncio, "sleep", no_pause)
        with pytest.raises(ApiError) as caught:
            await api.create(PATH, {})
    assert (caught.value.status, caught.value.cut_off) == (0, False)


async def test_what_the_server_refuses_is_not_asked_again() -> None:
    async def refused(_request: web.Request, _number: int) -> web.Response:
        return web.json_response({"reason": "Invalid", "message": "no"}, status=422)

    async with serving(refused) as (api, calls):
        with pytest.raises(ApiError, match="422 Invalid: no"):
            await api.create(PATH, {})
        assert calls == ["POST"]
