"""One real control plane for the session; a namespace, a fake KubeRay and fake heads for each test."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fakes.heads import FakeHeads
from fakes.kuberay import FakeKubeRay
from kube.control_plane import ControlPlane
from kube.programs import ProgramMissingError, find
from world import World

from rljob_api.crd import rendered


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
async def _background(*coroutines: object) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture
async def world(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[World]:
    """A namespace with everything but the operator, which the test starts."""
    namespace = f"test-{secrets.token_hex(4)}"
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    kuberay, heads = FakeKubeRay(plane), FakeHeads(plane)
    started = asyncio.Event()
    async with _background(kuberay.run(), heads.run(started)):
        await asyncio.wait_for(started.wait(), 10)
        made = World(plane, namespace, kuberay, heads, tmp_path)
        try:
            yield made
        finally:
            await made.stop_operator()
            await made.remove_jobs()
    plane.call("DELETE", f"/api/v1/namespaces/{namespace}")
