"""What happens to a batch of scored groups before, in and after the learner's update.

    forward passes -> KL in the reward -> advantages -> correction -> update -> metrics

The mathematics is in ``algorithms``, the models are in the learner; this module decides which streams a job needs, asks
for them in one call, and hands them on. It keeps the only state of the algorithm itself: the controllers of
the KL and entropy coefficients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rljob_api.resolved import ResolvedAlgorithm, ResolvedBatch
from rljob_api.spec.pipeline import OLDEST_AGE
from rljob_api.spec.reward import Reward
from rljob_trainer.algorithms import (
    AdvantageInputs,
    AdvantageOutput,
    NotFiniteError,
    UnfitRewardError,
    advantage_estimators,
    advantages,
    aggregations,
    clipped_scores,
    correct,
    earned_at_turns,
    gradient_noise,
    kl_penalised_rewards,
    normalised_scores,
    resampled,
    rollout_share,
    without_truncated,
)
from rljob_trainer.episodes.episode import Group
from rljob_trainer.episodes.tokens import FloatArray
from rljob_trainer.errors import DataError, LearnerError, StepGivenUpError
from rljob_trainer.learner.protocol import (
    Learner,
    ScoreRequest,
    ScoreResult,
    UpdateRequest,
    UpdateResult,
)
from rljob_trainer.pipeline.loop import Stage, unmeasured
from rljob_trainer.pipeline.parts import Apart, TrainedBatch
from rljob_trainer.telemetry.batch_metrics import (
    oldest_versions,
    optimizer_step_metrics,
)
from rljob_trainer.training.agreement import GapExplainer, compared
from rljob_trainer.training.batch import TrainingBatch, layout
from rljob_trainer.training.batch_figures import batch_figures
from rljob_trainer.training.checks import TrainedPrompts, check_groups, check_layout, check_scored
from rljob_trainer.training.scores import greedy_scores, part_matrix, slope, turn_rewards
from rljob_trainer.training.settings import (
    correction_settings,
    entropy_controller,
    kl_controller,
    loss_settings,
    part_weights,
    steering_settings,
    with_correction,
)

_log = logging.getLogger(__name__)


class TrainingStep:
    """One job's way of learning from a batch.

    Usage::

        step = TrainingStep(spec.algorithm, spec.batch, learner, temperature=1.0, seed=0)
        trained = await step.run(groups, number=1, version=0)
    """

    def __init__(
        self,
        algorithm: ResolvedAlgorithm,
        batch: ResolvedBatch,
        learner: Learner,
        *,
        temperature: float,
        seed: int,
        keeps_first_weights: bool = False,
        max_prompt_tokens: int | None = None,
        reward: Reward | None = None,
        stage: Stage = unmeasured,
        report: Callable[[str], None] = _log.warning,
        prompts: TrainedPrompts | None = None,
    ) -> None:
        """``keeps_first_weights``: a version may be trained in more than one call of ``run``, and the learner keeps the
        weights that it begins with until its last one: for pi_old, and for an engine that joins between two calls.
        ``prompts``: refuses those that come a second time; None: groups may be trained as often as somebody likes."""
        self.algorithm = algorithm
        self.kl = kl_controller(algorithm)
        self.entropy = entropy_controller(algorithm)
        self._settings = steering_settings(algorithm)
        """As the job has them: what the state was made by."""
        self._batch = batch
        self._learner = learner
        self._temperature = temperature
        self._seed = seed
        self._keeps_first_weights = keeps_first_weights
        self._max_prompt_tokens = max_prompt_tokens
        self._reward = reward
        self._part_weights = {} if reward is None else part_weights(reward)
        self._stage = stage
        self._report = report
        self._estimator = advantage_estimators[algorithm.advantage.estimator]
        self._loss = loss_settings(algorithm, temperature)
        self.correcting = False
        """Whether the correction has been switched on beyond what the job says."""
        self._prompts = prompts
        self._explainer = GapExplainer(learner, temperature, report)
        self._trained_version: int | None = None
        self._steps_taken: list[int] = []
        """The policy's optimizer steps in each of the latest versions, the present one last. By place and not by
        number: a resumed run counts its versions from elsewhere."""

    async def run(self, groups: Sequence[Group], *, number: int, version: int) -> TrainedBatch:
        """Trains on the groups as step ``number``. Raises what learner and algorithms raise."""
        if self._prompts is not None:
            self._prompts.check(groups, number)
        check_groups(groups, version)
        batch = layout(groups)
        check_layout(batch, groups)
        made = batch.sequences.mask  # before anything is rejected
        mini_batches = self._mini_batches(len(groups), batch, number)
        continues = version == self._trained_version
        if not continues:
            self._steps_taken = [*self._steps_taken[-OLDEST_AGE:], 0]
        scored, own = await self._score(batch, optimizer_steps=len(mini_batches), continues=continues)
        check_scored(replace(scored, log_probs=own), batch, number)
        if scored.log_probs is not None and (not continues or self._anchors):
            await self._explainer.look(batch, made, scored.log_probs, version, number, anchored=continues)
        with self._stage("advantage"):
            try:
                batch, corrected = self._corrected(batch, scored)
            except NotFiniteError as error:
                raise LearnerError(f"step {number}: {error} ({batch.owner(error.row).id})") from error
            try:
                inputs, kl_in_reward = self._advantage_inputs(groups, batch, scored, own)
                estimated = advantages(self._estimator.name, inputs, **self.algorithm.advantage.params)
            except NotFiniteError as error:
                raise LearnerError(f"step {number}: {error} ({batch.episodes[error.row].id})") from error
            except UnfitRewardError as error:
                raise DataError(f"step {number}: {error} ({batch.episodes[error.row].id})") from error
            batch = self._filled(batch, scored, estimated, version)
        with self._stage("update"):
            update = asyncio.ensure_future(self._update(batch, mini_batches, number, continues=continues))
            try:
                await asyncio.sleep(0)  # it is sent off; what it doesn't change is looked at while the learner works
                penalised = None if self.algorithm.kl.in_reward is None else inputs.sequence_rewards
                metrics = batch_figures(batch, penalised, version, self._max_prompt_tokens) | corrected
                apart: Apart | None = None
                if scored.log_probs is not None:
                    scored_with = version if not continues or self._anchors else None
                    apart, agreement = compared(batch, made, scored.log_probs, scored_with, name_worst=self._judged)
                    metrics |= agreement
                result = await update
            finally:
                update.cancel()
        metrics.update(scored.metrics)
        metrics.update(result.metrics)
        metrics.update(
            optimizer_step_metrics(
                self._moved(batch, version), mini_batches, batch.groups[batch.episode_of], result.actor_steps
            )
        )
        self._steps_taken[-1] += result.actor_steps
        if scored.log_probs is None:
            updated_from = None if continues else version
            apart, agreement = compared(batch, made, result.first_log_probs, updated_from, name_worst=self._judged)
            metrics.update(agreement)
            metrics.update(self._bypassed(batch, result.first_log_probs))
            if result.first_log_probs is not None and not continues:
                # The weights have changed: nothing that is given up from here on may say that they have not.
                with suppress(StepGivenUpError):
                    await self._explainer.look(batch, made, result.first_log_probs, version, number, anchored=False)
        self._trained_version = version
        if self._prompts is not None:
            self._prompts.trained(groups, number)
        if (
            self.algorithm.gradient_noise
            and batch.sequences.advantages is not None
            and result.actor_steps
            and result.grad_norm is not None
        ):
            of_batch = torch.from_numpy(batch.sequences.advantages)
            metrics.update(gradient_noise(inputs, of_batch, result.grad_norm))
        for told in (*result.skipped, *result.notes):
            self._report(f"step {number}: {told}")
        if kl_in_reward is not None:
            metrics["kl/in_reward"] = kl_in_reward
            metrics["kl/coefficient"] = self.kl.coefficient
            if self._trains_actor(number):  # while nothing moves the policy, its KL follows no coefficient
                self.kl.update(kl_in_reward, len(batch))
        if self.entropy is not None:
            metrics["actor/entropy_coefficient"] = self.entropy.coefficient
            if result.entropy is not None:
                self.entropy.update(result.entropy)
        return TrainedBatch(metrics, apart)

    async def give_up(self) -> None:
        """Asks that ``run`` raises ``StepGivenUpError`` soon, if the weights have not changed yet."""
        await self._learner.give_up()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the learner's state."""
        return {
            "kl": self.kl.state_dict(),
            "entropy": None if self.entropy is None else self.entropy.state_dict(),
            "correcting": self.correcting,
            "steps_taken": list(self._steps_taken),
            "settings": self._settings,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool = True) -> None:
        """``own`` False: the state of another job, whose settings may differ from this one's. What other settings have
        made (a coefficient that followed its target, a correction that was switched on) is left, and that is said."""
        foreign = set() if own else {name for name, now in self._settings.items() if state["settings"][name] != now}
        if "algorithm.kl.inReward" not in foreign:
            self.kl.load_state_dict(state["kl"])
        if self.entropy is not None and state["entropy"] is not None and "algorithm.entropyTarget" not in foreign:
            self.entropy.load_state_dict(state["entropy"])
        if state["correcting"] and "algorithm.rolloutCorrection" not in foreign:
            self.switch_correction_on()
        self._steps_taken = list(state["steps_taken"])
        for name in sorted(foreign):
            self._report(f"{name} differs from the checkpoint's job: it restarts with this job's settings")

    def switch_correction_on(self) -> None:
        """From the next batch on: mode decoupled, with importance weights."""
        self.algorithm = with_correction(self.algorithm)
        self._loss = loss_settings(self.algorithm, self._temperature)
        self.correcting = True

    # --- the stages

    @property
    def _judged(self) -> bool:
        """Whether somebody wants to know which samples are furthest apart."""
        return self.algorithm.rollout_correction.limits is not None

    @property
    def _anchors(self) -> bool:
        """Whether pi_old is the policy that the version began with, computed by a forward pass."""
        return self.algorithm.rollout_correction.mode != "bypass" and not self.algorithm.interpolates

    async def _score(
        self, batch: TrainingBatch, optimizer_steps: int, *, continues: bool
    ) -> tuple[ScoreResult, FloatArray | None]:
        """The forward passes that this job needs before its update, in one call. ``continues``: the weights have moved
        since the version began.

        Also ``[tokens]`` the log-probs of the policy that the sums of squares are of. The result has them only where
        they are pi_old as well.
        """
        algorithm = self.algorithm
        mode = algorithm.rollout_correction.mode
        # One optimizer step on the weights that are to be scored: its own forward pass gives pi_old for nothing.
        anchored_by_update = algorithm.interpolates or (mode == "none" and optimizer_steps == 1 and not continues)
        needs_old = mode != "bypass" and (
            not anchored_by_update or algorithm.kl.in_reward is not None or self._estimator.needs_sum_squared_probs
        )
        needs_squares = self._estimator.needs_sum_squared_probs or algorithm.gradient_noise
        if not (needs_old or needs_squares or algorithm.needs_reference or algorithm.needs_critic):
            return ScoreResult(), None
        with self._stage("score"):
            scored = await self._learner.score(
                batch.sequences,
                ScoreRequest(
                    temperature=self._temperature,
                    log_probs=needs_old or needs_squares,
                    sum_squared_probs=needs_squares,
                    vocabulary_kl=algorithm.kl.in_reward is not None and algorithm.kl.in_reward.kind == "full",
                    reference=algorithm.needs_reference,
                    values=algorithm.needs_critic,
                    anchored=continues and self._anchors,
                ),
            )
        return scored if needs_old else replace(scored, log_probs=None), scored.log_probs

    async def _update(
        self, batch: TrainingBatch, mini_batches: list[list[int]], number: int, *, continues: bool
    ) -> UpdateResult:
        loss = self._loss
        if self.entropy is not None:
            loss = replace(loss, entropy_coefficient=self.entropy.coefficient)
        return await self._learner.update(
            batch.sequences,
            loss,
            mini_batches,
            UpdateRequest(
                update_actor=self._trains_actor(number),
                update_critic=self.algorithm.critic is not None,
                continues=continues,
                keep_anchor=self._keeps_first_weights and not continues,
            ),
        )

    def _trains_actor(self, number: int) -> bool:
        critic = self.algorithm.critic
        return critic is None or number > critic.warmup_steps

    def _corrected(self, batch: TrainingBatch, scored: ScoreResult) -> tuple[TrainingBatch, dict[str, float]]:
        """Decoupled mode: weights and a narrowed mask for what engine and trainer disagree about; its diagnostics."""
        correction, sequences = self.algorithm.rollout_correction, batch.sequences
        if correction.mode != "decoupled" or self.algorithm.interpolates:
            return batch, {}
        assert scored.log_probs is not None
        assert sequences.rollout_log_probs is not None
        corrected = correct(
            torch.from_numpy(scored.log_probs),
            torch.from_numpy(sequences.rollout_log_probs),
            torch.from_numpy(sequences.mask),
            batch.segments,
            correction_settings(correction),
        )
        weights = None if corrected.weights is None else corrected.weights.to(torch.float32).numpy()
        return batch.of(replace(sequences, mask=corrected.mask.numpy(), weights=weights)), corrected.metrics

    def _bypassed(self, batch: TrainingBatch, first: FloatArray | None) -> dict[str, float]:
        """Bypass mode: the diagnostics of the correction, which the losses do themselves.

        ``first [tokens]``: the policy's log-probs in the update's first forward pass, NaN for sequences outside it. The
        weights have changed: whatever is no number is left out of the diagnostics, and ends nothing.
        """
        sequences = batch.sequences
        if self.algorithm.rollout_correction.mode != "bypass" or first is None or sequences.rollout_log_probs is None:
            return {}
        return correct(
            torch.from_numpy(first),
            torch.from_numpy(sequences.rollout_log_probs),
            torch.from_numpy(sequences.mask & np.isfinite(first) & np.isfinite(sequences.rollout_log_probs)),
            batch.segments,
            correction_settings(self.algorithm.rollout_correction),
        ).metrics

    def _advantage_inputs(
        self, groups: Sequence[Group], batch: TrainingBatch, scored: ScoreResult, own: FloatArray | None
    ) -> tuple[AdvantageInputs, float | None]:
        """What the estimator gets, and the mean KL that the rewards were charged for. ``own [tokens]``: as `_score`
        gives them; a token's gradient is measured by one policy's pi and sum of pi^2, not by two policies'.

        An episode counts once, however many leaves it has: its tokens are one trajectory, in the order in which they
        were made, and what the estimators call a sequence is an episode here.
        """
        algorithm, sequences = self.algorithm, batch.sequences
        segments = batch.episode_segments
        mask = torch.from_numpy(sequences.mask)
        scores = self._shaped_scores(batch)
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
                vocabulary_kl=_tensor(scored.vocabulary_kl),
            )
            kl = float(mean_kl)
        if (earned := self._earned(batch)) is not None:
            if rewards is None:
                rewards = torch.where(segments.is_last(mask), segments.spread(scores), 0)
            rewards = earned_at_turns(rewards, earned, mask, segments)
        bootstrap, greedy = algorithm.truncated.bootstrap, greedy_scores(groups)
        final = None if scored.final_values is None else scored.final_values[batch.last_leaf]
        inputs = AdvantageInputs(
            mask=mask,
            segments=segments,
            scores=scores,
            rewards=rewards,
            groups=torch.from_numpy(batch.groups),
            values=_tensor(scored.values),
            final_values=_tensor(final) if bootstrap else None,
            truncated=torch.from_numpy(batch.truncated) if bootstrap else None,
            greedy_scores=None if greedy is None else self._clipped(greedy),
            parts=part_matrix(batch, self._part_weights) if self._estimator.needs_parts else None,
            part_weights=torch.tensor(list(self._part_weights.values())) if self._estimator.needs_parts else None,
            log_probs=_tensor(old if own is None else own),
            sum_squared_probs=_tensor(scored.sum_squared_probs),
            weights=_tensor(sequences.weights),
        )
        return inputs, kl

    def _shaped_scores(self, batch: TrainingBatch) -> torch.Tensor:
        """``[E]``: what is trained on in place of the scores."""
        scores = self._bounded_scores(batch)
        return normalised_scores(scores) if self._normalises else scores

    def _bounded_scores(self, batch: TrainingBatch) -> torch.Tensor:
        """``[E]``: the scores, replaced where the job says so and clipped."""
        truncated, scores = self.algorithm.truncated, torch.from_numpy(batch.scores)
        if truncated.reward == "replace":
            scores = torch.where(torch.from_numpy(batch.truncated), truncated.replacement, scores)
        return self._clipped(scores)

    @property
    def _normalises(self) -> bool:
        return self._reward is not None and self._reward.normalize

    def _earned(self, batch: TrainingBatch) -> torch.Tensor | None:
        """``[tokens]``: what of the shaped scores was earned before the end, and where; None: nothing."""
        earned = turn_rewards(batch)
        if earned is None:
            return None
        if self.algorithm.truncated.reward == "replace":
            # Of a score that is not theirs they are no parts.
            earned = torch.where(batch.episode_segments.spread(torch.from_numpy(batch.truncated)), 0, earned)
        if self._normalises:
            scores = self._bounded_scores(batch)
            earned = earned * slope(scores, normalised_scores(scores))
        return earned

    def _clipped(self, scores: torch.Tensor) -> torch.Tensor:
        clip = None if self._reward is None else self._reward.clip
        return scores if clip is None else clipped_scores(scores, clip.low, clip.high)

    def _filled(
        self, batch: TrainingBatch, scored: ScoreResult, output: AdvantageOutput, version: int
    ) -> TrainingBatch:
        """The batch with all streams that the learner gets."""
        sequences, share = batch.sequences, None
        old, mask = scored.log_probs, sequences.mask
        if self.algorithm.rollout_correction.mode == "bypass":
            old = sequences.rollout_log_probs
        elif self.algorithm.interpolates:
            old, share = None, rollout_share(torch.from_numpy(version - batch.versions)).numpy()
        if self.algorithm.truncated.mask:
            truncated = torch.from_numpy(batch.truncated)
            mask = without_truncated(torch.from_numpy(mask), batch.episode_segments, truncated).numpy()
        narrowed = batch.of(replace(sequences, mask=mask))
        complete = replace(
            narrowed.sequences,
            advantages=output.advantages.to(torch.float32).numpy(),
            returns=None if output.returns is None else output.returns.to(torch.float32).numpy(),
            values=scored.values,
            ref_log_probs=scored.ref_log_probs,
            old_log_probs=old,
            rollout_share=share,
            shares=narrowed.shares(of_prompts=aggregations[self.algorithm.aggregation].over_prompts),
        )
        return batch.of(complete)

    def _mini_batches(self, groups: int, batch: TrainingBatch, number: int) -> list[list[int]]:
        """Indices of sequences, one list per optimizer step: all mini-batches of the first epoch, then of the next."""
        members: list[list[int]] = [[] for _ in range(groups)]
        leaves: list[list[int]] = [[] for _ in batch.episodes]
        for sequence, episode in enumerate(batch.episode_of.tolist()):
            leaves[episode].append(sequence)
        for episode, group in zip(self._drawn(batch, number), batch.groups, strict=True):
            members[group] += leaves[episode]
        size = self._batch.mini_batch_groups
        mini_batches: list[list[int]] = []
        for epoch in range(self._batch.epochs):
            order = np.arange(groups)
            if self._batch.shuffle:
                order = np.random.default_rng([self._seed, number, epoch]).permutation(groups)
            for start in range(0, groups, size):
                mini_batches.append([s for g in order[start : start + size] for s in members[g]])
        return mini_batches

    def _drawn(self, batch: TrainingBatch, number: int) -> list[int]:
        """The episode that is trained on in the place of each; itself, unless the job resamples (PF-PPO)."""
        given = self.algorithm.resampling
        if given is None:
            return list(range(len(batch)))
        # Made from the job's seed and the step: the same after a resume.
        seed = int(np.random.default_rng([self._seed, number]).integers(1 << 62))
        scores = self._shaped_scores(batch)
        generator = torch.Generator().manual_seed(seed)
        return [int(i) for i in resampled(scores, generator, kind=given.kind, power=given.power)]

    def _moved(self, batch: TrainingBatch, version: int) -> dict[int, int]:
        """Optimizer steps since the weights of each group's oldest token, by the group's place."""
        groups, oldest = oldest_versions(batch.versions, batch.episode_offsets, batch.groups)
        ages = (version - oldest).tolist()
        return {g: sum(self._steps_taken[-1 - age :]) for g, age in zip(groups.tolist(), ages, strict=True)}


def _tensor(stream: FloatArray | None) -> torch.Tensor | None:
    return None if stream is None else torch.from_numpy(stream)
