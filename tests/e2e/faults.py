"""Breaking a cluster from outside: a node without power, an API server that is away, operators that are killed.

The one part of the suite that has to know what the cluster is made of; where it can't break it, tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from world import World, program

from testcluster import control, layout, life
from testcluster.layout import Cluster

EXHAUST = """
# Ray looks four times a second and ends one of its own processes when little is left: it may not look.
for process in /proc/[0-9]*; do
    if [ "$(cat "$process/comm" 2>/dev/null)" = raylet ]; then kill -STOP "${process#/proc/}"; fi
done
echo 1000 > /proc/1/oom_score_adj
tail /dev/zero
"""


@contextmanager
def without_node(world: World, name: str) -> Iterator[None]:
    """A node is gone with everything on it; it is back when the context ends."""
    cluster = own_cluster(world)
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
    cluster = own_cluster(world)
    if cluster is None:
        pytest.skip("the API server can be stopped in the test cluster only")
    node, *_ = cluster.nodes
    control.ask(node.socket, "stop kube-apiserver")
    try:
        yield
    finally:
        control.ask(node.socket, "start kube-apiserver")
        world.until("the API server answers", lambda: _answers(world), seconds=120)


def kill_operator(world: World, selector: str) -> None:
    """Kills the pods of an operator without a farewell, and returns once others are ready in their place."""
    killed = operator_pods(world, selector)
    assert killed, f"no pod has the labels {selector}"
    for pod in killed:
        metadata = pod["metadata"]
        at_once = ("--grace-period=0", "--force", "--wait=false")
        world.kubectl("delete", "pod", metadata["name"], "--namespace", metadata["namespace"], *at_once)
    gone = {pod["metadata"]["uid"] for pod in killed}

    def replaced() -> bool:
        pods = [pod for pod in operator_pods(world, selector) if pod["metadata"]["uid"] not in gone]
        return len(pods) >= len(killed) and all(_is_ready(pod) for pod in pods)

    world.until(f"{selector} runs again", replaced)


def run_out_of_memory(world: World, pod: str) -> None:
    """Takes all the memory that a pod's container may have; the kernel ends the container for it.

    Control groups v2 end everything in the container. Those of v1 end one process: it is the first one, and with it the
    container, if all the memory that the pod may have is reserved for it.
    """
    said = subprocess.run(
        [program(), "--namespace", world.namespace, "exec", pod, "--", "bash", "-c", EXHAUST],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert said.returncode == 137, said.stderr


def operator_pods(world: World, selector: str) -> list[dict[str, Any]]:
    """The pods of an operator, in whatever namespace it is."""
    items: list[dict[str, Any]] = json.loads(
        world.kubectl("get", "pods", "--all-namespaces", "--selector", selector, "-o", "json")
    )["items"]
    return items


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def nodes_folder(world: World) -> Path | None:
    """On the test cluster: the folder with a folder of each node, in which the logs of its programs are."""
    cluster = own_cluster(world)
    return None if cluster is None else cluster.folder / "nodes"


def own_cluster(world: World) -> Cluster | None:
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
