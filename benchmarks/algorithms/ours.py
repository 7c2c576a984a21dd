"""Our side: the functions that the trainer calls, on packed streams."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.algorithms.workload import Workload
from rljob_trainer.algorithms import (
    AdvantageInputs,
    Correction,
    LossCounts,
    PolicyInputs,
    Rejection,
    Segments,
    Weights,
    actor_loss,
    advantages,
    correct,
)
from rljob_trainer.learner.protocol import LossSettings

Result = tuple[dict[str, Tensor], dict[str, float]]
"""Streams by name (packed here, padded on the other side), and metrics."""

TOKEN_CORRECTION = Correction(Weights("token", 2.0), (Rejection("k3", "sequenceMean", high=0.01),))
SEQUENCE_CORRECTION = Correction(Weights("sequence", 2.0), (Rejection("k2", "sequenceMax", high=0.5),))
LOSS = LossSettings("ppoClip", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}, "tokenMean")


class Ours:
    """One method a case; offsets are made in each of them, as in a training step."""

    def __init__(self, workload: Workload) -> None:
        self.lengths = torch.from_numpy(workload.lengths)
        self.groups = torch.from_numpy(workload.groups)
        self.scores = workload.scores
        self.streams = workload.packed

    def gae(self) -> Result:
        segments = Segments.from_lengths(self.lengths)
        inputs = AdvantageInputs(
            mask=self.streams.mask, segments=segments, rewards=self.streams.rewards, values=self.streams.values
        )
        output = advantages("gae", inputs, gamma=0.999, **{"lambda": 0.95})
        assert output.returns is not None
        return {"advantages": output.advantages, "returns": output.returns}, {}

    def grpo(self) -> Result:
        segments = Segments.from_lengths(self.lengths)
        inputs = AdvantageInputs(mask=self.streams.mask, segments=segments, scores=self.scores, groups=self.groups)
        return {"advantages": advantages("grpo", inputs).advantages}, {}

    def grpo_of_token_rewards(self) -> Result:
        segments = Segments.from_lengths(self.lengths)
        streams = self.streams
        inputs = AdvantageInputs(mask=streams.mask, segments=segments, rewards=streams.rewards, groups=self.groups)
        return {"advantages": advantages("grpo", inputs).advantages}, {}

    def correction_of_tokens(self) -> Result:
        return self._correct(TOKEN_CORRECTION)

    def correction_of_sequences(self) -> Result:
        return self._correct(SEQUENCE_CORRECTION)

    def _correct(self, correction: Correction) -> Result:
        segments = Segments.from_lengths(self.lengths)
        streams = self.streams
        corrected = correct(streams.old_log_probs, streams.rollout_log_probs, streams.mask, segments, correction)
        assert corrected.weights is not None
        return {"mask": corrected.mask, "weights": corrected.weights}, corrected.metrics

    def policy_loss(self) -> Result:
        segments = Segments.from_lengths(self.lengths)
        streams = self.streams
        leaf = streams.log_probs.detach().requires_grad_()
        inputs = PolicyInputs(leaf, streams.advantages, streams.mask, segments, streams.old_log_probs)
        result = actor_loss(inputs, LOSS, LossCounts.of(streams.mask, segments))
        result.loss.backward()
        assert leaf.grad is not None
        names = list(result.metrics)
        values = torch.stack([result.metrics[name].double() for name in names]).tolist()
        return {"gradient": leaf.grad}, dict(zip(names, values, strict=True))

    def __getitem__(self, case: str) -> Callable[[], Result]:
        found: Callable[[], Result] = getattr(self, case)
        return found
