"""A decision in the making: stages of `reconcile` add actions, conditions and status fields to it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rljob_api import ResolvedJob
from rljob_api.job_status import Attempt, Condition
from rljob_operator.actions import (
    Action,
    ApplyConfigMap,
    BeginAttempt,
    DeleteCluster,
    Event,
    NoteGeneration,
    SubmitDriver,
)
from rljob_operator.conditions import Reason, Type, condition, merge
from rljob_operator.observed import ClusterView, JobView, Observed
from rljob_operator.settings import Settings
from rljob_operator.status import JobStatus

WITH_JOB_FILE = (ApplyConfigMap, NoteGeneration, BeginAttempt, SubmitDriver)
"""What writes the job file, or rests on its being written: done last, and in the order in which it was decided."""
WARNINGS = {
    Reason.INVALID_SPEC,
    Reason.NEEDS_NEW_INCARNATION,
    Reason.KUBERAY_MISSING,
    Reason.VOLUME_MISSING,
    Reason.VOLUME_NOT_SHARED,
    Reason.QUOTA_REFUSED,
    Reason.POD_SECURITY_REFUSED,
    Reason.PODS_REFUSED,
    Reason.SCHEDULER_MISSING,
    Reason.UNSCHEDULABLE,
    Reason.SCHEDULING_GATED,
    Reason.IMAGE_ERROR,
    Reason.POD_ERROR,
    Reason.POOL_DEGRADED,
    Reason.CLUSTER_REJECTED,
    Reason.QUOTA_TAKEN_BACK,
    Reason.BACKING_OFF,
    Reason.NO_SPACE,
    Reason.HEAD_LOST,
    Reason.RAY_UNREACHABLE,
    Reason.LEFTOVER_PROCESSES,
    Reason.RETRY_LIMIT_EXCEEDED,
    Reason.BAD_JOB_FILE,
    Reason.BAD_DATA,
    Reason.BAD_CHECKPOINT,
    Reason.START_DEADLINE_EXCEEDED,
    Reason.RUN_DEADLINE_EXCEEDED,
    Reason.NO_ANSWER,
    Reason.STALLED,
    Reason.STALENESS_EXCEEDED,
    Reason.NO_STORAGE,
    Reason.NOT_SAVED,
    Reason.TOKEN_REFUSED,
}
_WARNING_TITLES = {reason.title for reason in WARNINGS}
_QUIET = {
    reason.title
    for reason in (
        Reason.VALID,
        Reason.NO_QUEUE,
        Reason.NONE_YET,
        Reason.AT_SIZE,
        Reason.NOT_FINISHED,
        Reason.NOT_RUNNING,
        Reason.NOT_SUSPENDED,
        Reason.MOVING,
        Reason.WAITING,
        Reason.WITHIN_BOUND,
    )
}
"""Reasons that are the normal state, or change too often to be worth an event."""


@dataclass(frozen=True)
class Decision:
    """What follows from one look."""

    actions: tuple[Action, ...] = ()
    """What is to be done, in this order, after the status is written, until one fails."""
    status: JobStatus | None = None
    """None: leave it."""
    requeue_after: float | None = None
    """Seconds until the next look, if nothing happens before."""
    events: tuple[Event, ...] = ()


@dataclass
class Draft:
    """Collects what the stages decide."""

    observed: Observed
    stored: JobStatus
    """The status as the API server has it; that of ``observed`` has no time in the future."""
    now: datetime
    settings: Settings
    status: JobStatus = field(init=False)
    actions: list[Action] = field(default_factory=list)
    _conditions: dict[Type, Condition] = field(default_factory=dict)
    _wake: float | None = None

    def __post_init__(self) -> None:
        self.status = self.observed.job.status

    @property
    def job(self) -> JobView:
        return self.observed.job

    @property
    def resolved(self) -> ResolvedJob:
        assert self.job.job is not None, "stages after the first see valid jobs only"
        return self.job.job

    def say(self, kind: Type, value: bool | None, reason: Reason, message: str = "") -> None:
        """States a condition; a later statement about the same type counts."""
        self._conditions[kind] = condition(kind, value, reason, message)

    def said(self, kind: Type) -> Condition | None:
        return self._conditions.get(kind)

    def set(self, **fields: Any) -> None:
        """Changes fields of the status."""
        self.status = self.status.changed(**fields)

    def do(self, *actions: Action) -> None:
        self.actions.extend(actions)

    def wake_in(self, seconds: float) -> None:
        """Look again after at most this long."""
        seconds = max(0.1, seconds)
        self._wake = seconds if self._wake is None else min(self._wake, seconds)

    def wake_at(self, moment: datetime) -> None:
        self.wake_in((moment - self.now).total_seconds())

    def change_last_attempt(self, change: Callable[[Attempt], Attempt]) -> None:
        *others, last = self.status.attempts
        self.set(attempts=(*others, change(last)))

    def add_attempt(self, number: int, incarnation: int, started: datetime | None = None) -> None:
        """Opens the record of a new attempt, started now unless it says otherwise."""
        opened = Attempt(number=number, incarnation=incarnation, started=started or self.now)
        attempts = _kept((*self.status.attempts, opened), self.settings.attempts_kept)
        self.set(attempts=attempts, attempt=max(self.status.attempt, number))

    def close_attempt(self, reason: Reason, message: str = "", **fields: Any) -> None:
        """Closes the record of the last attempt, if it is open."""
        last = self.status.last
        if last is None or last.ended is not None:
            return
        newest, progress = self.status.checkpoint, self.status.progress
        text = message or reason.meaning
        if progress is not None:
            self.set(progress=progress.without_driver())
        self.change_last_attempt(
            lambda attempt: attempt.changed(
                ended=self.now,
                reason=reason.title,
                message=text[:1024],
                checkpoint_step=newest and newest.step,
                **fields,
            )
        )

    def remove(self, cluster: ClusterView) -> None:
        if not cluster.deleting:
            self.do(DeleteCluster(cluster.name, cluster.uid))

    def decision(self) -> Decision:
        before = self.job.status
        self._tell_rejection()
        conditions = merge(before.by_type, self._conditions.values(), self.job.generation, self.now)
        algorithm = self.job.job.spec.algorithm.preset if self.job.job else before.algorithm
        self.set(conditions=conditions, observed_generation=self.job.generation, algorithm=algorithm)
        return Decision(
            # Whoever refuses the job file must not keep a driver that runs from hearing what is wanted of it.
            actions=tuple(sorted(self.actions, key=lambda action: isinstance(action, WITH_JOB_FILE))),
            status=self.status if self.status != self.stored else None,
            requeue_after=self._wake,
            events=tuple(_events(before, self.status)),
        )

    def _tell_rejection(self) -> None:
        """Says what the API server refuses, whatever the job does meanwhile: nothing else would tell why that waits."""
        rejection, said, running = self.observed.rejection, self.said(Type.CLUSTER_READY), self.said(Type.RUNNING)
        if not rejection or (said is not None and said.reason == Reason.CLUSTER_REJECTED.title):
            return
        if running is not None and running.reason == Reason.DELETING.title:
            return
        known = said or self.job.status.by_type.get(Type.CLUSTER_READY.title)
        message = f"{rejection}; {said.message}" if said is not None else rejection
        self.say(Type.CLUSTER_READY, known is not None and known.is_true, Reason.CLUSTER_REJECTED, message)


def _kept(attempts: tuple[Attempt, ...], most: int) -> tuple[Attempt, ...]:
    """The newest. Of those in a row that ended for want of space the first stays: it tells of what."""
    while len(attempts) > most:
        alike = attempts[0].reason == attempts[1].reason == Reason.NO_SPACE.title
        same_checkpoint = attempts[0].checkpoint_step == attempts[1].checkpoint_step
        attempts = (attempts[0], *attempts[2:]) if alike and same_checkpoint else attempts[1:]
    return attempts


def _events(before: JobStatus, after: JobStatus) -> list[Event]:
    """One event for each condition whose status or reason is new, unless it says that nothing happened."""
    events = []
    seen = set()
    known = before.by_type
    for item in after.conditions:
        old = known.get(item.type)
        if old is not None and (old.status, old.reason) == (item.status, item.reason):
            continue
        if item.reason in _QUIET or item.reason in seen or (old is None and item.status == "False" and _calm(item)):
            continue
        seen.add(item.reason)
        events.append(Event("Warning" if item.reason in _WARNING_TITLES else "Normal", item.reason, item.message))
    return events


def _calm(item: Condition) -> bool:
    return item.reason not in _WARNING_TITLES
