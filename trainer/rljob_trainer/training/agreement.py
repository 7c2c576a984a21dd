"""Trainer against engines: how far they are apart on a batch, and why, if the streams tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from rljob_trainer.algorithms import PolicyDistance, agreement_metrics, most_apart, policy_distance
from rljob_trainer.episodes.tokens import FloatArray
from rljob_trainer.learner.packing import take
from rljob_trainer.learner.protocol import Learner, ScoreRequest, SequenceBatch
from rljob_trainer.pipeline.parts import Apart
from rljob_trainer.training import attribution
from rljob_trainer.training.batch import TrainingBatch

_GROWN = 3.0
"""Times by which a gap between trainer and engines has to grow to be looked into once more."""
_NAMED = 3
"""Samples that are named as the worst."""


def compared(
    batch: TrainingBatch,
    mask: npt.NDArray[np.bool_],
    trainer: FloatArray | None,
    version: int | None,
    *,
    name_worst: bool,
) -> tuple[Apart | None, dict[str, float]]:
    """How far trainer and engines are apart, and the metrics of that.

    ``mismatch/...``: trainer against engine, on the tokens that both saw with the same weights.

    ``drift/...``: on all tokens, where some are of other weights.

    ``trainer [tokens]``: its log-probs, scored before the update, else those of the update's first forward pass.
    ``version`` is that of their weights; None: no engine has these, since a batch has been trained since the
    publication. Tokens of other versions differ because the policy has moved, which is no error. ``mask`` has the
    rejected tokens, too: limits are there for these above all. ``name_worst``: the samples that are furthest apart
    are named.
    """
    sequences = batch.sequences
    if trainer is None or sequences.rollout_log_probs is None:
        return None, {}
    known = mask & np.isfinite(trainer)
    alike = known & (batch.versions == version) if version is not None else np.zeros_like(known)
    streams = torch.from_numpy(trainer), torch.from_numpy(sequences.rollout_log_probs)
    segments, worst, apart = batch.segments, "", None
    metrics: dict[str, float] = {}
    if name_worst:
        furthest = most_apart(*streams, torch.from_numpy(known), segments, _NAMED)
        worst = ", ".join(f"{batch.owner(i).id} by {by:.2g} nats" for i, by in furthest)
    if alike.any():
        of_these = torch.from_numpy(alike)
        distance = policy_distance(*streams, of_these, segments)
        metrics |= agreement_metrics(*streams, of_these) | distance.metrics("mismatch")
        apart = _apart("mismatch", distance, worst)
    if (known & ~alike).any():
        distance = policy_distance(*streams, torch.from_numpy(known), segments)
        metrics |= distance.metrics("drift")
        apart = _apart("drift", distance, worst)
    return apart, metrics


def _apart(family: Literal["mismatch", "drift"], distance: PolicyDistance, worst: str) -> Apart:
    return Apart(family, distance.kl, distance.chi_square, distance.effective_sample_size, worst)


class GapExplainer:
    """Says why trainer and engines disagree, once for each gap."""

    def __init__(self, learner: Learner, temperature: float, report: Callable[[str], None]) -> None:
        """``temperature``: the job's."""
        self._learner, self._temperature, self._report = learner, temperature, report
        self._explained = 0.0
        """The largest gap that was looked into."""

    async def look(
        self,
        batch: TrainingBatch,
        mask: npt.NDArray[np.bool_],
        trainer: FloatArray,
        version: int,
        number: int,
        *,
        anchored: bool,
    ) -> None:
        """Says why trainer and engines disagree under the same weights, if they do and the streams tell. Looked into
        when the gap is there first, and whenever it has grown to several times what was looked into before.

        After the update some sequences are scored with what the policy is then, at the job's temperature as at others:
        its one step is small against a gap that has such a cause.
        """
        engine = batch.sequences.rollout_log_probs
        if engine is None:
            return
        known = mask & np.isfinite(trainer) & np.isfinite(engine) & (batch.versions == version)
        apart = attribution.gap(trainer, engine, known)
        if not apart > max(attribution.NOTICEABLE, _GROWN * self._explained):
            return
        self._explained = apart
        said = attribution.shifted(trainer, engine, known, batch.offsets)
        if not said and attribution.alike(trainer, engine, known):
            wholly = np.logical_and.reduceat(np.append(known, True), batch.offsets[:-1]).tolist()
            few = np.array(attribution.few(batch.sequences.response_lengths.tolist(), wholly), dtype=np.int64)
            said = await self._of_temperature(take(batch.sequences, few), anchored=anchored) if len(few) else ""
        if said:
            self._report(f"step {number}: engines and trainer differ by {apart:.2g} nats per token: {said}")

    async def _of_temperature(self, few: SequenceBatch, *, anchored: bool) -> str:
        assert few.rollout_log_probs is not None
        scored: dict[float, FloatArray] = {}
        for temperature in sorted({*attribution.TEMPERATURES, self._temperature}):
            result = await self._learner.score(
                few, ScoreRequest(temperature=temperature, log_probs=True, anchored=anchored)
            )
            assert result.log_probs is not None
            scored[temperature] = result.log_probs
        return attribution.of_temperature(scored, few.rollout_log_probs, self._temperature)
