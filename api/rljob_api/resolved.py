"""The job as the trainer sees it: the same tree, in which every value is there.

These classes narrow the spec models (``int | None`` becomes ``int``); ``rljob_api.resolve`` fills them. Where a setting
is off it is None here (KL terms, dual clip, value clip), while the document says 0, since there null means "not given".
"""

from __future__ import annotations

from typing import Any, Literal

from rljob_api.method import Value
from rljob_api.methods import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLossType
from rljob_api.spec.algorithm import (
    Advantage,
    AggregationType,
    Algorithm,
    CriticSpec,
    GroupFilter,
    Kl,
    KlControllerSpec,
    KlInLoss,
    KlInReward,
    KlLossKind,
    KlRewardKind,
    PolicyLossSpec,
    RolloutCorrection,
    Truncated,
)
from rljob_api.spec.environment import CallFormat, EnvironmentSpec
from rljob_api.spec.job import RLJob, Spec
from rljob_api.spec.pipeline import Batch, OnDeadline, PartialRollout, PipelineSpec, Staleness, Stop
from rljob_api.spec.pools import OptimizerSpec, Placement, RolloutSpec, TrainerParallelism, TrainerSpec


class ResolvedAdvantage(Advantage):
    estimator: Estimator

    @property
    def params(self) -> dict[str, Value]:
        """Keyword arguments of the estimator's function."""
        return {name: getattr(self, name) for name in ESTIMATORS[self.estimator].parameters}


class ResolvedPolicyLoss(PolicyLossSpec):
    type: PolicyLossType

    @property
    def params(self) -> dict[str, Value]:
        """Keyword arguments of the loss function. A dual clip that is off is None."""
        return {name: getattr(self, name) for name in POLICY_LOSSES[self.type].parameters}


class ResolvedKlInLoss(KlInLoss):
    kind: KlLossKind
    coefficient: float


class ResolvedKlInReward(KlInReward):
    kind: KlRewardKind
    coefficient: float
    controller: KlControllerSpec


class ResolvedKl(Kl):
    in_loss: ResolvedKlInLoss | None = None
    in_reward: ResolvedKlInReward | None = None


class ResolvedCritic(CriticSpec):
    learning_rate: float
    value_clip: float | None = None
    warmup_steps: int
    weight_decay: float
    gradient_clip: float


class ResolvedTruncated(Truncated):
    reward: Literal["keep", "replace"]
    replacement: float
    mask: bool
    bootstrap: bool


class ResolvedRolloutCorrection(RolloutCorrection):
    mode: Literal["none", "bypass", "decoupled"]
    proximal: Literal["recomputed", "interpolated"]


class ResolvedGroupFilter(GroupFilter):
    drop_uniform: bool
    max_batches: int


class ResolvedAlgorithm(Algorithm):
    advantage: ResolvedAdvantage
    policy_loss: ResolvedPolicyLoss
    aggregation: AggregationType
    kl: ResolvedKl
    entropy_coefficient: float
    critic: ResolvedCritic | None = None
    """None: the estimator needs no critic."""
    truncated: ResolvedTruncated
    rollout_correction: ResolvedRolloutCorrection
    group_filter: ResolvedGroupFilter
    gradient_noise: bool
    routing_replay: bool

    @property
    def aggregation_params(self) -> dict[str, float]:
        """Keyword arguments of the aggregation."""
        if self.aggregation == "seqMeanTokenSumNorm":
            assert self.aggregation_scale is not None
            return {"scale": self.aggregation_scale}
        return {}

    @property
    def interpolates(self) -> bool:
        """Whether pi_old is made of pi_roll and the present policy, in the loss."""
        correction = self.rollout_correction
        return correction.mode == "decoupled" and correction.proximal == "interpolated"

    @property
    def needs_critic(self) -> bool:
        return self.critic is not None

    @property
    def needs_reference(self) -> bool:
        return self.kl.in_loss is not None or self.kl.in_reward is not None


class ResolvedBatch(Batch):
    groups: int
    samples_per_prompt: int
    mini_batch_groups: int


class ResolvedStaleness(Staleness):
    max_age: int
    on_deadline: OnDeadline


class ResolvedPipeline(PipelineSpec):
    """What overlaps. Modes sync and oneStepOff have syncEvery 1, one pull of batch.groups, maxAge 0 and 1, and no
    partial rollout."""

    sync_every: int
    require_batches: int
    staleness: ResolvedStaleness
    partial_rollout: PartialRollout


class ResolvedEnvironment(EnvironmentSpec):
    call_format: CallFormat
    max_turns: int
    max_calls_per_turn: int
    call_seconds: int
    agents: int
    agent_seconds: int


class ResolvedRollout(RolloutSpec):
    replicas: int
    min_replicas: int
    max_replicas: int
    environment: ResolvedEnvironment


class ResolvedTrainerParallelism(TrainerParallelism):
    shard: int

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data_indices(self) -> int:
        """How many groups of ranks train on sequences of their own."""
        return self.replicate * self.shard


class ResolvedTrainer(TrainerSpec):
    parallelism: ResolvedTrainerParallelism

    @property
    def ranks(self) -> int:
        """Number of trainer processes."""
        return self.replicas * max(1, self.gpus_per_replica)

    def critic_optimizer(self, critic: ResolvedCritic) -> OptimizerSpec:
        """The critic's optimizer: the actor's, with the critic's own settings."""
        own = {
            "learning_rate": critic.learning_rate,
            "weight_decay": critic.weight_decay,
            "gradient_clip": critic.gradient_clip,
        }
        return OptimizerSpec(**{**dict(self.optimizer), **own})


class ResolvedSpec(Spec):
    algorithm: ResolvedAlgorithm
    batch: ResolvedBatch
    pipeline: ResolvedPipeline
    placement: Placement
    rollout: ResolvedRollout
    trainer: ResolvedTrainer
    stop: Stop


class ResolvedJob(RLJob):
    """What ``resolve`` returns."""

    spec: ResolvedSpec

    def document(self) -> dict[str, Any]:
        """A job file that says everything, as plain data; resolving it again gives this job."""
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        spec, algorithm = data["spec"], data["spec"]["algorithm"]
        for term in ("inLoss", "inReward"):
            algorithm["kl"].setdefault(term, {"coefficient": 0.0})
        if "dual_clip" in POLICY_LOSSES[self.spec.algorithm.policy_loss.type].parameters:
            algorithm["policyLoss"].setdefault("dualClip", 0.0)
        if "critic" in algorithm:
            algorithm["critic"].setdefault("valueClip", 0.0)
        # What has no meaning beside the other settings is refused in a job file, so it is left out here.
        if algorithm["truncated"]["reward"] == "keep":
            del algorithm["truncated"]["replacement"]
        if not algorithm["groupFilter"]["dropUniform"]:
            del algorithm["groupFilter"]["maxBatches"]
        if self.spec.pipeline.mode != "fullyAsync":
            spec["pipeline"] = {"mode": self.spec.pipeline.mode}
        if self.spec.placement == "colocated":
            for name in ("replicas", "minReplicas", "maxReplicas"):
                del spec["rollout"][name]
        return data
