"""What the sequences of a batch have in common, and how long they are: all that planning needs to know of them.

Siblings begin with one prompt; those of a search that branches late have whole turns in common, too, and so do the
leaves of an episode whose history was edited. What two sequences of a row begin with is computed once
(``packing.build_row``): tokens attend to what stands before them only, so their hidden states are the same in both.

Together such sequences are a tree. It is written down as two arrays: the sequences sorted by their tokens, so that
those that begin alike are neighbours, and for each how much it has in common with the one before it. What any two have
in common is the least of the numbers between them, so every selection of sequences has its tree in the same two arrays.

    place  sequence       common
    0      p p a b c d    0
    1      p p a b e      4         p p a b is the first one's
    2      p p f g        2         p p too
    3      q q            0
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rljob_trainer.learner.protocol import Int64Array, SequenceBatch

_FEWEST = 16
"""Tokens from which on it counts what two sequences have in common beyond a whole prompt. A few more, such as the first
word of an answer, save nothing that is worth segments of uneven lengths."""
_SHARE = 8
"""A common beginning of two prompts that differ counts when it is an eighth of the shorter sequence: below that the
keys of attention, which are copied together, cost more memory than the tokens saved."""


def offsets_of(lengths: Int64Array) -> Int64Array:
    """``[S + 1]`` offsets of flat streams whose parts have these lengths."""
    result = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=result[1:])
    return result


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of S sequences, and the tree of their beginnings; all ``[S]``."""

    prompts: Int64Array
    responses: Int64Array
    places: Int64Array
    """Where each sequence stands among all, sorted by their tokens."""
    common: Int64Array
    """``[place]`` how many first tokens the sequence at that place has in common with the one before it; those at most
    that both have."""

    @classmethod
    def of(cls, batch: SequenceBatch) -> Lengths:
        """What is worth computing once. Response tokens that were sent to different experts are different ones."""
        ids, experts = np.ascontiguousarray(batch.token_ids), batch.routed_experts
        prompts, totals = batch.prompt_lengths.tolist(), (batch.prompt_lengths + batch.response_lengths).tolist()
        starts = offsets_of(batch.prompt_lengths + batch.response_lengths).tolist()
        texts = [ids[a:b].tobytes() for a, b in pairwise(starts)]
        # Of equal ones those with a response come first: a row may leave out their last token, and between two others
        # that have it they would keep these from having it in common.
        order = sorted(range(len(texts)), key=lambda each: (texts[each], prompts[each] == totals[each]))
        same, shorter = [], []
        for one, other in pairwise(order):
            most, prompt = min(totals[one], totals[other]), min(prompts[one], prompts[other])
            end = _agree(ids, starts[one], starts[other], 0, most)
            if experts is not None and end > prompt:
                end = _agree(experts, starts[one], starts[other], prompt, end)
            same.append(end)
            shorter.append(most)
        inside = _prompts_inside([prompts[sequence] for sequence in order], same)
        common = np.zeros(len(texts), dtype=np.int64)
        for place, ((shortest, longest), end, most) in enumerate(zip(inside, same, shorter, strict=True), 1):
            counts = end - shortest >= _FEWEST and (shortest or end * _SHARE >= most)
            common[place] = end if counts else longest
        places = _inverse(np.array(order, dtype=np.int64))
        return cls(batch.prompt_lengths, batch.response_lengths, places, common)

    @classmethod
    def apart(cls, prompts: Int64Array, responses: Int64Array) -> Lengths:
        """Sequences of which each is computed by itself, whatever their tokens are."""
        return cls(prompts, responses, np.arange(len(prompts)), np.zeros(len(prompts), dtype=np.int64))

    @classmethod
    def of_groups(cls, prompts: Int64Array, responses: Int64Array, keys: Int64Array) -> Lengths:
        """Sequences that have their prompts in common where their ``keys [S]`` are equal, and nothing else."""
        order = np.argsort(keys, kind="stable")
        common = np.zeros(len(keys), dtype=np.int64)
        common[1:] = np.where(np.diff(keys[order]) == 0, prompts[order][1:], 0)
        return cls(prompts, responses, _inverse(order), common)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def totals(self) -> Int64Array:
        """``[S]`` tokens of each sequence."""
        return self.prompts + self.responses

    def take(self, indices: Int64Array) -> Lengths:
        """The sequences ``indices``, in that order; one may be there several times."""
        order, common = self.sorted(indices)
        return Lengths(self.prompts[indices], self.responses[indices], _inverse(order), common)

    def sorted(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """How ``indices [n]`` are sorted by their sequences' tokens, as positions in ``indices [n]``, and what each has
        in common with the one before it, ``[n]``."""
        places = self.places[indices]
        order = np.argsort(places, kind="stable")
        return order, self.between(places[order])

    def between(self, places: Int64Array) -> Int64Array:
        """``[n]`` how many first tokens the sequences at ``places [n]`` have in common with the one before in that
        array, which is at a place before theirs or at the same; of the first one 0."""
        result = np.zeros(len(places), dtype=np.int64)
        if len(places) < 2:
            return result
        # The least of common[before + 1 .. place].
        least = np.minimum.reduceat(np.append(self.common, np.iinfo(np.int64).max), places + 1)[:-1]
        again = np.flatnonzero(places[1:] == places[:-1])
        if len(again):
            least[again] = self.totals[np.argsort(self.places, kind="stable")][places[again]]
        result[1:] = least
        return result

    def answers(self, indices: Int64Array) -> int:
        """The different response tokens of these sequences: those that several have in common count once."""
        order, common = self.sorted(indices)
        again = np.maximum(common - self.prompts[indices][order], 0)
        return int(self.responses[indices].sum() - again.sum())

    def row_tokens(self, indices: Int64Array) -> int:
        """Upper bound of the row's length for these sequences: what several begin with counts once."""
        _, common = self.sorted(indices)
        return int(self.totals[indices].sum() - common.sum())


def _prompts_inside(prompts: list[int], same: list[int]) -> list[tuple[int, int]]:
    """``[S - 1]`` the shortest and the longest prompt of any sequences that lie within what two neighbours have in
    common; 0 where there is none. ``prompts [S]`` are in sorted order, ``same [S - 1]`` is what each has in common with
    the next. A leaf with an edited history, whose own prompt is longer, may stand between two siblings, and begins with
    their prompt, too."""
    found: list[set[int]] = [set() for _ in same]
    for direction in (1, -1):
        inside: set[int] = set()
        for pair in range(len(same))[::direction]:
            inside.add(prompts[pair if direction > 0 else pair + 1])
            inside = {prompt for prompt in inside if prompt <= same[pair]}
            found[pair] |= inside
    return [(min(each, default=0), max(each, default=0)) for each in found]


def _agree(values: np.ndarray, one: int, other: int, start: int, stop: int) -> int:
    """From which index on, of ``start .. stop``, the rows of ``values`` behind ``one`` and ``other`` differ."""
    differ = values[one + start : one + stop] != values[other + start : other + stop]
    if differ.ndim > 1:
        differ = differ.reshape(len(differ), -1).any(1)
    first = int(differ.argmax()) if len(differ) else 0
    return start + first if len(differ) and differ[first] else stop


def _inverse(order: Int64Array) -> Int64Array:
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    return places
