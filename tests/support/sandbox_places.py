"""Where the sandbox's tests run: modes that work here, a folder for what sandboxes leave, processes that are left."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
import pytest

from rljob_trainer.world.sandbox import Mode, mode_available

MODES: tuple[Mode, ...] = ("namespaces", "landlock", "none")
why_not = cache(mode_available)


def skip_unless_available(mode: Mode) -> None:
    reason = why_not(mode)
    if reason:
        pytest.skip(f"{mode}: {reason}")


@contextmanager
def folder_for_all() -> Iterator[Path]:
    """Where sandboxes make their folders meanwhile, open to all users as /tmp is: pytest's own is not."""
    former = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="sandboxes-") as name:
        Path(name).chmod(0o755)
        tempfile.tempdir = name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = former


def below(process: int) -> set[psutil.Process]:
    """All that a process has started, and what that has started."""
    try:
        return {found for found in psutil.Process(process).children(recursive=True) if found.status() != "zombie"}
    except psutil.NoSuchProcess:
        return set()


def all_gone(processes: set[psutil.Process], seconds: float = 20) -> bool:
    """Whether they end in time. A zombie has ended."""
    until = time.monotonic() + seconds
    while left := {process for process in processes if _lives(process)}:
        if time.monotonic() > until:
            print("still there:", left)
            return False
        time.sleep(0.01)
    return True


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != "zombie")
    except psutil.NoSuchProcess:
        return False
