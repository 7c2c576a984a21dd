"""Whether a machine lets a cluster of plain processes run: tried out before anything of it is built or started."""

from __future__ import annotations

import os

from testcluster import cgroups
from testcluster.commands import CommandFailedError, run
from testcluster.namespaces import KINDS

TRIAL = """
set -e
ip link add trial type bridge
ip link add one type veth peer name other
mount -t tmpfs tmpfs /run
mkdir /run/lower /run/upper /run/work /run/both
mount -t overlay overlay -o lowerdir=/run/lower,upperdir=/run/upper,workdir=/run/work /run/both
"""
"""What the hub, the nodes and containerd do, in namespaces that are gone with it."""


def check() -> None:
    """Tries what a cluster needs.

    Raises:
        CommandFailedError: what is missing here.
    """
    if os.geteuid() != 0:
        raise CommandFailedError(
            "namespaces and control groups are made by root: run this as root, or install Docker and kind"
        )
    hierarchies = cgroups.hierarchies()
    if not hierarchies:
        raise CommandFailedError(f"there are no control groups in {cgroups.ROOT}, and pods need some")
    for hierarchy in hierarchies:
        if not os.access(hierarchy, os.W_OK):
            raise CommandFailedError(f"{hierarchy} can't be written to, and pods need control groups of their own")
    try:
        run(["unshare", *KINDS, "--fork", "--kill-child", "--propagation", "private", "sh", "-c", TRIAL])
    except CommandFailedError as problem:
        raise CommandFailedError(f"no namespaces with a network and mounts of their own here: {problem}") from None
