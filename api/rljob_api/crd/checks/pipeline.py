"""CEL for the rules about spec.batch, spec.pipeline and spec.stop."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.crd import expressions as cel
from rljob_api.crd.checks.check import SPEC, TRAINER, Check


def checks() -> Iterator[Check]:
    """In the order of the rules."""
    yield from _pipeline()
    yield from _stop()


def _pipeline() -> Iterator[Check]:
    yield Check(
        "mini_batches_fill_the_batch",
        SPEC,
        f"{cel.IS_ASYNC} || {cel.GROUPS} % {cel.MINI} == 0",
        "must divide groups (128 unless set); choose a divisor",
        ".batch.miniBatchGroups",
    )
    yield Check(
        "async_groups_follow_from_the_pulls",
        SPEC,
        f"!({cel.IS_ASYNC}) || !has(self.batch.groups) || self.batch.groups == {cel.PULL}",
        "differs from syncEvery x requireBatches x miniBatchGroups; leave it out",
        ".batch.groups",
    )
    yield Check(
        "every_rank_gets_a_sequence",
        SPEC,
        cel.brief(
            "self.trainer",
            cel.brief(
                "self.batch",
                f"{cel.MINI} * {cel.SAMPLES} >= self.trainer.parallelism.replicate * {cel.shards('self.trainer')}",
                name="b",
            ),
        ),
        "a mini-batch has fewer sequences than there are trainer ranks; raise miniBatchGroups or samplesPerPrompt",
        ".batch.miniBatchGroups",
    )
    for field in ("syncEvery", "requireBatches", "staleness.maxAge", "staleness.fraction", "partialRollout"):
        yield Check(
            "async_settings_belong_to_fully_async",
            ("spec", "pipeline"),
            f"self.mode == 'fullyAsync' || !has(self.{field})",
            "has a meaning in mode fullyAsync only; remove it, or set that mode",
            f".{field}",
        )
    yield Check(
        "partial_rollout_needs_age",
        SPEC,
        f"!({cel.IS_ASYNC}) || !has(self.pipeline.partialRollout) || self.pipeline.partialRollout == 'none' || "
        f"{cel.MAX_AGE} > 0",
        "a response that goes on under new weights is at least one version old; raise staleness.maxAge",
        ".pipeline.partialRollout",
    )
    yield Check(
        "sample_budget_needs_age",
        ("spec", "pipeline", "staleness"),
        "!has(self.fraction) || self.fraction == 0.0 || !has(self.maxAge) || self.maxAge > 0",
        "samples ahead of the trainer are at least one version old; raise maxAge, or remove fraction",
        ".fraction",
    )


def _stop() -> Iterator[Check]:
    fields = ("steps", "epochs", "samples", "reward", "seconds")
    yield Check(
        "training_ends",
        ("spec", "stop"),
        " || ".join(f"has(self.{field})" for field in fields),
        "names no condition; set steps, epochs, samples, reward or seconds",
    )
    yield Check(
        "schedules_know_the_last_step",
        SPEC,
        f"self.trainer.optimizer.schedule == 'constant' || {cel.STEPS_GIVEN}",
        "stop.steps is required by a schedule that falls until the last step; set it, or use schedule: constant",
        ".stop",
    )
    yield Check(
        "least_rate_belongs_to_a_falling_schedule",
        (*TRAINER, "optimizer"),
        "self.minLearningRateRatio == 0.0 || self.schedule != 'constant'",
        "has no meaning with schedule: constant; set cosine or linear, or remove it",
        ".minLearningRateRatio",
    )
    yield Check(
        "warmup_ends_before_training",
        SPEC,
        f"!{cel.STEPS_GIVEN} || self.trainer.optimizer.warmupSteps == 0 || "
        "self.trainer.optimizer.warmupSteps < self.stop.steps",
        "the warm-up does not end before stop.steps; lower it, or raise stop.steps",
        ".trainer.optimizer.warmupSteps",
    )
    yield Check(
        "critic_warmup_ends_before_training",
        SPEC,
        f"!{cel.STEPS_GIVEN} || !has(self.algorithm.critic) || !has(self.algorithm.critic.warmupSteps) || "
        f"!{cel.estimator_in('self.algorithm', cel.WITH_CRITIC)} || "
        "self.algorithm.critic.warmupSteps < self.stop.steps",
        "in all steps only the critic would learn; lower it, or raise stop.steps",
        ".algorithm.critic.warmupSteps",
    )
    yield Check(
        "stop_comes_before_the_deadline",
        SPEC,
        "!has(self.stop) || !has(self.stop.seconds) || !has(self.deadlines.runSeconds) || "
        "self.stop.seconds < self.deadlines.runSeconds",
        "must be less than deadlines.runSeconds, or the job fails instead of ending; lower it",
        ".stop.seconds",
    )
