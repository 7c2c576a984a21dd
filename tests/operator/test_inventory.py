"""When the watches have shown all there is: not before, and not never. And what is gone without a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from rljob_operator import api_server, inventory
from rljob_operator.api_server import ApiError, ApiServer
from rljob_operator.inventory import CUSTOM, FirstList, UnwatchedError, WatchMonitor, sweep_once
from rljob_operator.store import Key, Store

JOBS = "/apis/rljob.dev/v1alpha1/rljobs"


class Cluster:
    """An API server that knows the UIDs of some kinds; all others aren't installed."""

    def __init__(self, **uids: list[str]) -> None:
        self.uids = uids
        self.asked: list[str] = []
        self.again = asyncio.Event()
        """Set whenever a round of questions begins."""
        self.failures = 0
        self.on_question: Callable[[], object] = lambda: None

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        self.on_question()
        if request.path == JOBS:
            self.again.set()
        if self.failures:
            self.failures -= 1
            return web.json_response({"message": "nobody may"}, status=403)
        if request.path == "/apis/kueue.x-k8s.io" and "workloads" in self.uids:
            return web.json_response({"preferredVersion": {"version": "v1beta2"}})
        found = self.uids.get(request.path.rpartition("/")[2])
        if found is None:
            return web.json_response({"reason": "NotFound"}, status=404)
        assert request.headers["Accept"] == api_server.METADATA_ONLY
        labelled = request.path.endswith(("pods", "rayclusters"))
        assert request.query["labelSelector"] == ("rljob.dev/job" if labelled else "")
        begin, size = int(request.query.get("continue") or 0), int(request.query["limit"])
        rest = str(begin + size) if begin + size < len(found) else ""
        items = [{"metadata": {"uid": uid}} for uid in found[begin : begin + size]]
        return web.json_response({"metadata": {"continue": rest}, "items": items or None})


@asynccontextmanager
async def serving(cluster: Cluster) -> AsyncIterator[ApiServer]:
    app = web.Application()
    app.router.add_get("/{path:.*}", cluster.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with ApiServer(configuration) as api:
            yield api
    finally:
        await runner.cleanup()


@asynccontextmanager
async def waiting(
    cluster: Cluster, namespaces: tuple[str, ...] = ()
) -> AsyncIterator[tuple[FirstList, asyncio.Task[None]]]:
    async with serving(cluster) as api, asyncio.TaskGroup() as group:
        found = FirstList()
        task = group.create_task(found.wait(api, namespaces))
        yield found, task
        task.cancel()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "LONGEST_PAUSE", 0.1)


async def stays_incomplete(found: FirstList, cluster: Cluster) -> None:
    """After two more rounds of questions it still isn't complete."""
    for _ in range(3):
        cluster.again.clear()
        await asyncio.wait_for(cluster.again.wait(), 10)
    assert not found.complete


async def is_complete_after_the_last(cluster: Cluster) -> None:
    """Of the objects "a" to "e", and not before."""
    async with waiting(cluster) as (found, task):
        for uid in "abcd":
            found.saw(uid)
        await stays_incomplete(found, cluster)
        found.saw("e")
        await asyncio.wait_for(task, 10)
        assert found.complete


async def test_an_empty_cluster_is_known_at_once() -> None:
    async with waiting(Cluster(rljobs=[], pods=[])) as (found, task):
        await asyncio.wait_for(task, 10)
        assert found.complete


async def test_every_object_of_every_kind_is_waited_for() -> None:
    cluster = Cluster(rljobs=["a"], rayclusters=["b"], pods=["c"], persistentvolumeclaims=["d"], workloads=["e"])
    await is_complete_after_the_last(cluster)


async def test_pages_are_followed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_server, "LIST_CHUNK", 2)
    cluster = Cluster(rljobs=list("abcde"))
    await is_complete_after_the_last(cluster)


async def test_what_is_deleted_before_a_watch_could_show_it_is_not_waited_for() -> None:
    cluster = Cluster(rljobs=["a", "gone"])
    async with waiting(cluster) as (found, task):
        found.saw("a")
        await stays_incomplete(found, cluster)
        cluster.uids["rljobs"].remove("gone")
        await asyncio.wait_for(task, 10)


async def test_a_refusal_is_said_and_the_question_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(rljobs=[])
    cluster.failures = 2
    async with waiting(cluster) as (_, task):
        await asyncio.wait_for(task, 10)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "nobody may" in caplog.text


async def test_only_the_watched_namespaces_are_asked_about() -> None:
    cluster = Cluster(rljobs=[], pods=[])
    async with waiting(cluster, ("one", "two")) as (_, task):
        await asyncio.wait_for(task, 10)
    assert {path for path in cluster.asked if path.endswith("pods")} == {
        "/api/v1/namespaces/one/pods",
        "/api/v1/namespaces/two/pods",
    }


def an_object(plural: str) -> dict[str, Any]:
    metadata = {"name": f"one-of-{plural}", "namespace": "space", "uid": plural, "resourceVersion": "7"}
    owner = {"kind": "RayCluster", "uid": "rayclusters", "controller": True}
    labels = {"rljob.dev/job": "one-of-rljobs", "rljob.dev/job-uid": "rljobs"}
    return {"metadata": {**metadata, "labels": labels, "ownerReferences": [owner]}, "spec": {}, "status": {}}


def full_store() -> Store:
    """With one object of each kind, whose UID is the plural of its kind."""
    store = Store()
    store.put_job(an_object("rljobs"))
    store.put_cluster(an_object("rayclusters"))
    store.put_pod(an_object("pods"))
    store.put_claim(an_object("persistentvolumeclaims"))
    store.put_workload(an_object("workloads"))
    return store


KINDS = ("rljobs", "rayclusters", "pods", "persistentvolumeclaims", "workloads")


async def swept(store: Store, cluster: Cluster) -> list[Key]:
    changed: list[Key] = []
    async with serving(cluster) as api:
        await sweep_once(store, changed.append, api, ())
    return changed


def uids_of(store: Store) -> set[str]:
    return {raw["metadata"]["uid"] for objects in store.known().values() for raw in objects}


@pytest.mark.parametrize("gone", KINDS)
async def test_what_is_gone_without_a_word_is_forgotten_and_its_job_looked_at(gone: str) -> None:
    store = full_store()
    assert uids_of(store) == set(KINDS)
    changed = await swept(store, Cluster(**{kind: [kind] * (kind != gone) for kind in KINDS}))
    assert uids_of(store) == set(KINDS) - {gone}
    # Nobody has looked at the job, so it isn't known to name the claim.
    assert changed == [("space", "one-of-rljobs")] * (gone != "persistentvolumeclaims")


async def test_what_is_there_stays() -> None:
    store = full_store()
    assert await swept(store, Cluster(**{kind: [kind, f"another of {kind}"] for kind in KINDS})) == []
    assert uids_of(store) == set(KINDS)


async def test_a_kind_that_is_not_served_yet_loses_nothing() -> None:
    store = full_store()
    assert await swept(store, Cluster(pods=["pods"])) == []
    assert uids_of(store) == set(KINDS)


async def test_what_comes_while_the_server_answers_stays() -> None:
    store, late = Store(), an_object("pods")
    cluster = Cluster(**{kind: [] for kind in KINDS})
    cluster.on_question = lambda: store.put_pod(late)
    assert await swept(store, cluster) == []
    assert uids_of(store) == {"pods"}


async def test_without_an_answer_nothing_is_forgotten() -> None:
    store, cluster = full_store(), Cluster(rljobs=[])
    cluster.failures = 1
    with pytest.raises(ApiError):
        await swept(store, cluster)
    assert uids_of(store) == set(KINDS)


@pytest.fixture
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "UNHEARD_SECONDS", 0.02)


@pytest.mark.parametrize("plural", sorted(CUSTOM))
async def test_of_what_no_watch_has_told_the_operator_ends(frequent_looks: None, plural: str) -> None:
    listening = WatchMonitor()
    for other in CUSTOM - {plural}:
        listening.heard(other)
    async with serving(Cluster(**{plural: ["a"]})) as api:
        with pytest.raises(UnwatchedError, match=f"there are {plural}, but no watch covers them"):
            await asyncio.wait_for(listening.run(api, ()), 10)


async def test_what_a_watch_tells_of_between_two_looks_is_no_sign_of_a_deaf_one(frequent_looks: None) -> None:
    cluster, listening = Cluster(rljobs=[]), WatchMonitor()
    for other in CUSTOM - {"rljobs"}:
        listening.heard(other)
    looks = iter([["a"], ["b"]])  # one that is gone again before it is told of, and one that is told of late

    def next_look() -> None:
        cluster.uids["rljobs"] = next(looks, ["b"])
        if cluster.asked.count(JOBS) == 3:
            listening.heard("rljobs")

    cluster.on_question = next_look
    async with serving(cluster) as api:
        await asyncio.wait_for(listening.run(api, ()), 10)
    assert cluster.asked == [JOBS] * 3, "of kinds that have been heard of nothing is asked"


async def test_a_look_that_fails_says_nothing_of_the_watches(frequent_looks: None) -> None:
    cluster, listening = Cluster(rljobs=[], rayclusters=[]), WatchMonitor()
    cluster.failures = 2

    def be_heard() -> None:
        if cluster.asked.count(JOBS) == 3:
            for plural in CUSTOM:
                listening.heard(plural)

    cluster.on_question = be_heard
    async with serving(cluster) as api:
        await asyncio.wait_for(listening.run(api, ()), 10)
