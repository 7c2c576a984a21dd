"""What lies in a process's memory, in a few bytes for each tensor: so that two can tell whether they hold the same.

A manifest (``manifest.py``) says that what was sent arrived. These sums are taken later, from the parameters that an
engine samples with and from those that the learner trains: between the two lies everything that loads, gathers and lays
out. An engine that keeps tensors as they are published has the sums of a manifest's lines. One that fuses or quantises
them has a *fingerprint*: the same sums over its runtime tensors, which only engines of the same layout have in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from rljob_trainer.weights.manifest import Manifest, manifest_of
from rljob_trainer.weights.sums import sum_in_any_order

Sums = Mapping[str, int]
"""By the name of the tensor."""

_TIED = "lm_head.weight"
"""The embedding's matrix under its second name, where a model has one matrix for both; not everybody lists it."""
PUBLISHED = ""
"""The layout of engines that keep tensors under their Hugging Face names, as they are published."""
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Resident:
    """What an engine has in memory."""

    sums: Sums
    layout: str = PUBLISHED
    """The same for engines whose tensors can be compared with one another."""


def sums_in_any_order(named: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Sums that are the same for the same numbers in another order."""
    return {name: sum_in_any_order(tensor) for name, tensor in named}


def fingerprint(workers: Iterable[Manifest]) -> Resident:
    """The fingerprint of an engine's runtime tensors, given each of its workers' own."""
    sums: dict[str, int] = {}
    shapes = []
    for number, manifest in enumerate(workers):
        sums |= {f"worker {number}: {name}": each for name, each in manifest.sums.items()}
        shapes.append([(meta.name, meta.shape, str(meta.dtype)) for meta, _ in manifest.lines])
    return Resident(sums, hashlib.sha256(repr(shapes).encode()).hexdigest())


def resident(named: Iterable[tuple[str, Tensor]], *, in_any_order: bool = False) -> Resident:
    """What an engine says that keeps tensors as they are published."""
    return Resident(sums_in_any_order(named) if in_any_order else manifest_of(named).sums)


def differing(ours: Sums, theirs: Sums) -> list[str]:
    """Names of what the two have otherwise, or only one of them has."""
    once = {_TIED} - (ours.keys() & theirs.keys())
    return [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name) and name not in once]


def cause_of(ours: Sums, theirs: Sums, former: Mapping[int, Sums], in_any_order: tuple[Sums, Sums]) -> str:
    """In words, how ``theirs`` differ from ``ours``. ``former``: the learner's of earlier versions; ``in_any_order``:
    both sides' ``sums_in_any_order``."""
    wrong = differing(ours, theirs)
    for version, old in sorted(former.items(), reverse=True):
        if all(name in theirs and theirs[name] == old.get(name) for name in wrong):
            what = "" if len(wrong) == len(theirs) else f" in {listed(wrong)}"
            return f"it still has the weights of version {version}{what}: the new ones were not loaded"
    places = {number: name for name, number in ours.items()}
    told = []
    for name in wrong[:_NAMED]:
        if name not in theirs:
            told.append(f"it has no {name}")
        elif name not in ours:
            told.append(f"it never received {name}")
        elif (owner := places.get(theirs[name])) is not None:
            told.append(f"{name} contains the values of {owner}")
        elif name in in_any_order[0] and in_any_order[0][name] == in_any_order[1].get(name):
            told.append(f"{name} has the same values in another order")
        else:
            told.append(f"{name} has different values")
    more = f" (and {len(wrong) - _NAMED} more)" if len(wrong) > _NAMED else ""
    return "; ".join(told) + more


def listed(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
