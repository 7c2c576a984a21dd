"""The operator's /metrics, with the chart's roles on the real API server: no tenant's figures for strangers."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from fakes.bad_network import BadNetwork
from helm import program, render
from world import World

pytestmark = pytest.mark.timeout(400)


class Installed:
    """The chart's roles, with a Prometheus bound to the reader's, and accounts of the operator's namespace."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        reader = f'[{{"kind":"ServiceAccount","name":"prometheus","namespace":"{world.namespace}"}}]'
        watched = f"--set=watchNamespaces={{{world.namespace}}}"
        documents = [
            document
            for document in render(
                program(), watched, f"--set-json=metrics.readers={reader}", namespace=world.namespace
            )
            if document["apiVersion"].startswith("rbac") or document["kind"] == "ServiceAccount"
        ]
        documents += [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": world.namespace}}
            for name in ("prometheus", "tenant")
        ]
        self._manifest = folder / "roles.yaml"
        self._manifest.write_text(yaml.safe_dump_all(documents))
        world.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(self._manifest))

    def remove(self) -> None:
        self.world.plane.kubectl("delete", "--wait=false", "-f", str(self._manifest))

    def token(self, account: str) -> str:
        path = f"/api/v1/namespaces/{self.world.namespace}/serviceaccounts/{account}/token"
        answer = self.world.plane.call("POST", path, {"spec": {"expirationSeconds": 600}})
        return str(answer["status"]["token"])


def read(port: int, token: str | None) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


async def test_only_whom_the_cluster_lets_sees_the_figures_of_jobs(
    world: World, network: BadNetwork, tmp_path: Path
) -> None:
    installed = Installed(world, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world.start_operator(network.address, token=installed.token("rl-rljob-operator"), probe_port=port)

    async def ask(token: str | None) -> tuple[int, str]:
        # The operator's questions come through this event loop.
        return await asyncio.to_thread(read, port, token)

    prometheus, tenant = installed.token("prometheus"), installed.token("tenant")

    async def answers() -> bool:
        try:
            return (await ask(prometheus))[0] == 200
        except OSError:
            return False

    # The roles reach the authorizer's memory a moment after they are made.
    await world.until("its reader is let in", answers)
    assert "rljob_leader" in (await ask(prometheus))[1]
    for token, status in ((None, 401), ("invented", 401), (tenant, 403)):
        code, page = await ask(token)
        assert (code, "rljob_" in page) == (status, False)
    # A reader who has not been asked about, while the API server is away.
    network.before = lambda _number, _method, path: 503 if path.endswith("reviews") else None
    code, page = await ask(installed.token("prometheus"))
    assert (code, "rljob_" in page) == (503, False)
    installed.remove()
