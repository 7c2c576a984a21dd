"""Seeds that are pure functions of (job seed, prompt ordinal, sample index): a run that is repeated or resumed asks for
the same samples again."""

from __future__ import annotations

from collections.abc import Iterable

_64_BITS = (1 << 64) - 1


def sample_seeds(seed: int, ordinal: int, samples: Iterable[int]) -> list[int]:
    """63 bits that belong to one sample of one prompt of one job, for each of ``samples``."""
    begun = _mixed(seed, ordinal)
    return [_mixed(begun, sample) >> 1 for sample in samples]


def turn_seed(sample_seed: int, turn: int) -> int:
    """63 bits that belong to one turn of a sample; the first turn has the sample's own."""
    return _mixed(sample_seed, turn) >> 1 if turn else sample_seed


def world_seed(seed: int, ordinal: int) -> int:
    """63 bits that belong to one prompt of one job."""
    return _mixed(seed ^ _64_BITS, ordinal) >> 1


def _mixed(state: int, part: int) -> int:
    """A step of splitmix64 that takes in ``part``."""
    state = (state * 0x9E3779B97F4A7C15 + part + 1) & _64_BITS
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return state ^ (state >> 31)
