"""What the ledger's rows add up to over a run: ages of what was trained, lengths and rewards of what was not.

Kept up to date by the thread that writes the rows and made anew from the rows when they are rolled back, so that it is
always an account of the surviving lineage. Nobody has to ask the database while the run goes on.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rljob_trainer.pipeline.tally import Tally
from rljob_trainer.telemetry.summary import AgeCounts, EndedGroups

_ENDED = """
SELECT state, reason, samples, tokens, reward, trained_version - oldest_version, token_ages FROM groups
WHERE state IN ('trained', 'dropped')
"""


@dataclass(slots=True)
class Account:
    """Sums over the groups that have ended."""

    trained: Tally = field(default_factory=Tally)
    dropped: dict[str, Tally] = field(default_factory=dict)
    """By reason."""
    oldest: Counter[int] = field(default_factory=Counter)
    """Trained groups by the age of their oldest token."""
    tokens: Counter[int] = field(default_factory=Counter)
    """Trained tokens by age."""

    @classmethod
    def of(cls, ledger: sqlite3.Connection) -> Account:
        """The account of the rows that are there."""
        account = cls()
        for state, reason, samples, tokens, reward, age, token_ages in ledger.execute(_ENDED):
            if state == "trained":
                ages = {int(of_token): count for of_token, count in json.loads(token_ages).items()}
                account.add_trained(samples, tokens, reward, age, ages)
            else:
                account.add_dropped(reason, samples, tokens, reward)
        return account

    def add_trained(
        self, samples: int, tokens: int, reward: float | None, age: int, token_ages: Mapping[int, int]
    ) -> None:
        self.trained.add(samples, tokens, reward)
        self.oldest[age] += 1
        for of_token, count in token_ages.items():
            self.tokens[of_token] += count

    def add_dropped(self, reason: str, samples: int, tokens: int, reward: float | None) -> None:
        self.dropped.setdefault(reason, Tally()).add(samples, tokens, reward)

    def copy(self) -> Account:
        """One that does not change."""
        dropped = {reason: replace(tally) for reason, tally in self.dropped.items()}
        return Account(replace(self.trained), dropped, self.oldest.copy(), self.tokens.copy())

    @property
    def ages(self) -> AgeCounts:
        """The histograms, youngest first."""
        return AgeCounts(oldest=dict(sorted(self.oldest.items())), tokens=dict(sorted(self.tokens.items())))

    @property
    def ended(self) -> tuple[EndedGroups, dict[str, EndedGroups]]:
        """What was trained, and what was dropped by reason."""
        return _summed(self.trained), {reason: _summed(tally) for reason, tally in sorted(self.dropped.items())}


def _summed(tally: Tally) -> EndedGroups:
    return EndedGroups(groups=tally.groups, samples=tally.samples, response_length=tally.length, reward=tally.reward)
