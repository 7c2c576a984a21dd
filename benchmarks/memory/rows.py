"""The row that fills a GPU most, as a batch of tokens that mean nothing."""

from __future__ import annotations

import numpy as np

from rljob_trainer.learner.backend import Placement, RowRules
from rljob_trainer.learner.protocol import SequenceBatch
from rljob_trainer.learner.work import Share, cut


def batch_of(groups: int, prompt: int, siblings: int, response: int) -> SequenceBatch:
    """Equal groups of equal lengths, with every stream."""
    count = groups * siblings
    tokens = count * response
    ids = []
    for group in range(groups):
        # Prompts differ, and responses do from their first token on, or they would be computed once.
        start = np.full(prompt, group + 1, dtype=np.int32)
        ids += [part for sibling in range(siblings) for part in (start, np.full(response, sibling, dtype=np.int32))]
    ones = np.ones(tokens, dtype=np.float32)
    return SequenceBatch(
        token_ids=np.concatenate(ids),
        prompt_lengths=np.full(count, prompt),
        response_lengths=np.full(count, response),
        mask=np.ones(tokens, dtype=bool),
        advantages=ones,
        returns=ones,
        values=ones,
        old_log_probs=-ones,
        rollout_log_probs=-ones,
        ref_log_probs=-ones,
    )


def in_one_row(batch: SequenceBatch) -> Share:
    (share,) = cut(batch, [range(len(batch))], [Placement(0)], RowRules(1 << 40)).shares
    return share
