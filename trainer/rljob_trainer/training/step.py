"""What happens to a batch of scored groups before, in and after the learner's update.

    forward passes -> KL in the reward -> advantages -> correction -> update -> metrics

The mathematics is in ``algorithms``, the models are in the learner; this module decides which streams a job needs, asks
for them in one call, and hands them on. It keeps the only state of the algorithm itself: the KL controller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rljob_api.resolved import ResolvedAlgorithm, ResolvedBatch
from rljob_trainer.algorithms import (
    AdaptiveKl,
    AdvantageInputs,
    AdvantageOutput,
    Correction,
    FixedKl,
    KlController,
    Rejection,
    Segments,
    Weights,
    advantage_estimators,
    advantages,
    correct,
    kl_penalised_rewards,
)
from rljob_trainer.learner.protocol import Learner, LossSettings, ScoreResult
from rljob_trainer.pipeline.loop import Stage, unmeasured
from rljob_trainer.samples import FloatArray, Group, RewardResult
from rljob_trainer.telemetry.batch_metrics import BatchStreams, batch_metrics, mismatch_metrics
from rljob_trainer.training.batch import TrainingBatch, layout

_log = logging.getLogger(__name__)


class TrainingStep:
    """One job's way of learning from a batch.

    Usage::

        step = TrainingStep(spec.algorithm, spec.batch, learner, temperature=1.0, seed=0)
        metrics = await step.run(groups, number=1, version=0)
    """

    def __init__(
        self,
        algorithm: ResolvedAlgorithm,
        batch: ResolvedBatch,
        learner: Learner,
        *,
        temperature: float,
        seed: int,
        max_prompt_tokens: int | None = None,
        part_weights: Mapping[str, float] | None = None,
        stage: Stage = unmeasured,
        report: Callable[[str], None] = _log.warning,
    ) -> None:
        self.algorithm = algorithm
        self.kl = _controller(algorithm)
        self._batch = batch
        self._learner = learner
        self._temperature = temperature
        self._seed = seed
        self._max_prompt_tokens = max_prompt_tokens
        self._part_weights = dict(part_weights or {})
        self._stage = stage
        self._report = report
        self._estimator = advantage_estimators[algorithm.advantage.estimator]
        self._loss = loss_settings(algorithm, temperature)

    async def run(self, groups: Sequence[Group], *, number: int, version: int) -> dict[str, float]:
        """Trains on the groups as step ``number`` and returns its metrics. Raises what learner and algorithms raise."""
        batch = layout(groups)
        mini_batches = self._mini_batches(len(groups), batch, number)
        scored = await self._score(batch, optimizer_steps=len(mini_batches))
        with self._stage("advantage"):
            corrected = self._correct(batch, scored)
            inputs, kl_in_reward = self._advantage_inputs(groups, batch, scored)
            self._fill(batch, scored, advantages(self._estimator.name, inputs, **self.algorithm.advantage.params))
            metrics = self._batch_metrics(batch, inputs, version) | corrected
        critic = self.algorithm.critic
        with self._stage("update"):
            result = await self._learner.update(
                batch.sequences,
                self._loss,
                mini_batches,
                update_actor=critic is None or number > critic.warmup_steps,
                update_critic=critic is not None,
            )
        metrics.update(result.metrics)
        for skipped in result.skipped:
            self._report(f"step {number}: {skipped}")
        if kl_in_reward is not None:
            metrics["kl/in_reward"] = kl_in_reward
            metrics["kl/coefficient"] = self.kl.coefficient
            self.kl.update(kl_in_reward, len(batch))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the learner's state."""
        return {"kl": self.kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kl.load_state_dict(state["kl"])

    # --- the stages

    async def _score(self, batch: TrainingBatch, optimizer_steps: int) -> ScoreResult:
        """The forward passes that this job needs before its update, in one call."""
        algorithm = self.algorithm
        mode = algorithm.rollout_correction.mode
        # One optimizer step on the weights that are to be scored: its own forward pass gives pi_old for nothing.
        anchored_by_update = mode == "none" and optimizer_steps == 1
        needs_old = mode != "bypass" and (
            not anchored_by_update or algorithm.kl.in_reward is not None or self._estimator.needs_sum_squared_probs
        )
        needs_squares = self._estimator.needs_sum_squared_probs
        if not (needs_old or needs_squares or algorithm.needs_reference or algorithm.needs_critic):
            return ScoreResult()
        with self._stage("score"):
            return await self._learner.score(
                batch.sequences,
                temperature=self._temperature,
                log_probs=needs_old,
                sum_squared_probs=needs_squares,
                reference=algorithm.needs_reference,
                values=algorithm.needs_critic,
            )

    def _correct(self, batch: TrainingBatch, scored: ScoreResult) -> dict[str, float]:
        """Decoupled mode: weights and a narrowed mask for what engine and trainer disagree about; its diagnostics."""
        correction, sequences = self.algorithm.rollout_correction, batch.sequences
        if correction.mode != "decoupled":
            return {}
        assert scored.log_probs is not None
        assert sequences.rollout_log_probs is not None
        weights = correction.weights
        corrected = correct(
            torch.from_numpy(scored.log_probs),
            torch.from_numpy(sequences.rollout_log_probs),
            torch.from_numpy(sequences.mask),
            _segments(batch),
            Correction(
                None if weights is None else Weights(weights.level, weights.high, weights.low, weights.normalize),
                _rejection(self.algorithm),
            ),
        )
        sequences.mask = corrected.mask.numpy()
        sequences.weights = None if corrected.weights is None else corrected.weights.to(torch.float32).numpy()
        return corrected.metrics

    def _advantage_inputs(
        self, groups: Sequence[Group], batch: TrainingBatch, scored: ScoreResult
    ) -> tuple[AdvantageInputs, float | None]:
        """What the estimator gets, and the mean KL that the rewards were charged for."""
        algorithm, sequences = self.algorithm, batch.sequences
        segments = _segments(batch)
        mask = torch.from_numpy(sequences.mask)
        scores = torch.from_numpy(self._effective_scores(batch))
        old = sequences.rollout_log_probs if scored.log_probs is None else scored.log_probs
        rewards, kl = None, None
        if algorithm.kl.in_reward is not None:
            assert scored.ref_log_probs is not None
            assert old is not None
            rewards, mean_kl = kl_penalised_rewards(
                scores,
                torch.from_numpy(old),
                torch.from_numpy(scored.ref_log_probs),
                mask,
                segments,
                kind=algorithm.kl.in_reward.kind,
                coefficient=self.kl.coefficient,
            )
            kl = float(mean_kl)
        bootstrap = algorithm.truncated.bootstrap
        inputs = AdvantageInputs(
            mask=mask,
            segments=segments,
            scores=scores,
            rewards=rewards,
            groups=torch.from_numpy(batch.groups),
            values=_tensor(scored.values),
            final_values=_tensor(scored.final_values) if bootstrap else None,
            truncated=torch.from_numpy(batch.truncated) if bootstrap else None,
            greedy_scores=_greedy_scores(groups),
            parts=_parts(batch, self._part_weights) if self._estimator.needs_parts else None,
            part_weights=torch.tensor(list(self._part_weights.values())) if self._estimator.needs_parts else None,
            log_probs=_tensor(old),
            sum_squared_probs=_tensor(scored.sum_squared_probs),
            weights=_tensor(sequences.weights),
        )
        return inputs, kl

    def _effective_scores(self, batch: TrainingBatch) -> FloatArray:
        truncated = self.algorithm.truncated
        if truncated.reward == "replace":
            return np.where(batch.truncated, np.float32(truncated.replacement), batch.scores)
        return batch.scores

    def _fill(self, batch: TrainingBatch, scored: ScoreResult, output: AdvantageOutput) -> None:
        """Completes the streams that the learner gets."""
        sequences = batch.sequences
        sequences.advantages = output.advantages.to(torch.float32).numpy()
        if output.returns is not None:
            sequences.returns = output.returns.to(torch.float32).numpy()
        sequences.values = scored.values
        sequences.ref_log_probs = scored.ref_log_probs
        if self.algorithm.rollout_correction.mode == "bypass":
            sequences.old_log_probs = sequences.rollout_log_probs
        else:
            sequences.old_log_probs = scored.log_probs
        if self.algorithm.truncated.mask:
            lengths = sequences.response_lengths
            sequences.mask = sequences.mask & ~np.repeat(batch.truncated, lengths)

    def _mini_batches(self, groups: int, batch: TrainingBatch, number: int) -> list[list[int]]:
        """Indices of sequences, one list per optimizer step: all mini-batches of the first epoch, then of the next."""
        members: list[list[int]] = [[] for _ in range(groups)]
        for sequence, group in enumerate(batch.groups):
            members[group].append(sequence)
        size = self._batch.mini_batch_groups
        mini_batches: list[list[int]] = []
        for epoch in range(self._batch.epochs):
            order = np.arange(groups)
            if self._batch.shuffle:
                order = np.random.default_rng([self._seed, number, epoch]).permutation(groups)
            for start in range(0, groups, size):
                mini_batches.append([s for g in order[start : start + size] for s in members[g]])
        return mini_batches

    def _batch_metrics(self, batch: TrainingBatch, inputs: AdvantageInputs, version: int) -> dict[str, float]:
        sequences = batch.sequences
        rewards = [sample.reward for sample in batch.samples if sample.reward is not None]
        streams = BatchStreams(
            prompt_lengths=sequences.prompt_lengths,
            offsets=batch.offsets,
            mask=sequences.mask,
            scores=batch.scores,
            groups=batch.groups,
            finish=[sample.finish for sample in batch.samples],
            penalised=None if inputs.rewards is None else inputs.sequence_rewards.numpy(),
            parts=part_scores(rewards),
            sources=batch.sources,
            correct=[reward.correct for reward in rewards],
            errors=sum(reward.error is not None for reward in rewards),
            advantages=sequences.advantages,
            returns=sequences.returns,
            values=sequences.values,
            old_log_probs=sequences.old_log_probs,
            ref_log_probs=sequences.ref_log_probs,
            versions=batch.versions,
            trainer_version=version,
            max_prompt_tokens=self._max_prompt_tokens,
        )
        metrics = batch_metrics(streams)
        old, rollout = sequences.old_log_probs, sequences.rollout_log_probs
        if old is not None and rollout is not None and old is not rollout:
            # Tokens of earlier versions differ because the policy has moved, which is no error.
            same_weights = sequences.mask & (batch.versions == version)
            metrics |= mismatch_metrics(old, rollout, same_weights, batch.offsets)
        return metrics


def loss_settings(algorithm: ResolvedAlgorithm, temperature: float) -> LossSettings:
    """The part of the job that the learner needs in order to turn streams into a loss."""
    in_loss = algorithm.kl.in_loss
    params: dict[str, Any] = {**algorithm.policy_loss.params, **_bypass_params(algorithm)}
    return LossSettings(
        policy_loss=algorithm.policy_loss.type,
        policy_loss_params=params,
        aggregation=algorithm.aggregation,
        aggregation_params=algorithm.aggregation_params,
        kl_kind=None if in_loss is None else in_loss.kind,
        kl_coefficient=0.0 if in_loss is None else in_loss.coefficient,
        entropy_coefficient=algorithm.entropy_coefficient,
        value_clip=None if algorithm.critic is None else algorithm.critic.value_clip,
        temperature=temperature,
    )


def _bypass_params(algorithm: ResolvedAlgorithm) -> dict[str, Any]:
    """In bypass mode the correction happens inside the loss: there is no third policy to correct against before it."""
    correction = algorithm.rollout_correction
    loss = algorithm.policy_loss.type
    if loss not in ("bypassPpoClip", "bypassReinforce"):
        return {}
    params: dict[str, Any] = {"rejection": _rejection(algorithm)}
    if loss == "bypassReinforce":
        weights = correction.weights
        params["level"] = "none" if weights is None else weights.level
        if weights is not None:
            params |= {"low": weights.low, "high": weights.high}
    return params


def _rejection(algorithm: ResolvedAlgorithm) -> tuple[Rejection, ...]:
    rules = algorithm.rollout_correction.rejection
    return tuple(Rejection(rule.statistic, rule.over, rule.high, rule.low) for rule in rules)


def _controller(algorithm: ResolvedAlgorithm) -> KlController:
    in_reward = algorithm.kl.in_reward
    if in_reward is None:
        return FixedKl(0.0)
    if in_reward.controller.type == "fixed":
        return FixedKl(in_reward.coefficient)
    return AdaptiveKl(in_reward.coefficient, in_reward.controller.target, in_reward.controller.horizon)


def _segments(batch: TrainingBatch) -> Segments:
    return Segments.from_lengths(torch.from_numpy(batch.sequences.response_lengths))


def _tensor(stream: FloatArray | None) -> torch.Tensor | None:
    return None if stream is None else torch.from_numpy(stream)


def _greedy_scores(groups: Sequence[Group]) -> torch.Tensor | None:
    """``[S]``: each sequence's prompt's greedy score; None when the job does not sample greedy responses."""
    if any(group.greedy_score is None for group in groups):
        return None
    return torch.tensor([group.greedy_score for group in groups for _ in group.samples], dtype=torch.float32)


def part_scores(rewards: Sequence[RewardResult]) -> dict[str, npt.NDArray[np.float32]]:
    """What each reward function gave, unweighted, ``[S]`` by name; NaN where a function was not asked."""
    names = sorted({name for reward in rewards for name in reward.parts})
    return {name: np.array([reward.parts.get(name, np.nan) for reward in rewards], dtype=np.float32) for name in names}


def _parts(batch: TrainingBatch, names: Iterable[str]) -> torch.Tensor:
    """``[S, K]``: the named reward functions' scores as a tensor, 0 where a function was not asked."""
    rewards = [sample.reward for sample in batch.samples if sample.reward is not None]
    rows = [[reward.parts.get(name, 0.0) for name in names] for reward in rewards]
    return torch.tensor(rows, dtype=torch.float32)
