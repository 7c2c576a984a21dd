"""The order in which rows are visited: a pure function of seed and epoch, the same on every machine for ever.

NumPy promises the stream of raw bits of a bit generator, not what ``Generator.permutation`` makes of it. A run
that resumes after an upgrade must go on in the same order, so the permutation is made here from the raw bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def raw_stream(*key: int) -> np.random.PCG64:
    """The random bits that belong to a key of non-negative integers, such as ``(seed, epoch)``."""
    return np.random.PCG64(np.random.SeedSequence(key))


def permutation(count: int, *key: int) -> Int64Array:
    """A uniformly random order of ``0 .. count - 1``, ``[count]``, fixed by the key."""
    return np.argsort(raw_stream(*key).random_raw(count), kind="stable").astype(np.int64, copy=False)
