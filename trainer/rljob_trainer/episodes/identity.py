"""Which response somebody speaks of: one name from the request to the batch, in receipts, rewards and checkpoints."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

TRAINING: Final = "training"
"""The purpose of what is trained on."""
_NUMBER_BITS = 16
"""Of a turn in a branch; the branch is in those above."""


class EpisodeId(NamedTuple):
    """Names one turn of one sample of one prompt; two that are under way at once never have the same name."""

    purpose: str
    """``TRAINING``, or ``validation_of`` a held-out set."""
    ordinal: int
    """The prompt's, which counts over the whole run (``episode.Prompt``)."""
    sample: int
    """Position among the prompt's samples."""
    turn: int = 0

    def __str__(self) -> str:
        """The name as messages have it: ``sample 3 of prompt 7``."""
        if self.purpose == TRAINING and not self.turn:
            return f"sample {self.sample} of prompt {self.ordinal}"
        where = f" of {self.purpose}" if self.purpose != TRAINING else ""
        turn = f", turn {self.turn}" if self.turn else ""
        if self.turn >> _NUMBER_BITS:
            turn = f", turn {self.turn % (1 << _NUMBER_BITS)} of a branch"
        return f"sample {self.sample} of prompt {self.ordinal}{where}{turn}"


def branch_turn(branch: str, number: int) -> int:
    """The ``turn`` of this ``number`` in a branch of an episode; those of the episode itself are below all of them."""
    return (1 + zlib.crc32(branch.encode("utf-8", "backslashreplace"))) << _NUMBER_BITS | number


def validation_of(name: str) -> str:
    """The purpose of responses that are scored for the held-out set ``name``."""
    return f"validation set {name}"


def ordinals_of(ids: Iterable[EpisodeId]) -> list[int]:
    """The prompts of training among them, each once."""
    return sorted({id.ordinal for id in ids if id.purpose == TRAINING})
