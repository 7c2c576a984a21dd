"""The reference: a model beside the policy, or the policy without its adapter."""

from __future__ import annotations

import torch

from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.models import Compared, PackedRow, Policy, PolicyStreams


class WithoutAdapter:
    """The model that an adapter is trained beside, as the reference. It needs no memory of its own."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @torch.no_grad()
    def __call__(self, row: PackedRow, temperature: float, *, states: bool = False) -> PolicyStreams:
        # Not where full fine-tuning imports its modules: peft takes a second.
        from rljob_trainer.learner.lora import adapters_off

        with adapters_off():
            streams: PolicyStreams = self._policy(row, temperature, states=states)
        return streams

    @property
    def output_weight(self) -> torch.Tensor:
        """[vocabulary, d]"""
        return self._policy.output_weight


class Reference:
    """What the exact KL over the vocabulary asks of it.

    Its output matrix is gathered once, here: ranks then need not be at the same micro-batch.
    """

    def __init__(self, policy: Policy | WithoutAdapter, layout: Layout) -> None:
        self._policy = policy
        self._weight = layout.computed_with(policy.output_weight)

    @torch.no_grad()
    def __call__(self, row: PackedRow, temperature: float) -> Compared:
        out = self._policy(row.routed_anew(), temperature, states=True)
        assert out.states is not None
        return Compared(out.states, self._weight, out.log_probs)
