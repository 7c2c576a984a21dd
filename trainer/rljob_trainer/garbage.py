"""Python's cycle collector in processes that import a model library, build their parts, and then do the same small
things for hours.

A full collection looks at every container there is: about a million after torch and transformers are imported, which
takes a tenth of a second and more, and comes several times a minute to a process that handles many small messages.
"""

from __future__ import annotations

import gc

_MANY = 10_000
"""Containers; Python's own measure is 700. A batch of 128 groups makes some thousands, and all live until the end of
the step: looking for garbage among them takes 0.6 ms of it."""


def seldom() -> None:
    """Has collections come less often. Not for processes that compute: a cycle there may hold a model's gradients."""
    gc.set_threshold(_MANY)


def settle() -> None:
    """What exists now stays for good, and collections need not look at it any more. For the moment at which the parts
    of a process that live as long as it are built; may be called again when they are replaced."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
