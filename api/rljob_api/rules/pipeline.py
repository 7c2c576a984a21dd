"""Rules about spec.batch, spec.pipeline and spec.stop."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.rules.registry import Job, rule
from rljob_api.violations import Violation


@rule
def mini_batches_fill_the_batch(job: Job) -> Iterator[Violation]:
    groups, mini = job.resolved.batch.groups, job.resolved.batch.mini_batch_groups
    if job.resolved.pipeline.mode != "fullyAsync" and groups % mini:
        yield Violation(
            "spec.batch.miniBatchGroups",
            f"{mini} does not divide groups = {groups}",
            "choose a divisor of groups" if mini < groups else "choose at most groups",
        )


@rule
def async_groups_follow_from_the_pulls(job: Job) -> Iterator[Violation]:
    given, pipeline, batch = job.spec.batch.groups, job.resolved.pipeline, job.resolved.batch
    if pipeline.mode == "fullyAsync" and given is not None and given != batch.groups:
        yield Violation(
            "spec.batch.groups",
            f"{given} differs from syncEvery x requireBatches x miniBatchGroups = {pipeline.sync_every} x "
            f"{pipeline.require_batches} x {batch.mini_batch_groups}",
            f"leave it out, or write {batch.groups}",
        )


@rule
def every_rank_gets_a_sequence(job: Job) -> Iterator[Violation]:
    batch, ranks = job.resolved.batch, job.resolved.trainer.parallelism.ranks
    sequences = batch.mini_batch_groups * batch.samples_per_prompt
    if sequences < ranks:
        yield Violation(
            "spec.batch.miniBatchGroups",
            f"a mini-batch has {batch.mini_batch_groups} x {batch.samples_per_prompt} = {sequences} sequences, "
            f"fewer than the {ranks} trainer ranks that share it",
            "raise miniBatchGroups or samplesPerPrompt, or use fewer ranks",
        )


@rule
def async_settings_belong_to_fully_async(job: Job) -> Iterator[Violation]:
    pipeline = job.spec.pipeline
    if pipeline.mode == "fullyAsync":
        return
    given = {
        "syncEvery": pipeline.sync_every,
        "requireBatches": pipeline.require_batches,
        "staleness.maxAge": pipeline.staleness.max_age,
        "staleness.fraction": pipeline.staleness.fraction,
        "partialRollout": pipeline.partial_rollout,
    }
    for name, value in given.items():
        if value is not None:
            yield Violation(
                f"spec.pipeline.{name}",
                f"has no meaning in mode {pipeline.mode}",
                "remove it, or set mode: fullyAsync",
            )


@rule
def partial_rollout_needs_age(job: Job) -> Iterator[Violation]:
    pipeline = job.resolved.pipeline
    if pipeline.partial_rollout != "none" and pipeline.staleness.max_age == 0:
        yield Violation(
            "spec.pipeline.partialRollout",
            "a response that goes on under new weights is at least one version old, but staleness.maxAge is 0",
            "raise maxAge, or set partialRollout: none",
        )


@rule
def sample_budget_needs_age(job: Job) -> Iterator[Violation]:
    staleness = job.spec.pipeline.staleness
    if staleness.fraction and staleness.max_age == 0:
        yield Violation(
            "spec.pipeline.staleness.fraction",
            "samples ahead of the trainer are at least one version old, but maxAge is 0",
            "raise maxAge, or remove fraction",
        )


@rule
def training_ends(job: Job) -> Iterator[Violation]:
    stop = job.spec.stop
    if stop is not None and all(value is None for value in dict(stop).values()):
        yield Violation("spec.stop", "names no condition", "set steps, epochs, samples, reward or seconds")


@rule
def schedules_know_the_last_step(job: Job) -> Iterator[Violation]:
    optimizer, stop = job.spec.trainer.optimizer, job.resolved.stop
    if optimizer.schedule != "constant" and stop.steps is None:
        yield Violation(
            "spec.stop.steps",
            f"is required by trainer.optimizer.schedule: {optimizer.schedule}, which falls until the last step",
            "set it, or use schedule: constant",
        )


@rule
def least_rate_belongs_to_a_falling_schedule(job: Job) -> Iterator[Violation]:
    optimizer = job.spec.trainer.optimizer
    if optimizer.min_learning_rate_ratio and optimizer.schedule == "constant":
        yield Violation(
            "spec.trainer.optimizer.minLearningRateRatio",
            "has no meaning with schedule: constant",
            "set schedule: cosine or linear, or remove it",
        )


@rule
def warmup_ends_before_training(job: Job) -> Iterator[Violation]:
    warmup, steps = job.spec.trainer.optimizer.warmup_steps, job.resolved.stop.steps
    if steps is not None and warmup >= steps and warmup > 0:
        yield Violation(
            "spec.trainer.optimizer.warmupSteps",
            f"{warmup} steps of warm-up do not end before stop.steps = {steps}",
            "lower it, or raise stop.steps",
        )


@rule
def critic_warmup_ends_before_training(job: Job) -> Iterator[Violation]:
    critic, steps = job.resolved.algorithm.critic, job.resolved.stop.steps
    if critic is not None and steps is not None and critic.warmup_steps >= steps:
        yield Violation(
            "spec.algorithm.critic.warmupSteps",
            f"in all {steps} steps only the critic would learn (stop.steps = {steps})",
            "lower it, or raise stop.steps",
        )
