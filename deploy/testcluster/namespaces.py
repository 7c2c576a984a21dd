"""Starting Python modules in Linux namespaces of their own, and running commands in those of a process."""

from __future__ import annotations

import sys

KINDS = ("--mount", "--net", "--pid", "--uts", "--ipc")


def in_own_namespaces(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as first process of new namespaces; they end with it."""
    unshare = ["unshare", *KINDS, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    return [*unshare, sys.executable, "-m", module, *arguments]


def inside(pid: int, *command: str) -> list[str]:
    """The command that runs another in the namespaces of a process."""
    return ["nsenter", "--target", str(pid), *KINDS, *command]
