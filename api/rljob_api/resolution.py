"""Makes a job in which every value is there of a job file: its own values, then the preset's, then defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from rljob_api.correction_presets import CORRECTION_PRESETS
from rljob_api.method import MethodSpec, Value
from rljob_api.methods import ESTIMATORS, POLICY_LOSSES
from rljob_api.presets import PRESETS
from rljob_api.resolved import (
    ResolvedAdvantage,
    ResolvedAlgorithm,
    ResolvedBatch,
    ResolvedCritic,
    ResolvedEnvironment,
    ResolvedGroupFilter,
    ResolvedJob,
    ResolvedKl,
    ResolvedKlInLoss,
    ResolvedKlInReward,
    ResolvedPipeline,
    ResolvedPolicyLoss,
    ResolvedRollout,
    ResolvedRolloutCorrection,
    ResolvedSpec,
    ResolvedStaleness,
    ResolvedTrainer,
    ResolvedTrainerParallelism,
    ResolvedTruncated,
)
from rljob_api.spec.algorithm import CriticSpec, Kl, KlControllerSpec, KlInLoss, KlInReward, RolloutCorrection
from rljob_api.spec.base import SpecModel
from rljob_api.spec.job import RLJob, Spec
from rljob_api.spec.pipeline import (
    DEFAULT_ASYNC_MINI_BATCH_GROUPS,
    DEFAULT_GROUPS,
    LiveSettings,
    PipelineSpec,
    Staleness,
    Stop,
)
from rljob_api.spec.pools import OptimizerSpec, Placement

M = TypeVar("M", bound=SpecModel)
R = TypeVar("R", bound=SpecModel)


def resolve(job: RLJob) -> ResolvedJob:
    """Fills in whatever the job file leaves open. The job must be valid (``load_jobs`` sees to that)."""
    return ResolvedJob(**{**dict(job), "spec": _spec(job.spec)})


def live_settings(spec: ResolvedSpec) -> LiveSettings | None:
    """What of spec.pipeline may change while the job runs; None: nothing in this mode."""
    if spec.pipeline.mode != "fullyAsync":
        return None
    return LiveSettings(**dict(spec.pipeline.staleness), sync_every=spec.pipeline.sync_every)


def with_live_settings(spec: ResolvedSpec, live: LiveSettings) -> ResolvedSpec:
    """The job as it is with these settings in place of its own. What is absent means what it means in a job file."""
    staleness = Staleness(**{name: getattr(live, name) for name in Staleness.model_fields})
    given = PipelineSpec(**{**dict(spec.pipeline), "staleness": staleness, "sync_every": live.sync_every})
    batch, pipeline = _batch_and_pipeline(spec.model_copy(update={"pipeline": given}))
    return spec.model_copy(update={"batch": batch, "pipeline": pipeline})


def placement(spec: Spec) -> Placement:
    """Where the engines live; when the job does not say, on the trainer's devices if that is possible."""
    if spec.placement is not None:
        return spec.placement
    return "colocated" if spec.pipeline.mode == "sync" and spec.rollout.replicas is None else "separate"


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def _filled(model: SpecModel, kind: type[R], preset: SpecModel | None = None, /, **others: Any) -> R:
    """``model`` as ``kind``: fields that are None come from the preset, else from ``others`` or their fallbacks."""
    defaults = {**model.fallbacks(), **others}
    values = {
        name: _first(value, getattr(preset, name, None), defaults.get(name)) for name, value in dict(model).items()
    }
    return kind(**{name: value for name, value in values.items() if value is not None or name in defaults})


def _spec(spec: Spec) -> ResolvedSpec:
    where = placement(spec)
    batch, pipeline = _batch_and_pipeline(spec)
    trainer = _trainer(spec)
    filled = {
        "algorithm": _algorithm(spec),
        "batch": batch,
        "pipeline": pipeline,
        "placement": where,
        "rollout": _rollout(spec, where, trainer),
        "trainer": trainer,
        "stop": spec.stop or Stop(epochs=1),
    }
    return ResolvedSpec(**{**dict(spec), **filled})


def _method(model: M, kind: type[R], chooser: str, methods: Mapping[Any, MethodSpec], preset: M) -> R:
    """An advantage estimator or policy loss: the preset's parameters count only if its method is the chosen one."""
    chosen = _first(getattr(model, chooser), getattr(preset, chooser))
    defaults: Mapping[str, Value] = methods[chosen].parameters
    same = getattr(preset, chooser) == chosen
    values: dict[str, Any] = {chooser: chosen}
    for name, default in defaults.items():
        values[name] = _first(getattr(model, name), getattr(preset, name) if same else None, default)
    if values.get("dual_clip") == 0:
        values["dual_clip"] = None
    return kind(**values)


def _algorithm(spec: Spec) -> ResolvedAlgorithm:
    given, preset = spec.algorithm, PRESETS[spec.algorithm.preset].algorithm
    advantage = _method(given.advantage, ResolvedAdvantage, "estimator", ESTIMATORS, preset.advantage)
    loss = _method(given.policy_loss, ResolvedPolicyLoss, "type", POLICY_LOSSES, preset.policy_loss)
    aggregation = _first(given.aggregation, POLICY_LOSSES[loss.type].aggregation, preset.aggregation)
    scale = _first(given.aggregation_scale, preset.aggregation_scale, float(spec.rollout.max_response_tokens))
    critic = None
    if ESTIMATORS[advantage.estimator].needs_critic:
        critic = _critic(given.critic or CriticSpec(), preset.critic, spec.trainer.optimizer)
    return ResolvedAlgorithm(
        preset=given.preset,
        advantage=advantage,
        policy_loss=loss,
        aggregation=aggregation,
        aggregation_scale=scale if aggregation == "seqMeanTokenSumNorm" else None,
        kl=_kl(given.kl, preset.kl),
        entropy_coefficient=_first(given.entropy_coefficient, preset.entropy_coefficient, 0.0),
        critic=critic,
        truncated=_filled(given.truncated, ResolvedTruncated, preset.truncated),
        entropy_target=given.entropy_target,
        resampling=given.resampling,
        gradient_noise=_first(given.gradient_noise, given.fallbacks()["gradient_noise"]),
        rollout_correction=_correction(
            given.rollout_correction,
            preset.rollout_correction,
            "none" if spec.pipeline.mode == "sync" and not POLICY_LOSSES[loss.type].needs_bypass else "bypass",
        ),
        routing_replay=_first(given.routing_replay, given.fallbacks()["routing_replay"]),
        group_filter=_filled(given.group_filter, ResolvedGroupFilter, preset.group_filter),
    )


def _correction(given: RolloutCorrection, preset: RolloutCorrection, mode: str) -> ResolvedRolloutCorrection:
    """The job's own fields, then what its correction preset stands for, then the algorithm's preset."""
    if given.preset is not None:
        named = CORRECTION_PRESETS[given.preset]
        preset = RolloutCorrection(mode=named.mode, weights=named.weights, rejection=named.rejection)
    filled = _filled(given, ResolvedRolloutCorrection, preset, mode=mode, proximal="recomputed")
    return filled.model_copy(update={"rejection": given.rejection or preset.rejection})


def _kl(given: Kl, preset: Kl) -> ResolvedKl:
    in_loss = _filled(given.in_loss or KlInLoss(), ResolvedKlInLoss, preset.in_loss, coefficient=0.0)
    in_reward = _filled(
        given.in_reward or KlInReward(),
        ResolvedKlInReward,
        preset.in_reward,
        coefficient=0.0,
        controller=KlControllerSpec(),
    )
    return ResolvedKl(
        in_loss=in_loss if in_loss.coefficient > 0 else None,
        in_reward=in_reward if in_reward.coefficient > 0 else None,
    )


def _critic(given: CriticSpec, preset: CriticSpec | None, actor: OptimizerSpec) -> ResolvedCritic:
    filled = _filled(
        given,
        ResolvedCritic,
        preset,
        weight_decay=actor.weight_decay,
        gradient_clip=actor.gradient_clip,
    )
    return filled.model_copy(update={"value_clip": None}) if filled.value_clip == 0 else filled


def _batch_and_pipeline(spec: Spec) -> tuple[ResolvedBatch, ResolvedPipeline]:
    """Both sections, of which one follows from the other: in mode fullyAsync the pulls give the size of a batch, in the
    others the batch gives the size of its one pull."""
    given, preset = spec.batch, PRESETS[spec.algorithm.preset]
    if spec.pipeline.mode == "fullyAsync":
        staleness = _filled(spec.pipeline.staleness, ResolvedStaleness)
        pipeline = _filled(spec.pipeline.model_copy(update={"staleness": staleness}), ResolvedPipeline)
        mini = given.mini_batch_groups or DEFAULT_ASYNC_MINI_BATCH_GROUPS
        groups = pipeline.sync_every * pipeline.require_batches * mini
    else:
        groups = given.groups or DEFAULT_GROUPS
        mini = given.mini_batch_groups or groups
        pipeline = ResolvedPipeline(
            mode=spec.pipeline.mode,
            sync_every=1,
            require_batches=max(1, groups // mini),
            staleness=ResolvedStaleness(max_age=1 if spec.pipeline.mode == "oneStepOff" else 0, on_deadline="wait"),
            partial_rollout="none",
        )
    filled = {
        "groups": groups,
        "mini_batch_groups": mini,
        "samples_per_prompt": given.samples_per_prompt or preset.samples_per_prompt,
    }
    return ResolvedBatch(**{**dict(given), **filled}), pipeline


def _trainer(spec: Spec) -> ResolvedTrainer:
    given = spec.trainer
    ranks = given.replicas * max(1, given.gpus_per_replica)
    ways = given.parallelism
    shard = ways.shard or max(1, ranks // (ways.replicate * ways.context * ways.tensor))
    parallelism = ResolvedTrainerParallelism(**{**dict(given.parallelism), "shard": shard})
    return ResolvedTrainer(**{**dict(given), "parallelism": parallelism})


def _rollout(spec: Spec, where: Placement, trainer: ResolvedTrainer) -> ResolvedRollout:
    given = spec.rollout
    replicas = (
        max(1, trainer.ranks // given.parallelism.tensor)
        if where == "colocated"
        else given.replicas or given.fallbacks()["replicas"]
    )
    filled = {
        "replicas": replicas,
        "min_replicas": given.min_replicas or replicas,
        "max_replicas": given.max_replicas or replicas,
        "environment": _filled(given.environment, ResolvedEnvironment),
    }
    return ResolvedRollout(**{**dict(given), **filled})
