"""What somebody has deleted or changed beside a job's cluster is put back, and only that is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from simulation import KEY, SETTINGS, World

from rljob_operator import actions as do
from rljob_operator import names
from rljob_operator.api_server import ApiError
from rljob_operator.executor import Executor
from rljob_operator.memory import Memory
from rljob_operator.observed import JobView
from rljob_operator.settings import Settings


class Server:
    """An API server with ConfigMaps, Secrets and network policies, and who wrote them when."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.events: list[str] = []
        self._version = 0

    def find(self, plural: str) -> str:
        """The path of the only object of a kind."""
        (path,) = (path for path in self.objects if f"/{plural}/" in path)
        return path

    async def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if path.endswith("/events"):
            self.events.append(f"{body['reason']}: {body['message']}")
            return {}
        place = f"{path}/{body['metadata']['name']}"
        if place in self.objects:
            raise ApiError(409, "AlreadyExists", "there is one")
        return self._store(place, body)

    async def get(self, path: str) -> dict[str, Any]:
        # Kueue has the cluster: its groups are left alone.
        return {"spec": {"suspend": True}}

    async def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        (test,) = operations
        if path not in self.objects:
            raise ApiError(404, "NotFound", "there is none")
        if self.objects[path]["metadata"].get("labels", {}).get(names.JOB_LABEL) != test["value"]:
            raise ApiError(422, "Invalid", "the server rejected our request due to an error in our request")
        return deepcopy(self.objects[path])

    async def apply(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._store(path, body, apply=True)

    def _store(self, path: str, body: Mapping[str, Any], *, apply: bool = False) -> dict[str, Any]:
        """As server-side apply has it: the time of a manager's entry moves when that manager changes something."""
        self._version += 1
        there = self.objects.get(path, {"metadata": {"uid": f"uid-{self._version}"}})
        made = {**there, **deepcopy(dict(body)), "metadata": {**there["metadata"], **body["metadata"]}}
        known = any(entry["operation"] == "Apply" for entry in there["metadata"].get("managedFields", ()))
        if made != there or (apply and not known):
            entry = {"manager": names.FIELD_MANAGER, "operation": "Apply" if apply else "Update"}
            made["metadata"]["managedFields"] = [{**entry, "time": f"second {self._version}"}]
        self.objects[path] = made
        return deepcopy(made)


class Kept:
    """A job whose surroundings are looked after."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.server, self.memory = Server(), Memory("uid")
        world = World()
        world.settle(8)
        self.job: JobView = world.observed().job
        store = SimpleNamespace(
            clusters=lambda *_: [replace(found, token_key=KEY.id) for found in world.clusters.values()]
        )
        keys = SimpleNamespace(find=lambda key: KEY if key == KEY.id else None)
        self._executor = Executor(
            cast(Any, self.server), cast(Any, None), cast(Any, store), lambda: cast(Any, keys), settings
        )

    async def look_after(self) -> list[str]:
        """Returns what is told of it."""
        self.server.events.clear()
        assert self.job.job is not None
        self._executor._events._last.clear()
        action = do.KeepSurroundings("job-c1", 1, job_file=True)
        await self._executor._keep_surroundings(action, self.job, self.job.job, self.memory)
        return self.server.events


@pytest.fixture
async def kept() -> Kept:
    found = Kept()
    await found.look_after()
    await found.look_after()
    return found


def told(*paths: str) -> list[str]:
    kinds = {"configmaps": "ConfigMap", "secrets": "Secret", "networkpolicies": "NetworkPolicy"}
    names = sorted(f"{kinds[path.split('/')[-2]]} {path.split('/')[-1]}" for path in paths)
    return [f"PutBack: restored to the operator's version: {'; '.join(names)}"] if names else []


async def test_what_is_as_it_was_written_is_not_told_of(kept: Kept) -> None:
    assert len(kept.server.objects) == 3
    for _ in range(3):
        assert await kept.look_after() == []


@pytest.mark.parametrize("plurals", [("configmaps",), ("secrets",), ("networkpolicies",), ("configmaps", "secrets")])
async def test_what_was_deleted_is_put_back_and_told(kept: Kept, plurals: tuple[str, ...]) -> None:
    paths = [kept.server.find(plural) for plural in plurals]
    for path in paths:
        del kept.server.objects[path]
    assert await kept.look_after() == told(*paths)
    assert set(paths) <= kept.server.objects.keys()
    assert await kept.look_after() == []


@pytest.mark.parametrize(("plural", "section"), [("configmaps", "data"), ("networkpolicies", "spec")])
async def test_what_was_changed_is_put_back_and_told(kept: Kept, plural: str, section: str) -> None:
    path = kept.server.find(plural)
    before = kept.server.objects[path][section]
    kept.server.objects[path][section] = {}
    assert await kept.look_after() == told(path)
    assert kept.server.objects[path][section] == before
    assert await kept.look_after() == []


async def test_what_an_operator_that_has_just_begun_finds_is_not_told_of_but_what_it_misses(kept: Kept) -> None:
    path = kept.server.find("networkpolicies")
    kept.memory.own.clear()
    assert await kept.look_after() == []
    kept.memory.own.clear()
    del kept.server.objects[path]
    assert await kept.look_after() == told(path)
