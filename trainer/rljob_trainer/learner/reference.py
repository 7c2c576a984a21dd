"""The reference model beside the policy, for the exact KL over the vocabulary."""

from __future__ import annotations

import torch

from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.models import Compared, PackedRow, Policy


class Reference:
    """Its output matrix is gathered once, here: ranks then need not be at the same micro-batch."""

    def __init__(self, policy: Policy, layout: Layout) -> None:
        self._policy = policy
        weight = policy.language_model.get_output_embeddings().weight.detach()
        self._weight = layout.whole(layout.local(weight), weight)

    @torch.no_grad()
    def __call__(self, row: PackedRow, temperature: float) -> Compared:
        out = self._policy(row, temperature, states=True)
        assert out.states is not None
        return Compared(out.states, self._weight, out.log_probs)
