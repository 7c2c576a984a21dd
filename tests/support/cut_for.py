"""Batches cut for ranks that all train on sequences of their own, without a backend that says so."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_trainer.learner.backend import Placement, RowRules
from rljob_trainer.learner.protocol import SequenceBatch
from rljob_trainer.learner.work import Cut, cut


def cut_for(
    batch: SequenceBatch,
    mini_batches: Sequence[Sequence[int]],
    *,
    ranks: int,
    token_budget: int,
    share_prefixes: bool = True,
    halved_from: int | None = None,
) -> Cut:
    """The shares of ``ranks`` data indices."""
    rules = RowRules(token_budget, share_prefixes, halved_from=halved_from)
    return cut(batch, mini_batches, [Placement(rank) for rank in range(ranks)], rules)
