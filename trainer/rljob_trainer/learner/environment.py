"""Environment variables of a rank's process, which it has before it imports torch."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_trainer.weights import allocator

_ALLOCATOR = {allocator.NAMES[0]: allocator.EXPANDABLE}
"""Rows of every length leave memory in pieces otherwise. For ranks alone: an engine that sleeps cannot have it. What a
rank hands over to an engine on its device is taken from elsewhere (``weights/ipc.py``)."""
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
"""cuBLAS picks its kernels by the workspace that is free otherwise, and torch refuses to call it deterministic. What
``trainer.compile`` makes picks some of its own by the time that each takes."""


def rank_environment(
    *,
    on_gpu: bool,
    deterministic: bool = False,
    compile_threads: int | None = None,
    told: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What a rank has, ``told`` included: what its job says of it, which goes before. ``compile_threads``: processes in
    which torch compiles its programs, up to 32 for each rank otherwise; None: it compiles none."""
    own = {} if compile_threads is None else {"TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads)}
    told = dict(told or {})
    if on_gpu and not told.keys() & set(allocator.NAMES):
        own |= _ALLOCATOR
    if on_gpu and deterministic:
        own |= _DETERMINISTIC
    return own | told
