"""The status of an RLJob: what the operator remembers between two looks, and what users see.

The operator keeps nothing in its own memory that it couldn't do without: incarnation, attempts and times are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from rljob_operator import conditions
from rljob_operator.conditions import Condition, Reason, Type, parse_time, timestamp

CLOCKS_DIFFER = timedelta(seconds=5)
"""Between replicas of the operator: a time this far ahead needs no mending."""


@dataclass(frozen=True)
class Attempt:
    """One run of the driver."""

    number: int
    incarnation: int
    started: datetime
    ended: datetime | None = None
    reason: str = ""
    message: str = ""
    """Why it ended; while it runs, which pods have crashed."""
    exit_code: int | None = None
    checkpoint_step: int | None = None
    """Step of the newest checkpoint when it ended."""
    counted: bool = False
    """Whether it counts against spec.retry.limit."""
    disrupted: bool = False
    """A pod was evicted or its node lost while it ran."""
    lines: tuple[str, ...] = ()
    """The driver's last lines."""

    def document(self) -> dict[str, Any]:
        return _without_nothing(
            {
                "attempt": self.number,
                "incarnation": self.incarnation,
                "startTime": timestamp(self.started),
                "endTime": timestamp(self.ended) if self.ended else None,
                "reason": self.reason or None,
                "message": self.message or None,
                "exitCode": self.exit_code,
                "checkpointStep": self.checkpoint_step,
                "counted": self.counted,
                "disrupted": self.disrupted or None,
                "lastLines": list(self.lines) or None,
            }
        )

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Attempt:
        return cls(
            number=int(document["attempt"]),
            incarnation=int(document.get("incarnation", 1)),
            started=parse_time(document.get("startTime")) or datetime(1970, 1, 1, tzinfo=UTC),
            ended=parse_time(document.get("endTime")),
            reason=str(document.get("reason", "")),
            message=str(document.get("message", "")),
            exit_code=document.get("exitCode"),
            checkpoint_step=document.get("checkpointStep"),
            counted=bool(document.get("counted", False)),
            disrupted=bool(document.get("disrupted", False)),
            lines=tuple(document.get("lastLines", ())),
        )


@dataclass(frozen=True)
class PoolStatus:
    """One pool, in replicas."""

    desired: int
    replicas: int
    ready: int
    selector: str

    def document(self) -> dict[str, Any]:
        return {
            "desired": self.desired,
            "replicas": self.replicas,
            "ready": self.ready,
            "summary": f"{self.ready}/{self.desired}",
            "selector": self.selector,
        }


_TELL_OF_PROGRESS = {Type.PROGRESSING.title, Type.WEIGHTS_FRESH.title}
"""Conditions whose message has the step or the age of samples."""


@dataclass(frozen=True)
class JobStatus:
    """The whole status. Field names are those of the document, in snake_case."""

    observed_generation: int = 0
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    algorithm: str = ""
    incarnation: int = 1
    """Number of the cluster that the job has or will have next. Older ones are removed."""
    attempt: int = 0
    """Highest attempt ever begun."""
    failures: int = 0
    """Counted failures since the last checkpoint."""
    attempts: tuple[Attempt, ...] = ()
    pools: Mapping[str, PoolStatus] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    start_time: datetime | None = None
    """When the job was first admitted."""
    end_time: datetime | None = None
    pause_time: datetime | None = None
    """Since when the admitted job has had no pods because it is suspended, or because its queue took its quota back."""
    paused_seconds: int = 0
    """How long that was so before: no deadline counts it."""
    suspend_time: datetime | None = None
    """Since when the job is wanted suspended."""
    resize_time: datetime | None = None
    """Since when the rollout pool is being made smaller."""

    def is_true(self, kind: Type) -> bool:
        found = self.conditions.get(kind.title)
        return found is not None and found.is_true

    def has(self, kind: Type, reason: Reason) -> bool:
        """Whether the condition's reason is this one."""
        found = self.conditions.get(kind.title)
        return found is not None and found.reason == reason.title

    def is_only_progress(self, before: JobStatus) -> bool:
        """Whether nothing has changed but the progress, and the numbers of it in the words of conditions."""
        return self._without_progress() == before._without_progress()

    def _without_progress(self) -> JobStatus:
        silent = {
            name: replace(item, message="") if name in _TELL_OF_PROGRESS else item
            for name, item in self.conditions.items()
        }
        return replace(self, conditions=silent, progress={})

    def not_after(self, now: datetime) -> JobStatus:
        """The same with no time later than ``now``: a clock that was ahead when it was written has been put right.

        Whoever waits from such a time on would otherwise wait for as long as the clock was ahead, too.
        """
        latest = now + CLOCKS_DIFFER

        def held(moment: datetime) -> datetime:
            return now if moment > latest else moment

        def maybe(moment: datetime | None) -> datetime | None:
            return None if moment is None else held(moment)

        return replace(
            self,
            conditions={name: replace(item, since=held(item.since)) for name, item in self.conditions.items()},
            attempts=tuple(
                replace(attempt, started=held(attempt.started), ended=maybe(attempt.ended)) for attempt in self.attempts
            ),
            start_time=maybe(self.start_time),
            end_time=maybe(self.end_time),
            pause_time=maybe(self.pause_time),
            suspend_time=maybe(self.suspend_time),
            resize_time=maybe(self.resize_time),
        )

    @property
    def last(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    def document(self) -> dict[str, Any]:
        """As the API server stores it."""
        return _without_nothing(
            {
                "observedGeneration": self.observed_generation,
                "algorithm": self.algorithm or None,
                "incarnation": self.incarnation,
                "attempt": self.attempt,
                "failures": self.failures,
                "attempts": [attempt.document() for attempt in self.attempts] or None,
                "pools": {name: pool.document() for name, pool in self.pools.items()} or None,
                "progress": dict(self.progress) or None,
                "checkpoint": dict(self.checkpoint) or None,
                "startTime": timestamp(self.start_time) if self.start_time else None,
                "endTime": timestamp(self.end_time) if self.end_time else None,
                "pauseTime": timestamp(self.pause_time) if self.pause_time else None,
                "pausedSeconds": self.paused_seconds or None,
                "suspendTime": timestamp(self.suspend_time) if self.suspend_time else None,
                "resizeTime": timestamp(self.resize_time) if self.resize_time else None,
                "conditions": [item.document() for item in self.conditions.values()],
            }
        )

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> JobStatus:
        """The status of a stored object; an empty one for a new job."""
        return cls(
            observed_generation=int(document.get("observedGeneration", 0)),
            conditions=conditions.read(document.get("conditions", ())),
            algorithm=str(document.get("algorithm", "")),
            incarnation=int(document.get("incarnation", 1)),
            attempt=int(document.get("attempt", 0)),
            failures=int(document.get("failures", 0)),
            attempts=_attempts(document.get("attempts", ())),
            pools={
                name: PoolStatus(
                    int(pool.get("desired", 0)),
                    int(pool.get("replicas", 0)),
                    int(pool.get("ready", 0)),
                    str(pool.get("selector", "")),
                )
                for name, pool in document.get("pools", {}).items()
            },
            progress=dict(document.get("progress", {})),
            checkpoint=dict(document.get("checkpoint", {})),
            start_time=parse_time(document.get("startTime")),
            end_time=parse_time(document.get("endTime")),
            pause_time=parse_time(document.get("pauseTime")),
            paused_seconds=int(document.get("pausedSeconds", 0)),
            suspend_time=parse_time(document.get("suspendTime")),
            resize_time=parse_time(document.get("resizeTime")),
        )


def _attempts(documents: Iterable[Mapping[str, Any]]) -> tuple[Attempt, ...]:
    return tuple(sorted((Attempt.read(item) for item in documents), key=lambda attempt: attempt.number))


def _without_nothing(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value is not None}
