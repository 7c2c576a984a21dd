"""Credentials as other people's clusters have them: given by a plugin, renewed in a file, refused when they are old."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from aiohttp import web
from kubernetes.aio.config import incluster_config

from rljob_operator import credentials, watching
from rljob_operator.api_server import ApiServer, core
from rljob_operator.store import Store

JOBS = "/apis/rljob.dev/v1alpha1/rljobs"
SERVED: dict[str, Any] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": []},
    "/apis": {"groups": [{"name": "rljob.dev", "versions": [{"version": "v1alpha1"}]}]},
    "/apis/rljob.dev/v1alpha1": {"resources": []},
}
for path, name, kind in (("/api/v1", "namespaces", "Namespace"), ("/apis/rljob.dev/v1alpha1", "rljobs", "RLJob")):
    served = {"name": name, "kind": kind, "singularName": kind.lower(), "namespaced": kind == "RLJob"}
    SERVED[path]["resources"].append({**served, "verbs": ["list", "watch"]})
SERVED["/apis"]["groups"][0]["preferredVersion"] = SERVED["/apis"]["groups"][0]["versions"][0]


class Server:
    """An API server that serves nothing but RLJobs, of which there are none, to those who have the token of the day."""

    def __init__(self) -> None:
        self.accepted = "one"
        self.watchers: list[str] = []
        self.refused = 0
        self.address = ""
        self.came = asyncio.Event()
        self._cut = asyncio.Event()

    def change_token(self, token: str) -> None:
        """From now on only this one is accepted, and watches have to begin anew."""
        self.accepted = token
        self.came.clear()
        self._cut.set()
        self._cut = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token != self.accepted:
            self.refused += 1
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        if request.path != JOBS:
            return web.json_response(SERVED.get(request.path, {}))
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        response = web.StreamResponse()
        await response.prepare(request)
        self.watchers.append(token)
        self.came.set()
        await self._cut.wait()
        return response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    played = Server()
    app = web.Application()
    app.router.add_get("/{path:.*}", played.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        played.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield played
    finally:
        await runner.cleanup()


def write_kubeconfig(folder: Path, server: Server, user: dict[str, Any]) -> Path:
    path = folder / "kubeconfig"
    document = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "clusters": [{"name": "it", "cluster": {"server": server.address}}],
        "users": [{"name": "it", "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


@asynccontextmanager
async def watches(configuration: Any) -> AsyncIterator[asyncio.Task[None]]:
    registry = watching.registry(Store(), lambda _: None, lambda *_: None, configuration)
    settings = watching.settings()
    settings.networking.error_backoffs = [0.05] * 100
    task = asyncio.create_task(kopf.operator(registry=registry, settings=settings, standalone=True, clusterwide=True))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_watches_outlive_the_token_that_they_began_with(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a service account: Kubernetes has written a new one, and an hour after its making the old one ends."""
    token = tmp_path / "token"
    token.write_text("one")
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, server, {"tokenFile": str(token)})))
    monkeypatch.setattr(credentials, "RELOAD_SECONDS", 0.0)
    async with asyncio.timeout(60), watches(await credentials.login()) as task:
        await server.came.wait()
        token.write_text("two")
        server.change_token("two")
        came = asyncio.create_task(server.came.wait())
        await asyncio.wait({came, task}, return_when=asyncio.FIRST_COMPLETED)
        assert not task.done()
    assert server.watchers == ["one", "two"]
    assert server.refused > 0


async def test_a_plugins_token_is_used_and_asked_for_again_when_it_runs_out(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, calls = tmp_path / "answer.json", tmp_path / "calls"
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"open({str(calls)!r}, 'a').write('x')\nprint(open({str(answer)!r}).read())\n")

    def give(token: str, seconds: float) -> None:
        until = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = {"token": token, "expirationTimestamp": until}
        answer.write_text(
            json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status})
        )

    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": ["-S", str(plugin)],
        }
    }
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, server, user)))
    monkeypatch.setattr(credentials, "RELOAD_SECONDS", 0.0)
    give("one", -1)
    async with ApiServer(await credentials.login()) as api:
        give("two", 3600)
        server.accepted = "two"
        path = core("default", "configmaps", "it")
        await asyncio.gather(*(api.get(path) for _ in range(3)))
        asked = len(calls.read_text())
        assert asked >= 2
        await api.get(path)
        assert len(calls.read_text()) == asked  # this one is good for an hour


async def test_a_pod_is_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("a-token")
    authority.write_text("a certificate")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "of-somebody-else"))
    seen = await credentials.connection(await credentials.login())
    assert (seen.server, seen.token, seen.ca_path) == ("https://[fd00::1]:443", "a-token", str(authority))
    assert not seen.insecure


@pytest.mark.parametrize("text", [None, "", "[]", "{", "contexts: [{name: it}]\ncurrent-context: it"])
async def test_without_credentials_it_is_said_where_they_were_looked_for(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(RuntimeError, match=r"run in a cluster, or set KUBECONFIG") as caught:
        await credentials.login()
    assert str(path) in str(caught.value)
