"""Breaking a cluster from outside: a node without power, an API server that is away, operators that are killed.

The one part of the suite that has to know what the cluster is made of; where it can't break it, tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from world import World, program

from testcluster import control, layout, life
from testcluster.layout import Cluster

KIND = "kind-"
"""What kind puts before a cluster's name in the name of its context."""
MANIFEST, ASIDE = "/etc/kubernetes/manifests/kube-apiserver.yaml", "/etc/kubernetes/kube-apiserver.yaml"
"""Where kubeadm leaves the API server's static pod, and a place beside it that no kubelet looks at."""
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
    elif kind_cluster(world):
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
    if cluster is not None:
        ask = partial(control.ask, cluster.nodes[0].socket)
        stop, start = partial(ask, "stop kube-apiserver"), partial(ask, "start kube-apiserver")
    elif kind := kind_cluster(world):
        # The kubelet runs what lies in its folder of manifests, and ends what has gone from there.
        move = partial(_docker, "exec", f"{kind}-control-plane", "mv")
        stop, start = partial(move, MANIFEST, ASIDE), partial(move, ASIDE, MANIFEST)
    else:
        pytest.skip("the API server can be stopped in the test cluster and in kind only")
    stop()
    try:
        # A kubelet takes its time.
        world.until("the API server is away", lambda: not _answers(world), seconds=120)
        yield
    finally:
        start()
        world.until("the API server answers", lambda: _answers(world), seconds=180)


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


def own_cluster(world: World) -> Cluster | None:
    """The test cluster, if the suite runs on one: its kubeconfig lies in its folder."""
    folder = Path(world.kubeconfig).parent
    if not (folder / "cluster.json").exists():
        return None
    return layout.load(folder)


def kind_cluster(world: World) -> str:
    """The name of the cluster, if it is one of kind's; else nothing."""
    context = world.kubectl("config", "current-context").strip()
    return context.removeprefix(KIND) if context.startswith(KIND) else ""


def _docker(*arguments: str) -> None:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr.strip()}"


def _answers(world: World) -> bool:
    try:
        return world.kubectl("get", "--raw", "/readyz", "--request-timeout=10s") == "ok"
    except (AssertionError, subprocess.TimeoutExpired):
        return False
