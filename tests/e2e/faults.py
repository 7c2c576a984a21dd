"""Breaking a cluster from outside: a node without power, an API server that is away.

The one part of the suite that has to know what the cluster is made of; where it can't break it, tests are skipped.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from world import World

from testcluster import control, layout, life
from testcluster.layout import Cluster


@contextmanager
def without_node(world: World, name: str) -> Iterator[None]:
    """A node is gone with everything on it; it is back when the context ends."""
    cluster = _test_cluster(world)
    if cluster is not None:
        life.kill(cluster.node(name))
    elif _is_kind(world):
        _docker("kill", name)
    else:
        pytest.skip("nodes can be killed in the test cluster and in kind only")
    try:
        yield
    finally:
        if cluster is not None:
            control.ask(cluster.socket, f"start {name}")
        else:
            _docker("start", name)
        world.kubectl("wait", f"node/{name}", "--for=condition=Ready", "--timeout=120s", seconds=130)


@contextmanager
def without_api_server(world: World) -> Iterator[None]:
    """Nobody reaches the API server while the context lasts."""
    cluster = _test_cluster(world)
    if cluster is None:
        pytest.skip("the API server can be stopped in the test cluster only")
    node, *_ = cluster.nodes
    control.ask(node.socket, "stop kube-apiserver")
    try:
        yield
    finally:
        control.ask(node.socket, "start kube-apiserver")
        world.until("the API server answers", lambda: _answers(world), seconds=120)


def _test_cluster(world: World) -> Cluster | None:
    """The test cluster, if the suite runs on one: its kubeconfig lies in its folder."""
    folder = Path(world.kubeconfig).parent
    if not (folder / "cluster.json").exists():
        return None
    return layout.load(folder)


def _is_kind(world: World) -> bool:
    return world.kubectl("config", "current-context").startswith("kind-")


def _docker(verb: str, container: str) -> None:
    subprocess.run(["docker", verb, container], check=True, capture_output=True)


def _answers(world: World) -> bool:
    try:
        return world.kubectl("get", "--raw", "/readyz") == "ok"
    except AssertionError:
        return False
