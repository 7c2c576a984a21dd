"""What the processes of the rewards do first: they end with the driver, and keep their pipes to themselves."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import BinaryIO


def die_with_parent() -> None:
    """Asks the kernel (Linux) to kill this process when the driver is gone: a hanging function reads no pipe.

    And to make it the parent of those that lose theirs, so that what functions leave behind can be found and ended.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig, pr_set_child_subreaper = 1, 36
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(pr_set_pdeathsig, signal.SIGKILL)
    library.prctl(pr_set_child_subreaper, 1)


def take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Moves the two pipes out of the functions' reach: they read nothing and print to standard error."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return incoming, outgoing
