"""One real control plane for the session; a namespace, a fake KubeRay and fake heads for each test."""

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


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """kube-apiserver with the CRDs of rljob and KubeRay, and garbage collection."""
    try:
        programs = find(build=False)
    except ProgramMissingError as problem:
        pytest.fail(str(problem), pytrace=False)
    with ControlPlane(programs, tmp_path_factory.mktemp("control-plane")) as running:
        running.install_crd(next(path for path in programs.crds if path.name == "ray.io_rayclusters.yaml").read_bytes())
        running.install_crd(rendered().encode())
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


@pytest.fixture
async def world(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[World]:
    """A namespace with everything but the operator, which the test starts."""
    namespace = _namespace(plane)
    kuberay = FakeKubeRay(plane, namespace)
    async for made in _world(plane, namespace, kuberay, kuberay, tmp_path):
        yield made


@pytest.fixture
async def other_world(world: World, tmp_path: Path) -> AsyncIterator[World]:
    """A second namespace with the same heads, whose plays go by the job's name alone: an operator has one address."""
    namespace = _namespace(world.plane)
    kuberay = FakeKubeRay(world.plane, namespace)
    folder = tmp_path / "other"
    folder.mkdir()
    async with _background(kuberay.run()) as players:
        made = World(world.plane, namespace, kuberay, world.heads, folder)
        made.players = players
        try:
            yield made
        finally:
            await made.stop_operator()
            await made.remove_jobs()
    world.plane.call("DELETE", f"/api/v1/namespaces/{namespace}")


@pytest.fixture
async def real_world(plane: ControlPlane, kuberay_process: None, tmp_path: Path) -> AsyncIterator[World]:
    """The same with KubeRay itself; only the kubelets are played."""
    namespace = _namespace(plane)
    async for made in _world(plane, namespace, FakeKubelet(plane, namespace), None, tmp_path):
        yield made


@pytest.fixture(scope="module")
def kuberay_process(plane: ControlPlane) -> Iterator[None]:
    """KubeRay's own operator. It takes every namespace, so no test of the module may play it."""
    plane.install_missing_crds(plane.programs.crds)
    plane.start_kuberay()
    yield
    plane.stop_program("ray-operator")


@pytest.fixture
async def network(world: World) -> AsyncIterator[BadNetwork]:
    """What lies between the operator of `world` and the API server."""
    async for made in _network(world):
        yield made


@pytest.fixture
async def real_network(real_world: World) -> AsyncIterator[BadNetwork]:
    """The same for `real_world`."""
    async for made in _network(real_world):
        yield made


async def _network(world: World) -> AsyncIterator[BadNetwork]:
    made, started = BadNetwork(world.plane), asyncio.Event()
    async with _background(made.run(started)):
        await asyncio.wait_for(started.wait(), 10)
        yield made
        await world.stop_operator()


def _namespace(plane: ControlPlane) -> str:
    name = f"test-{secrets.token_hex(4)}"
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


async def _world(
    plane: ControlPlane, namespace: str, player: FakeKubeRay | FakeKubelet, kuberay: FakeKubeRay | None, folder: Path
) -> AsyncIterator[World]:
    heads, started = FakeHeads(plane), asyncio.Event()
    async with _background(player.run(), heads.run(started)) as players:
        await asyncio.wait_for(started.wait(), 10)
        made = World(plane, namespace, kuberay, heads, folder)
        made.players = players
        try:
            yield made
        finally:
            await made.stop_operator()
            await made.remove_jobs()
    plane.call("DELETE", f"/api/v1/namespaces/{namespace}")
