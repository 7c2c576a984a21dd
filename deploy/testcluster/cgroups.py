"""The control groups below which a node's pods live, made before its kubelet starts and removed after the cluster."""

from __future__ import annotations

import time
from pathlib import Path

from testcluster.commands import CommandFailedError

ROOT = Path("/sys/fs/cgroup")
REMOVAL_SECONDS = 20.0
SHARES = 8192
"""Weight of a whole cluster against the machine's other processes, each of which counts 1024 by itself. Pods request
next to no CPU: with the usual weight of one group, all of them together would get what one process gets."""


def hierarchies() -> list[Path]:
    """The root of every hierarchy (control groups v1).

    Raises:
        CommandFailedError: the machine has control groups v2 only.
    """
    if (ROOT / "cgroup.controllers").exists():
        raise CommandFailedError(
            "this machine has control groups v2, and the cluster of plain processes needs v1: install Docker and kind"
        )
    return [folder for folder in sorted(ROOT.iterdir()) if folder.is_dir() and not folder.is_symlink()]


def make(name: str) -> None:
    """Makes the group in every hierarchy."""
    for root in hierarchies():
        group = root
        for part in Path(name).parts:
            above, group = group, group / part
            group.mkdir(exist_ok=True)
            if above == root and (group / "cpu.shares").exists():
                (group / "cpu.shares").write_text(str(SHARES))
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if (above / setting).exists():
                    # A new cpuset is empty, and nothing may run in an empty one.
                    (group / setting).write_text((above / setting).read_text())


def remove(name: str) -> None:
    """Removes the group and all below it, as soon as their processes are gone.

    Raises:
        CommandFailedError: something still runs in it after `REMOVAL_SECONDS`.
    """
    deadline = time.monotonic() + REMOVAL_SECONDS
    for root in hierarchies():
        while (root / name).exists():
            for folder in sorted((root / name).rglob("*"), key=lambda path: len(path.parts), reverse=True):
                if folder.is_dir():
                    _try_to_remove(folder)
            _try_to_remove(root / name)
            if time.monotonic() > deadline:
                raise CommandFailedError(f"{root / name} can't be removed: processes are left in it")
            time.sleep(0.05)


def _try_to_remove(group: Path) -> None:
    try:
        group.rmdir()
    except OSError:
        return  # its processes are still ending
