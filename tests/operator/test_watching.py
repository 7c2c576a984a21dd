"""kopf is told to write nothing, to watch only what is ours, and never to give up; when it does, that is said."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from rljob_operator import watching
from rljob_operator.inventory import LABELLED, UnwatchedError
from rljob_operator.store import Store

SERVED: dict[str, Any] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [{"name": "namespaces", "kind": "Namespace", "namespaced": False}]},
    "/apis": {"groups": [{"name": "rljob.dev", "versions": [{"version": "v1alpha1"}]}]},
    "/apis/rljob.dev/v1alpha1": {"resources": [{"name": "rljobs", "kind": "RLJob", "namespaced": True}]},
}
SERVED["/apis"]["groups"][0]["preferredVersion"] = {"version": "v1alpha1"}
for path in ("/api/v1", "/apis/rljob.dev/v1alpha1"):
    SERVED[path]["resources"][0] |= {"verbs": ["list", "watch"], "singularName": ""}


def test_kopf_writes_nothing_and_watches_what_is_ours() -> None:
    settings = watching.settings()
    assert settings.posting.enabled is False
    selectors = settings.watching.label_selectors
    assert len(selectors) == len(LABELLED) == 2
    assert set(selectors.values()) == {"rljob.dev/job"}


def test_reads_are_tried_for_ever_and_from_the_beginning_each_time() -> None:
    backoffs = watching.settings().networking.error_backoffs
    assert not isinstance(backoffs, int | float)
    for _ in range(2):
        pauses = list(itertools.islice(backoffs, 1000))
        assert pauses[0] == 0.5
        assert pauses[-1] == 4


async def watched(answer: Callable[[int], web.Response], watches: int) -> None:
    """Watches jobs of a played API server, whose n-th watch (from 1) is answered so; raises what the watching raises.
    Returns when so many watches were begun."""
    begun = 0
    enough = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        nonlocal begun
        if "watch" not in request.query:
            listed = {"metadata": {"resourceVersion": "1"}, "items": []}
            return web.json_response(listed if request.path.endswith("/rljobs") else SERVED.get(request.path, {}))
        begun += 1
        if begun >= watches:
            enough.set()
            await asyncio.Event().wait()
        return answer(begun)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        handlers = watching.registry(Store(), lambda _: None, lambda *_: None, configuration)
        async with asyncio.timeout(60):
            watch = asyncio.create_task(watching.watch(handlers, (), "it"))
            all_begun = asyncio.create_task(enough.wait())
            await asyncio.wait({watch, all_begun}, return_when=asyncio.FIRST_COMPLETED)
            all_begun.cancel()
            if watch.done():
                await watch
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
    finally:
        await runner.cleanup()


def told(code: int) -> dict[str, object]:
    return {"kind": "Status", "status": "Failure", "code": code, "reason": "Played", "message": "no conversion for it"}


def in_the_watch(code: int) -> web.Response:
    return web.Response(body=json.dumps({"type": "ERROR", "object": told(code)}).encode() + b"\n")


@pytest.mark.parametrize("code", [400, 404, 410])
async def test_a_watch_that_is_refused_is_said_to_be(code: int) -> None:
    with pytest.raises(UnwatchedError, match=r"watches have ended .*no conversion for it.*; the operator exits"):
        await watched(lambda _: web.json_response(told(code), status=code), watches=100)


@pytest.mark.parametrize("code", [400, 500, 504])
async def test_an_error_in_a_watch_is_said(code: int) -> None:
    with pytest.raises(UnwatchedError, match=r"watches have ended .*no conversion for it.*; the operator exits"):
        await watched(lambda _: in_the_watch(code), watches=100)


async def test_a_version_that_is_forgotten_and_a_busy_server_end_no_watch() -> None:
    def answer(number: int) -> web.Response:
        if number == 1:
            return in_the_watch(410)
        return web.json_response(told(500), status=500) if number == 2 else web.Response(body=b"")

    await watched(answer, watches=5)
