"""One real control plane for the session; a namespace, a KubeRay, fake kubelets and fake heads for each test."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fakes.bad_network import BadNetwork
from fakes.heads import FakeHeads
from fakes.kubelet import FakeKubelet
from fakes.kuberay import FakeKubeRay
from kube.control_plane import ControlPlane
from world import World

from rljob_api.crd import rendered
from testcluster.programs import ProgramMissingError, find

_WAITING_LONGEST = ("test_faults.py", "test_outages.py", "test_real_kuberay.py", "test_chaos.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for minutes begins first, so that nothing is left to wait for when all else is done."""
    order = {name: place for place, name in enumerate(_WAITING_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """kube-apiserver with the CRDs of rljob and KubeRay, and garbage collection."""
    try:
        programs = find(build=False)
    except ProgramMissingError as problem:
        pytest.fail(str(problem), pytrace=False)
    with ControlPlane(programs, tmp_path_factory.mktemp("control-plane")) as running:
        clusters = next(path for path in programs.crds if path.name == "ray.io_rayclusters.yaml")
        running.install_crds(clusters.read_bytes(), rendered().encode())
        running.start_controllers()
        yield running


@asynccontextmanager
async def _background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture(scope="module")
def kuberay(request: pytest.FixtureRequest, plane: ControlPlane) -> Iterator[str]:
    """Who makes the pods: "fake", or for modules that ask for it (see `world`) KubeRay's own operator: "real".

    That takes every namespace, so nobody may play it meanwhile; pytest runs the tests of a module with the one and then
    with the other.
    """
    which = getattr(request, "param", "fake")
    if which == "real":
        plane.install_missing_crds(plane.programs.crds)
        plane.start_kuberay()
    yield which
    if which == "real":
        plane.stop_program("ray-operator")


@pytest.fixture
async def world(plane: ControlPlane, kuberay: str, tmp_path: Path) -> AsyncIterator[World]:
    """A namespace with everything but the operator, which the test starts."""
    heads, started = FakeHeads(plane), asyncio.Event()
    async with _background(heads.run(started)) as serving:
        await asyncio.wait_for(started.wait(), 10)
        async with _namespace(plane, kuberay, heads, tmp_path) as made:
            made.players += serving
            yield made


@pytest.fixture
async def other_world(world: World, kuberay: str, tmp_path: Path) -> AsyncIterator[World]:
    """A second namespace with the same heads, whose plays go by the job's name alone: an operator has one address."""
    folder = tmp_path / "other"
    folder.mkdir()
    async with _namespace(world.plane, kuberay, world.heads, folder) as made:
        yield made


@asynccontextmanager
async def _namespace(plane: ControlPlane, kuberay: str, heads: FakeHeads, folder: Path) -> AsyncIterator[World]:
    namespace = f"test-{secrets.token_hex(4)}"
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    kubelet = FakeKubelet(plane, namespace)
    played = [FakeKubeRay(plane, namespace).run()] if kuberay == "fake" else []
    async with _background(kubelet.run(), *played) as players:
        made = World(plane, namespace, kubelet, heads, folder)
        made.players = players
        try:
            yield made
        finally:
            await made.stop_operator()
            await made.remove_jobs()
    plane.call("DELETE", f"/api/v1/namespaces/{namespace}")


@pytest.fixture
async def network(world: World) -> AsyncIterator[BadNetwork]:
    """What lies between the operator of `world` and the API server."""
    made, started = BadNetwork(world.plane), asyncio.Event()
    async with _background(made.run(started)):
        await asyncio.wait_for(started.wait(), 10)
        yield made
        await world.stop_operator()
