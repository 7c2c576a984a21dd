"""`python -m testcluster.hub FOLDER DESCRIPTOR`: the first process of the whole cluster, in namespaces of its own.

It holds the wire between the nodes (a bridge) and starts each node in further namespaces below its own: when the hub is
killed, the kernel ends every process of the cluster and takes down every link and mount.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from testcluster import cgroups, control, layout, node_settings
from testcluster.commands import CommandFailedError, run
from testcluster.first_process import Processes, serve
from testcluster.layout import API_PORT, HUB_ADDRESS, Cluster, ClusterNode
from testcluster.namespaces import in_own_namespaces
from testcluster.node import LINK

BRIDGE = "nodes"
NAMESPACE_SECONDS = 10.0


def main() -> None:
    cluster = layout.load(Path(sys.argv[1]))
    api = int(sys.argv[2])
    listening = control.listen(cluster.socket)
    run(["ip", "link", "set", "lo", "up"])
    run(["ip", "link", "add", BRIDGE, "type", "bridge"])
    run(["ip", "address", "add", f"{HUB_ADDRESS}/24", "dev", BRIDGE])
    run(["ip", "link", "set", BRIDGE, "up"])
    for node in cluster.nodes:
        start_node(cluster, node)
    control_plane, *_ = cluster.nodes
    programs = Processes(cluster.folder / "log", {"PYTHONPATH": ":".join(sys.path)})
    target = (control_plane.address, str(API_PORT))
    programs.start("forward", [sys.executable, "-m", "testcluster.forward", str(api), *target], keep=[api])

    def answer(words: list[str]) -> str:
        match words:
            case ["start", name]:
                node = cluster.node(name)
                if control.listener_of(node.socket) is not None:
                    raise ValueError(f"{name} runs already")
                start_node(cluster, node)
                return ""
            case _:
                raise ValueError(f"`{' '.join(words)}` is not: start NODE")

    serve(programs, listening, answer)


def start_node(cluster: Cluster, node: ClusterNode) -> None:
    """Starts a node's first process, and lays its link."""
    node.logs.mkdir(parents=True, exist_ok=True)
    node.ready.unlink(missing_ok=True)
    node_settings.write(cluster, node)
    cgroups.make(f"{cluster.cgroup}/{node.name}")
    with (node.logs / "node.log").open("ab") as log:
        outer = subprocess.Popen(
            in_own_namespaces("testcluster.node", str(cluster.folder), node.name),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    inner = _child_in_own_network(outer)
    wire = f"to-{node.name}"
    # The bridge's end of a node that was killed may still be there for a moment.
    subprocess.run(["ip", "link", "delete", wire], capture_output=True)
    run(["ip", "link", "add", wire, "type", "veth", "peer", "name", LINK, "netns", str(inner)])
    run(["ip", "link", "set", wire, "master", BRIDGE, "up"])
    outer.returncode = 0  # the loop of `first_process` reaps it


def _child_in_own_network(outer: subprocess.Popen[bytes]) -> int:
    """The process that `unshare` forked, once it has a network namespace of its own."""
    ours = Path("/proc/self/ns/net").readlink()
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    deadline = time.monotonic() + NAMESPACE_SECONDS
    while time.monotonic() < deadline:
        try:
            for child in children.read_text().split():
                if Path(f"/proc/{child}/ns/net").readlink() != ours:
                    return int(child)
        except OSError:
            break
        time.sleep(0.02)
    raise CommandFailedError("a node's namespaces were not made: see its node.log")


if __name__ == "__main__":
    main()
