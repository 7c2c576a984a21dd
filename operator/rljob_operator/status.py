"""The status of a job as the operator judges it; its fields are those of ``rljob_api.job_status``.

The operator keeps nothing in its own memory that it couldn't do without: incarnation, attempts and times are here.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Self

from rljob_api.job_status import RLJobStatus
from rljob_operator.conditions import Reason, Type

CLOCKS_DIFFER = timedelta(seconds=5)
"""How far the clocks of the operator's replicas may differ: a time this far ahead needs no mending."""
_TELL_OF_PROGRESS = {Type.PROGRESSING.title, Type.WEIGHTS_FRESH.title}
"""Conditions whose message has the step or the age of samples."""


class JobStatus(RLJobStatus):
    """The whole status, with what the operator asks of it.

    ``incarnation`` is the number of the cluster that the job has or will have next; older ones are removed.
    ``pause_time`` is the moment since when the admitted job has had no pods because it is suspended, or because its
    queue took its quota back, and ``paused_seconds`` how long that was so before: no deadline counts it.
    """

    def is_true(self, kind: Type) -> bool:
        found = self.by_type.get(kind.title)
        return found is not None and found.is_true

    def has(self, kind: Type, reason: Reason) -> bool:
        """Whether the condition's reason is this one."""
        found = self.by_type.get(kind.title)
        return found is not None and found.reason == reason.title

    def is_only_progress(self, before: JobStatus) -> bool:
        """Whether nothing has changed but the progress, and the numbers of it in the words of conditions."""
        return self._without_progress() == before._without_progress()

    def _without_progress(self) -> Self:
        silent = tuple(item.changed(message="") if item.type in _TELL_OF_PROGRESS else item for item in self.conditions)
        return self.changed(conditions=silent, progress=None)

    def not_after(self, now: datetime) -> Self:
        """A status with no time later than ``now``: a clock that was ahead when it was written has been put right.

        Whoever waits from such a time on would otherwise wait for as long as the clock was ahead, too.
        """
        latest = now + CLOCKS_DIFFER

        def held(moment: datetime) -> datetime:
            return now if moment > latest else moment

        def maybe(moment: datetime | None) -> datetime | None:
            return None if moment is None else held(moment)

        return self.changed(
            conditions=tuple(item.changed(since=held(item.since)) for item in self.conditions),
            attempts=tuple(
                attempt.changed(started=held(attempt.started), ended=maybe(attempt.ended)) for attempt in self.attempts
            ),
            start_time=maybe(self.start_time),
            end_time=maybe(self.end_time),
            pause_time=maybe(self.pause_time),
            suspend_time=maybe(self.suspend_time),
            resize_time=maybe(self.resize_time),
        )
