"""Rules about spec.batch, spec.pipeline and spec.stop."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.rules import cel
from rljob_api.rules.cel import SPEC, TRAINER, Cel
from rljob_api.rules.registry import Job, rule
from rljob_api.spec.pipeline import DEFAULT_GROUPS
from rljob_api.violations import Violation


@rule(
    cel=Cel(
        SPEC,
        f"{cel.IS_ASYNC} || {cel.GROUPS} % {cel.MINI} == 0",
        f"must divide groups ({DEFAULT_GROUPS} unless set); choose a divisor",
        ".batch.miniBatchGroups",
    )
)
def mini_batches_fill_the_batch(job: Job) -> Iterator[Violation]:
    groups, mini = job.resolved.batch.groups, job.resolved.batch.mini_batch_groups
    if job.resolved.pipeline.mode != "fullyAsync" and groups % mini:
        yield Violation(
            "spec.batch.miniBatchGroups",
            f"{mini} does not divide groups = {groups}",
            "choose a divisor of groups" if mini < groups else "use at most groups",
        )


@rule(
    cel=Cel(
        SPEC,
        f"!({cel.IS_ASYNC}) || !has(self.batch.groups) || self.batch.groups == {cel.PULL}",
        "differs from syncEvery x requireBatches x miniBatchGroups; remove it",
        ".batch.groups",
    )
)
def async_groups_follow_from_the_pulls(job: Job) -> Iterator[Violation]:
    given, pipeline, batch = job.spec.batch.groups, job.resolved.pipeline, job.resolved.batch
    if pipeline.mode == "fullyAsync" and given is not None and given != batch.groups:
        yield Violation(
            "spec.batch.groups",
            f"{given} differs from syncEvery x requireBatches x miniBatchGroups = {pipeline.sync_every} x "
            f"{pipeline.require_batches} x {batch.mini_batch_groups}",
            f"remove it, or set it to {batch.groups}",
        )


@rule(
    cel=Cel(
        SPEC,
        cel.brief(
            "self.trainer",
            cel.brief(
                "self.batch",
                f"{cel.MINI} * {cel.SAMPLES} >= self.trainer.parallelism.replicate * {cel.shards('self.trainer')}",
                name="b",
            ),
        ),
        "a mini-batch has fewer sequences than trainer ranks to share them; raise miniBatchGroups or samplesPerPrompt",
        ".batch.miniBatchGroups",
    )
)
def every_rank_gets_a_sequence(job: Job) -> Iterator[Violation]:
    batch, shares = job.resolved.batch, job.resolved.trainer.parallelism.data_indices
    sequences = batch.mini_batch_groups * batch.samples_per_prompt
    if sequences < shares:
        yield Violation(
            "spec.batch.miniBatchGroups",
            f"a mini-batch has {batch.mini_batch_groups} x {batch.samples_per_prompt} = {sequences} sequences, "
            f"fewer than the {shares} trainer ranks (replicate x shard) that share it",
            "raise miniBatchGroups or samplesPerPrompt, or use fewer ranks",
        )


@rule(
    cel=[
        Cel(
            ("spec", "pipeline"),
            f"self.mode == 'fullyAsync' || !has(self.{field})",
            "applies only in mode fullyAsync; remove it, or set that mode",
            f".{field}",
        )
        for field in (
            "syncEvery",
            "requireBatches",
            "staleness.maxAge",
            "staleness.fraction",
            "staleness.onDeadline",
            "partialRollout",
        )
    ]
)
def async_settings_belong_to_fully_async(job: Job) -> Iterator[Violation]:
    pipeline = job.spec.pipeline
    if pipeline.mode == "fullyAsync":
        return
    given = {
        "syncEvery": pipeline.sync_every,
        "requireBatches": pipeline.require_batches,
        "staleness.maxAge": pipeline.staleness.max_age,
        "staleness.fraction": pipeline.staleness.fraction,
        "staleness.onDeadline": pipeline.staleness.on_deadline,
        "partialRollout": pipeline.partial_rollout,
    }
    for name, value in given.items():
        if value is not None:
            yield Violation(
                f"spec.pipeline.{name}",
                f"does not apply in mode {pipeline.mode}",
                "remove it, or set mode: fullyAsync",
            )


@rule(
    cel=Cel(
        SPEC,
        f"!({cel.IS_ASYNC}) || !has(self.pipeline.partialRollout) || self.pipeline.partialRollout == 'none' || "
        f"{cel.in_force('self.pipeline.staleness.maxAge')} > 0",
        "a response that continues under new weights is at least one version old; raise staleness.maxAge",
        ".pipeline.partialRollout",
    )
)
def partial_rollout_needs_age(job: Job) -> Iterator[Violation]:
    pipeline = job.resolved.pipeline
    if pipeline.partial_rollout != "none" and pipeline.staleness.max_age == 0:
        yield Violation(
            "spec.pipeline.partialRollout",
            "a response that continues under new weights is at least one version old, but staleness.maxAge is 0",
            "raise maxAge, or set partialRollout: none",
        )


@rule(
    cel=Cel(
        ("spec", "pipeline", "staleness"),
        "!has(self.fraction) || self.fraction == 0.0 || !has(self.maxAge) || self.maxAge > 0",
        "samples ahead of the trainer are at least one version old; raise maxAge, or remove fraction",
        ".fraction",
    )
)
def sample_budget_needs_age(job: Job) -> Iterator[Violation]:
    staleness = job.spec.pipeline.staleness
    if staleness.fraction and staleness.max_age == 0:
        yield Violation(
            "spec.pipeline.staleness.fraction",
            "samples ahead of the trainer are at least one version old, but maxAge is 0",
            "raise maxAge, or remove fraction",
        )


@rule(
    cel=Cel(
        ("spec", "stop"),
        " || ".join(f"has(self.{field})" for field in ("steps", "epochs", "samples", "reward", "seconds")),
        "sets no condition; set steps, epochs, samples, reward or seconds",
    )
)
def training_ends(job: Job) -> Iterator[Violation]:
    stop = job.spec.stop
    if stop is not None and all(value is None for value in dict(stop).values()):
        yield Violation("spec.stop", "sets no condition", "set steps, epochs, samples, reward or seconds")


@rule(
    cel=Cel(
        SPEC,
        f"self.trainer.optimizer.schedule == 'constant' || {cel.STEPS_GIVEN}",
        "stop.steps is required by a schedule that decays until the last step; set it, or use schedule: constant",
        ".stop",
    )
)
def schedules_know_the_last_step(job: Job) -> Iterator[Violation]:
    optimizer, stop = job.spec.trainer.optimizer, job.resolved.stop
    if optimizer.schedule != "constant" and stop.steps is None:
        yield Violation(
            "spec.stop.steps",
            f"is required by trainer.optimizer.schedule: {optimizer.schedule}, which decays until the last step",
            "set it, or use schedule: constant",
        )


@rule(
    cel=Cel(
        (*TRAINER, "optimizer"),
        "self.minLearningRateRatio == 0.0 || self.schedule != 'constant'",
        "has no effect with schedule: constant; set cosine or linear, or remove it",
        ".minLearningRateRatio",
    )
)
def least_rate_belongs_to_a_falling_schedule(job: Job) -> Iterator[Violation]:
    optimizer = job.spec.trainer.optimizer
    if optimizer.min_learning_rate_ratio and optimizer.schedule == "constant":
        yield Violation(
            "spec.trainer.optimizer.minLearningRateRatio",
            "has no effect with schedule: constant",
            "set schedule: cosine or linear, or remove it",
        )


@rule(
    cel=Cel(
        SPEC,
        f"!{cel.STEPS_GIVEN} || self.trainer.optimizer.warmupSteps == 0 || "
        "self.trainer.optimizer.warmupSteps < self.stop.steps",
        "warm-up does not end before stop.steps; lower it, or raise stop.steps",
        ".trainer.optimizer.warmupSteps",
    )
)
def warmup_ends_before_training(job: Job) -> Iterator[Violation]:
    warmup, steps = job.spec.trainer.optimizer.warmup_steps, job.resolved.stop.steps
    if steps is not None and warmup >= steps and warmup > 0:
        yield Violation(
            "spec.trainer.optimizer.warmupSteps",
            f"{warmup} warm-up steps do not end before stop.steps = {steps}",
            "lower it, or raise stop.steps",
        )


@rule(
    cel=Cel(
        SPEC,
        f"!{cel.STEPS_GIVEN} || !has(self.algorithm.critic) || !has(self.algorithm.critic.warmupSteps) || "
        f"!{cel.estimator_in('self.algorithm', cel.WITH_CRITIC)} || "
        "self.algorithm.critic.warmupSteps < self.stop.steps",
        "all steps would train only the critic; lower it, or raise stop.steps",
        ".algorithm.critic.warmupSteps",
    )
)
def critic_warmup_ends_before_training(job: Job) -> Iterator[Violation]:
    critic, steps = job.resolved.algorithm.critic, job.resolved.stop.steps
    if critic is not None and steps is not None and critic.warmup_steps >= steps:
        yield Violation(
            "spec.algorithm.critic.warmupSteps",
            f"all {steps} steps would train only the critic (stop.steps = {steps})",
            "lower it, or raise stop.steps",
        )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.stop) || !has(self.stop.seconds) || !has(self.deadlines.runSeconds) || "
        "self.stop.seconds < self.deadlines.runSeconds",
        "must be less than deadlines.runSeconds, or the job fails instead of finishing; lower it",
        ".stop.seconds",
    )
)
def stop_comes_before_the_deadline(job: Job) -> Iterator[Violation]:
    seconds, whole = job.resolved.stop.seconds, job.spec.deadlines.run_seconds
    if seconds is not None and whole is not None and seconds >= whole:
        yield Violation(
            "spec.stop.seconds",
            f"{seconds} is not less than deadlines.runSeconds = {whole}, so the job would fail instead of finishing",
            "lower it, or raise deadlines.runSeconds",
        )
