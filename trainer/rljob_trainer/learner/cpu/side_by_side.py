"""Independent work at once on the cores of one process: the models of an update, models and micro-batches of a score.

One operation of a small model is too short to keep two cores busy, but two models can. So a rank on a CPU gives each
piece of work a thread of its own, and the process's intra-op threads are divided between them. What is computed does
not depend on it. Everywhere else the work is done in turn: a device has one queue, and ranks that meet in collectives
must meet in one order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_AT_ONCE = 2
"""Actor and critic. More would multiply the memory that a score takes; further cores serve single operations."""


class SideBySide:
    """Runs callables that share nothing. ``allowed`` False, or a single core: one after the other."""

    def __init__(self, *, allowed: bool, cores: int | None = None) -> None:
        """``cores``: those that this process may use, by default."""
        self._allowed = allowed and (len(os.sched_getaffinity(0)) if cores is None else cores) >= _AT_ONCE
        self._pool: ThreadPoolExecutor | None = None

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """The results in the order of the tasks, when all have ended. Raises what the first of them raised.

        A thread begins with gradients enabled: a task that wants none says so itself.
        """
        if not self._allowed or len(tasks) < _AT_ONCE:
            return [task() for task in tasks]
        if self._pool is None:
            self._pool = _dividing_threads()
        futures = [self._pool.submit(task) for task in tasks]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]


def _dividing_threads() -> ThreadPoolExecutor:
    """Threads that divide this thread's intra-op threads among them."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="side-by-side")
    all_there = threading.Barrier(_AT_ONCE)

    def divide() -> None:
        all_there.wait()  # or one thread would serve two calls
        take_share(threads)

    for started in [pool.submit(divide) for _ in range(_AT_ONCE)]:
        started.result()
    # The number is a thread's own once it has one, but the last one set is what new threads begin with.
    torch.set_num_threads(threads)
    return pool


def take_share(threads: int) -> None:
    """Gives the calling thread, one of two that work in this process, its part of the intra-op ``threads``.

    Who has more threads than there are cores, in all of a process's threads together, waits long at the end of every
    operation: OpenMP's workers then sleep at once in place of spinning.
    """
    torch.get_num_threads()  # a thread's first use takes the process's number, and would undo the next line
    torch.set_num_threads(max(1, threads // _AT_ONCE))
