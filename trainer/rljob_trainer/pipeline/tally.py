"""What groups that ended add up to: in a step's metrics, in the ledger's account of a run, in its summary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Sums over groups. Mean length and mean reward are over samples."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0
    """Of the responses."""
    scored: int = 0
    score: float = 0.0

    def add(self, samples: int, tokens: int, reward: float | None) -> None:
        """One group more; ``reward``: the mean score of its samples."""
        self.groups += 1
        self.samples += samples
        self.tokens += tokens
        if reward is not None:
            self.scored += samples
            self.score += reward * samples

    @property
    def length(self) -> float | None:
        """Mean tokens of a response; None without one."""
        return self.tokens / self.samples if self.samples else None

    @property
    def reward(self) -> float | None:
        """Mean score; None where nothing was scored."""
        return self.score / self.scored if self.scored else None
