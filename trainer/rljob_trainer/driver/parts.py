"""Everything a run is made of, built from the job in the order in which mistakes are cheapest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rljob_trainer.control.mismatch_limits import MismatchWatch
from rljob_trainer.driver.engines import Engines
from rljob_trainer.driver.step_speed import StepSpeed
from rljob_trainer.driver.training import PipelineTrainer
from rljob_trainer.episodes.group import Decode, GroupRollout
from rljob_trainer.learner.protocol import RankedLearner
from rljob_trainer.pipeline.loop import Keep, Pipeline, keep_all
from rljob_trainer.pipeline.schedule import ScheduleSettings
from rljob_trainer.record.fence import Fence
from rljob_trainer.record.ledger import Ledger
from rljob_trainer.record.start_model import Description
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.rewards.standing import ScoringPools
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.telemetry.sinks import Sinks
from rljob_trainer.telemetry.timing import StageTimes
from rljob_trainer.telemetry.view import View
from rljob_trainer.training.step import TrainingStep
from rljob_trainer.validation.rounds import ValidationRounds
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedJob
    from rljob_trainer.checkpoints.checkpoint import Checkpoints
    from rljob_trainer.data.feed import PromptFeed


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one run, ready to work."""

    job: ResolvedJob
    feed: PromptFeed
    engines: Engines
    rollout: GroupRollout
    rewards: RewardPool
    scoring: ScoringPools
    """Those of reward models and judges."""
    learner: RankedLearner
    dtype: str
    """In which weights are published."""
    step: TrainingStep
    trainer: PipelineTrainer
    validations: ValidationRounds | None
    """None when the job has no validation set."""
    schedule: ScheduleSettings
    decode: Decode
    ledger: Ledger
    shelf: Shelf
    """Where finished responses wait."""
    fence: Fence
    model: Description
    """Which model the run began with."""
    checkpoints: Checkpoints | None
    """None: nothing survives the run."""
    sinks: Sinks
    view: View
    times: StageTimes
    speed: StepSpeed
    waits: Waits
    limits: MismatchWatch
    corpora: Mapping[str, str] = field(default_factory=dict)
    """Digests of what the environment's tools look in, by their names."""
    keep: Keep = field(default=keep_all)
    most_dropped: int = 10_000
    """Groups that ``keep`` may drop before a batch is full."""

    def epoch(self) -> float:
        """Passes over the training data, the present one in part."""
        return self.feed.progress

    def pipeline_metrics(self, pipeline: Pipeline) -> dict[str, float]:
        """What the pipeline looks like at a step's boundary."""
        dropped = pipeline.take_dropped()
        metrics = {
            "pipeline/open_groups": float(pipeline.schedule.open),
            "pipeline/ready_groups": float(pipeline.schedule.waiting_finished),
            "pipeline/dropped_groups": float(dropped.groups),
            "pipeline/late_groups": float(pipeline.take_late()),
        }
        if dropped.length is not None:
            metrics["pipeline/dropped/length/mean"] = dropped.length
        if dropped.reward is not None:
            metrics["pipeline/dropped/reward/mean"] = dropped.reward
        metrics |= self.rollout.take_counts() | self.rewards.take_counts() | self.engines.pool.homes.take_counts()
        idle = self.engines.pool.activity.take_idle_ratio()
        return metrics if idle is None else metrics | {"pipeline/engine_idle_ratio": idle}
