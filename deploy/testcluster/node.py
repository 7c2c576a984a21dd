"""`python -m testcluster.node FOLDER NAME`: the first process of a node, in namespaces that the hub made for it.

It makes the namespaces look like a machine (mounts, sysctls, network), starts the node's programs in order and then
keeps them running. Nothing it does is visible outside.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from testcluster import control, images, layout, node_settings
from testcluster.commands import CommandFailedError, run
from testcluster.first_process import Processes, serve
from testcluster.layout import API_PORT, HUB_ADDRESS, Cluster, ClusterNode

WAIT_SECONDS = 240.0
LINK = "eth0"
SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
"""What the kubelet insists on. They belong to the whole machine, so it gets files of its own to write into."""


def main() -> None:
    cluster = layout.load(Path(sys.argv[1]))
    node = cluster.node(sys.argv[2])
    listening = control.listen(node.socket)
    socket.sethostname(node.name)
    mount_private_folders(node)
    join_network(cluster, node)
    forget_containers(node)
    programs = Processes(node.logs, environment(cluster))
    start(cluster, node, programs)
    node.ready.touch()
    serve(programs, listening, lambda words: answer(programs, words))


def answer(programs: Processes, words: list[str]) -> str:
    match words:
        case ["start", name]:
            programs.start(name)
        case ["stop", name]:
            programs.stop(name)
        case ["programs"]:
            return " ".join(programs.names())
        case _:
            raise ValueError(f"`{' '.join(words)}` is none of: start NAME, stop NAME, programs")
    return ""


def environment(cluster: Cluster) -> dict[str, str]:
    """The environment of the node's programs: unpacked packages first, and no proxies or credentials of the caller."""
    root = cluster.node_root
    own = [str(root / part) for part in ("usr/bin", "usr/sbin")]
    return {
        "PATH": ":".join([*own, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]),
        "LD_LIBRARY_PATH": str(root / "usr/lib/x86_64-linux-gnu"),
        "HOME": "/run",
    }


def mount_private_folders(node: ClusterNode) -> None:
    """A machine's own /run, /var/lib, /var/log and /sys, and mounts that spread to its containers only."""
    for folder in ("/run", "/var/lib", "/var/log"):
        run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder])
    # A new /sys shows this network namespace; the control groups are the host's.
    aside = Path("/run/cgroup")
    aside.mkdir()
    run(["mount", "--rbind", "/sys/fs/cgroup", str(aside)])
    run(["mount", "-t", "sysfs", "sysfs", "/sys"])
    run(["mount", "--rbind", str(aside), "/sys/fs/cgroup"])
    run(["umount", "--lazy", str(aside)])
    run(["mount", "--make-rshared", "/"])
    for name, value in SYSCTLS.items():
        file = Path("/run", "sysctl." + name.replace("/", "."))
        file.write_text(f"{value}\n")
        run(["mount", "--bind", str(file), f"/proc/sys/{name}"])


def join_network(cluster: Cluster, node: ClusterNode) -> None:
    """Brings up the link that the hub put here, with routes to the pods of all nodes."""
    run(["ip", "link", "set", "lo", "up"])
    wait("the hub to lay the node's link", lambda: Path(f"/sys/class/net/{LINK}").exists())
    run(["ip", "address", "add", f"{node.address}/24", "dev", LINK])
    run(["ip", "link", "set", LINK, "up"])
    # Nothing leaves the hub; but a packet to a Service needs a route before kube-proxy's rules see it.
    run(["ip", "route", "add", "default", "via", HUB_ADDRESS])
    for other in cluster.nodes:
        if other != node:
            run(["ip", "route", "add", other.pods, "via", other.address])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    # Pods of one node reach a Service of each other only if bridged packets pass through the rules as well.
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if bridged.exists():
        bridged.write_text("1\n")


def forget_containers(node: ClusterNode) -> None:
    """Drops the records of pods that ran in an earlier life of this node; images stay."""
    for part in ("io.containerd.grpc.v1.cri", "io.containerd.runtime.v2.task"):
        shutil.rmtree(node.folder / "containerd" / part, ignore_errors=True)
    for part in ("kubelet", "pod-logs"):
        shutil.rmtree(node.folder / part, ignore_errors=True)
        (node.folder / part).mkdir(parents=True)


def start(cluster: Cluster, node: ClusterNode, programs: Processes) -> None:
    """Starts everything, each as soon as what it needs answers."""
    commands = node_settings.commands(cluster, node)
    programs.start("containerd", commands["containerd"])
    if node.is_control_plane:
        programs.start("etcd", commands["etcd"])
        programs.start("kube-apiserver", commands["kube-apiserver"])
    ctr = images.Ctr(cluster, node)
    wait("containerd", ctr.answers)
    ctr.remove_containers()
    for archive in cluster.images:
        ctr.bring(archive)
    control_plane, *_ = cluster.nodes
    wait("kube-apiserver", lambda: api_is_ready(cluster, control_plane.address))
    for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"):
        if name in commands:
            programs.start(name, commands[name])


def api_is_ready(cluster: Cluster, address: str) -> bool:
    trust = ssl.create_default_context(cafile=str(cluster.certificates / "ca.crt"))
    try:
        with urllib.request.urlopen(f"https://{address}:{API_PORT}/readyz", timeout=2, context=trust) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def wait(what: str, there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not there():
        if time.monotonic() > deadline:
            raise CommandFailedError(f"waited {WAIT_SECONDS:.0f} s for {what}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
