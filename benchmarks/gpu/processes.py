"""The environment of a part's process and of those that it starts: a rank's, or an engine's. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rljob_trainer.learner.environment import rank_environment


def _of_rank(device: str, *, deterministic: bool = False) -> dict[str, str]:
    return rank_environment(on_gpu=device == "cuda", deterministic=deterministic, compile_threads=os.cpu_count() or 1)


def become_rank(device: str, *, deterministic: bool = False) -> None:
    """Gives this process what a job gives a rank that has all CPUs, with ``deterministic`` as the job says; what is set
    already stays. To be called before torch is imported."""
    os.environ |= _of_rank(device, deterministic=deterministic) | dict(os.environ)


@contextmanager
def as_engine(visible_devices: str | None = None) -> Iterator[None]:
    """Inside, processes are started as engines are: without what ranks alone may have. ``visible_devices``: the only
    GPUs that they see; None: those of this process."""
    before = dict(os.environ)
    for name in _of_rank("cuda"):
        os.environ.pop(name, None)
    if visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
    try:
        yield
    finally:
        _restore(before)


def _restore(before: Mapping[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ |= before
