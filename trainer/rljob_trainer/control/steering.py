"""What the operator wants of a running driver (``PUT /v1/desired``), and how each wish is fulfilled.

Level-based: the newest command is remembered, also before the parts exist that can fulfil it, and fulfilling it twice
is the same as once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from rljob_api.resolution import with_live_settings
from rljob_api.spec.pipeline import LiveSettings
from rljob_api.status import Desired
from rljob_trainer.control.signals import StopRequest
from rljob_trainer.pipeline.schedule import Schedule
from rljob_trainer.pipeline.shape import schedule_settings
from rljob_trainer.pools.engine_count import EngineCount
from rljob_trainer.rewards.standing import NO_POOLS, ScoringPools

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedSpec

log = logging.getLogger(__name__)


class WrongAttemptError(ValueError):
    """The command is meant for another attempt, or older than one that was taken."""


class WishError(ValueError):
    """The command asks for what this job cannot do."""


class Steering:
    """Takes commands; the session gives it what they act on."""

    def __init__(self, spec: ResolvedSpec, stop: StopRequest, *, attempt: int = 1, generation: int = 0) -> None:
        self.attempt = attempt
        self.generation = generation
        """The newest that was taken."""
        self.desired: Desired | None = None
        self._engines: EngineCount | None = None
        self._scoring = NO_POOLS
        self._schedule: Schedule | None = None
        self._record: Callable[[Desired], None] | None = None
        self._unrecorded: list[Desired] = []
        self._spec = spec
        self._stop = stop

    def take(self, desired: Desired) -> None:
        """Raises ``WrongAttemptError`` and ``WishError``; nothing has changed then."""
        if desired.attempt != self.attempt:
            raise WrongAttemptError(f"this is attempt {self.attempt}, but the command is for attempt {desired.attempt}")
        if desired.generation < self.generation:
            raise WrongAttemptError(
                f"generation {desired.generation} is older than generation {self.generation}, which is in effect"
            )
        self._check(desired)
        if desired != self.desired:
            log.info("generation %d: %s", desired.generation, _in_words(desired))
            self._unrecorded.append(desired)
            self.record_with(self._record)
        self.desired, self.generation = desired, desired.generation
        self.fulfil()

    @property
    def schedule(self) -> Schedule | None:
        """The one that is steered; None while there is none."""
        return self._schedule

    def steers(self, schedule: Schedule, engines: EngineCount | None, scoring: ScoringPools = NO_POOLS) -> None:
        """Acts on these from now on, and first by the newest command. ``engines``: None: their number is fixed."""
        self._schedule, self._engines, self._scoring = schedule, engines, scoring
        self.fulfil()

    def taken_down(self) -> None:
        """What was steered is gone; something else may come."""
        self._schedule, self._engines, self._scoring = None, None, NO_POOLS

    def record_with(self, record: Callable[[Desired], None] | None) -> None:
        """``record`` keeps each new command, and first those that came while there was nobody to keep them (None)."""
        self._record = record
        if record is not None:
            for desired in self._unrecorded:
                record(desired)
            self._unrecorded.clear()

    def fulfil(self) -> None:
        """Passes the newest command on to whatever is there."""
        desired = self.desired
        if desired is None:
            return
        if desired.rollout_replicas is not None and self._engines is not None:
            self._engines.want(desired.rollout_replicas)
        for pool, replicas in (
            (self._scoring.reward_model, desired.reward_model_replicas),
            (self._scoring.judge, desired.judge_replicas),
        ):
            if pool is not None and replicas is not None:
                pool.want(replicas)
        if self._schedule is not None and desired.settings != LiveSettings():
            self._schedule.change(schedule_settings(with_live_settings(self._spec, desired.settings)))
        if desired.suspend:
            self._stop.suspend()

    def _check(self, desired: Desired) -> None:
        spec = self._spec
        if desired.rollout_replicas is not None:
            if spec.placement == "colocated" and desired.rollout_replicas != spec.trainer.ranks:
                raise WishError("rolloutReplicas: with placement colocated, it must equal the number of trainer ranks")
            if desired.rollout_replicas == 0:
                raise WishError("rolloutReplicas: with 0 engines the run would wait forever; suspend the job instead")
        for name, what, pool, replicas in (
            ("rewardModelReplicas", "reward models", spec.reward_model, desired.reward_model_replicas),
            ("judgeReplicas", "judges", spec.judge, desired.judge_replicas),
        ):
            if replicas is not None and pool is None:
                raise WishError(f"{name}: this job has no pool for {what}")
            if replicas == 0:
                raise WishError(f"{name}: with 0 replicas samples would wait forever; suspend the job instead")
        if desired.settings != LiveSettings() and spec.pipeline.mode != "fullyAsync":
            raise WishError(f"settings: with pipeline.mode {spec.pipeline.mode} no setting can be changed live")


def _in_words(desired: Desired) -> str:
    """A command for the log."""
    said = desired.model_dump(by_alias=True, exclude_defaults=True, exclude={"generation", "attempt"})
    wishes = {**{name: value for name, value in said.items() if name != "settings"}, **said.get("settings", {})}
    return ", ".join(f"{name} {value}" for name, value in wishes.items()) or "no changes"
