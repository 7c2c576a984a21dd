"""What a model's parameters are, in a few bytes each: so that two processes can tell whether they hold the same.

Checksums of a publication say that what was sent arrived. These are taken later, from the parameters that an engine
samples with and from those that the learner trains: between the two lies everything that loads, gathers and lays out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from rljob_trainer.weights.checksum import checksum, sum_in_any_order

Digests = Mapping[str, int]
"""By the Hugging Face name of the parameter."""

_NAMED = 3


def digests_of(named: Iterable[tuple[str, Tensor]], *, in_any_order: bool = False) -> dict[str, int]:
    """Of contiguous tensors; ``in_any_order``: the same for the same numbers in another order."""
    take = sum_in_any_order if in_any_order else checksum
    return {name: take(tensor.contiguous()) for name, tensor in named}


def differing(ours: Digests, theirs: Digests) -> list[str]:
    """Names of what both have and have otherwise. What only one has (a tied matrix) is no difference."""
    return [name for name, digest in theirs.items() if name in ours and ours[name] != digest]


def cause_of(ours: Digests, theirs: Digests, former: Mapping[int, Digests], sums: tuple[Digests, Digests]) -> str:
    """In words, how ``theirs`` differ from ``ours``. ``former``: the learner's of earlier versions; ``sums``: both
    sides' ``in_any_order``."""
    wrong = differing(ours, theirs)
    for version, old in sorted(former.items(), reverse=True):
        if all(theirs[name] == old.get(name) for name in wrong):
            what = "" if len(wrong) == len(theirs) else f" in {_listed(wrong)}"
            return f"it still has the weights of version {version}{what}: the new ones were not loaded"
    places = {digest: name for name, digest in ours.items()}
    told = []
    for name in wrong[:_NAMED]:
        if (owner := places.get(theirs[name])) is not None:
            told.append(f"{name} holds what belongs into {owner}")
        elif sums[0].get(name) == sums[1].get(name):
            told.append(f"{name} has the same numbers in another order")
        else:
            told.append(f"{name} has other numbers")
    more = f" (and {len(wrong) - _NAMED} more)" if len(wrong) > _NAMED else ""
    return "; ".join(told) + more


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
