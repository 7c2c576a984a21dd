"""What the kubelet and Prometheus are told, over HTTP: a stalled event loop gives no sign of life."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from test_api_server import serving

from rljob_operator.inventory import FirstList
from rljob_operator.metrics import Metrics
from rljob_operator.probes import Probes

STALLED_SECONDS = 1.0
"""How long the kubelet is patient, so to speak: an answer that isn't there by then never comes from a stalled loop."""


@dataclass
class Running:
    """Probes on an event loop of their own, as in the operator's process."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    metrics: Metrics = field(default_factory=Metrics)
    first_list: FirstList = field(default_factory=FirstList)
    port: int = 0

    def ask(self, path: str, seconds: float = 30.0) -> tuple[int, str, str]:
        """Status, type and text of an answer. A new connection for each question, like the kubelet's."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.headers["Content-Type"], response.read().decode()
        finally:
            connection.close()

    def status(self, path: str) -> int:
        return self.ask(path)[0]

    def refresh(self) -> None:
        self.metrics.queue.inc()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        made.port = free.getsockname()[1]
    probes = Probes(made.metrics, lambda: made.first_list.complete, made.refresh)
    task = made.loop.create_task(probes.run("127.0.0.1", made.port))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            made.loop.run_until_complete(task)
        made.loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    _wait_until_served(made, thread)
    yield made
    made.loop.call_soon_threadsafe(task.cancel)
    thread.join(30)
    assert not thread.is_alive()


def _wait_until_served(running: Running, thread: threading.Thread) -> None:
    while thread.is_alive():
        try:
            running.ask("/healthz")
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return
    raise AssertionError("the probes have ended")


def test_a_loop_that_stalls_gives_no_answer_until_it_goes_on(running: Running) -> None:
    assert running.ask("/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
    over, stalled = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        over.wait()

    running.loop.call_soon_threadsafe(stall)
    assert stalled.wait(30)
    try:
        with pytest.raises(TimeoutError):
            running.ask("/healthz", STALLED_SECONDS)
    finally:
        over.set()
    assert running.status("/healthz") == 200


def test_it_is_ready_once_the_watches_have_shown_what_there_is(running: Running) -> None:
    lists: list[str] = []

    async def one_job(request: web.Request, _number: int) -> web.Response:
        lists.append(request.path)
        if request.path.startswith("/apis/kueue"):
            return web.json_response({"reason": "NotFound"}, status=404)
        jobs = [{"metadata": {"uid": "known"}}] if request.path.endswith("/rljobs") else []
        return web.json_response({"items": jobs})

    async def wait() -> None:
        async with serving(one_job) as (api, _):
            await running.first_list.wait(api, ())

    waiting = asyncio.run_coroutine_threadsafe(wait(), running.loop)
    while len(lists) < 5 and not waiting.done():
        time.sleep(0.01)
    assert not waiting.done(), waiting.result()
    assert running.ask("/readyz")[0::2] == (503, "the watches have not synced yet\n")
    # Not ready isn't dead: a restart would begin the lists anew.
    assert running.status("/healthz") == 200
    running.loop.call_soon_threadsafe(running.first_list.saw, "known")
    waiting.result(30)
    assert running.ask("/readyz")[0::2] == (200, "ok\n")


def test_metrics_are_those_of_the_moment_they_are_read(running: Running) -> None:
    for reads in (1.0, 2.0):
        status, kind, page = running.ask("/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4")
        found = {sample.name: sample.value for part in text_string_to_metric_families(page) for sample in part.samples}
        assert found["rljob_queue_depth"] == reads
        assert "rljob_leader" in found
