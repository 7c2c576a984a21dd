"""The deadlines of a whole job: a driver that runs when one passes may save its work, and its last lines stay. Pure.

A job that trains too long is asked for a checkpoint, from which another one may go on. One that doesn't begin has
nothing to save: its driver is stopped, for what its log says about the reason.

They count the time that a job has its pods, or could have: not the night for which it was suspended, and not the time
that its queue makes it wait again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_operator import attempts, no_space
from rljob_operator.actions import StopDriver
from rljob_operator.conditions import Reason, Type
from rljob_operator.draft import Draft
from rljob_operator.endings import finish
from rljob_operator.observed import ClusterView

STOP_PATIENCE = timedelta(seconds=30)
"""How long a driver may take to end that was told to stop: Ray kills it long before."""


@dataclass(frozen=True)
class _Passed:
    """A deadline that has passed."""

    at: datetime
    reason: Reason
    message: str
    grace: timedelta
    """Time that the driver has for a checkpoint."""


def too_late(draft: Draft, cluster: ClusterView | None) -> bool:
    """Ends a job that has outlasted one of its deadlines; False when it hasn't."""
    if _pauses(draft, cluster):
        return False
    passed = _passed(draft)
    if passed is None:
        return False
    if cluster is not None and _runs(draft, cluster) and not attempts.head_is_lost(draft, cluster):
        ray = draft.observed.ray
        assert ray is not None
        if ray.job is not None and ray.job.over:
            finished = attempts.has_finished(draft, cluster, ray.job)
            if finished is None and draft.now < passed.at + passed.grace + STOP_PATIENCE:
                # Its log, which would tell, cannot be read now.
                draft.wake_in(draft.settings.start_poll_seconds)
                return True
            message = attempts.note_end(draft, cluster, ray.job)
            if finished:
                finish(draft, Type.SUCCEEDED, Reason.COMPLETED, message)
                return True
        elif _winds_down(draft, cluster, passed):
            return True
    finish(draft, Type.FAILED, passed.reason, passed.message)
    return True


def _pauses(draft: Draft, cluster: ClusterView | None) -> bool:
    """Whether the job's clock stands still; keeps account of it."""
    status = draft.status
    suspended = status.by_type.get(Type.SUSPENDED.title)
    if draft.resolved.spec.suspend and suspended is not None and suspended.is_true:
        began = suspended.since
    elif cluster is not None and (cluster.suspended or draft.observed.queue.taken_back):
        began = draft.now
    else:
        if status.pause_time is not None:
            seconds = max(0, round((draft.now - status.pause_time).total_seconds()))
            draft.set(pause_time=None, paused_seconds=status.paused_seconds + seconds)
        return False
    if status.start_time is not None and status.pause_time is None:
        draft.set(pause_time=began)
    return True


def _passed(draft: Draft) -> _Passed | None:
    deadlines, start = draft.resolved.spec.deadlines, draft.status.start_time
    if start is None:
        return None
    start += timedelta(seconds=draft.status.paused_seconds)
    if deadlines.run_seconds is not None:
        end = start + timedelta(seconds=deadlines.run_seconds)
        if draft.now >= end:
            grace = timedelta(seconds=draft.settings.suspend_grace_seconds)
            return _Passed(end, Reason.RUN_DEADLINE_EXCEEDED, f"after {deadlines.run_seconds} s", grace)
        draft.wake_at(end)
    if not _has_trained(draft) and not draft.resolved.spec.suspend:
        end = start + timedelta(seconds=deadlines.start_seconds)
        if draft.now >= end:
            ready = draft.job.status.by_type.get(Type.CLUSTER_READY.title)
            why = f"; {ready.message}" if ready is not None and not ready.is_true and ready.message else ""
            full = no_space.first_alike(draft.status.attempts)
            if full is not None:
                why = f"; attempt {full.number}: {full.message}{why}"
            message = f"after {deadlines.start_seconds} s{why}"
            return _Passed(end, Reason.START_DEADLINE_EXCEEDED, message, timedelta())
        draft.wake_at(end)
    return None


def _has_trained(draft: Draft) -> bool:
    """Whether any attempt has done a step. One that begins anew is at step 0 again; that samples had an age stays."""
    progress = draft.status.progress
    return (progress is not None and progress.step > 0) or Type.WEIGHTS_FRESH.title in draft.status.by_type


def _runs(draft: Draft, cluster: ClusterView) -> bool:
    """Whether there is a driver that answers, as far as Ray says."""
    last, ray = draft.status.last, draft.observed.ray
    begun = last is not None and last.ended is None and cluster.attempt == last.number
    return begun and ray is not None and ray.reachable and ray.job is not None


def _winds_down(draft: Draft, cluster: ClusterView, passed: _Passed) -> bool:
    """Has the driver end by itself; False when it has had its time."""
    saved_by = passed.at + passed.grace
    if draft.now >= saved_by + STOP_PATIENCE:
        return False
    what = "saves a checkpoint" if draft.now < saved_by else "is stopped"
    draft.say(Type.RUNNING, True, passed.reason, f"{passed.message}; attempt {cluster.attempt} {what}")
    if draft.now < saved_by:
        attempts.talk(draft, cluster, suspend=True)
        draft.wake_at(saved_by)
    else:
        draft.do(StopDriver(cluster.name, cluster.incarnation, cluster.attempt))
        draft.wake_in(draft.settings.start_poll_seconds)
    return True
