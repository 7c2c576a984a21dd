"""One attempt after the other: begin, watch, judge the end, pause, begin again on the warm cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from rljob_api.cluster import DRIVE_FINISHED, DRIVE_SAYS, PERHAPS_MEMORY
from rljob_api.status import DriverStatus
from rljob_operator import names, no_space, progress
from rljob_operator.actions import BeginAttempt, KeepSurroundings, StopDriver, SubmitDriver, TellDriver
from rljob_operator.conditions import Reason, Type
from rljob_operator.draft import Draft
from rljob_operator.endings import (
    attempt_failed,
    finish,
    mark_disruptions,
    new_incarnation,
    note_losses,
    pause_of,
    taken_away,
)
from rljob_operator.observed import ClusterView, PodView, RayJobView, RayView
from rljob_operator.readiness import Readiness

BAD_JOB_FILE = 64
BAD_DATA = 65
BAD_CHECKPOINT = 66
LONGEST_LINES = 20
NO_LOG = RayView(False, problem="the driver's process has ended with code 0, but its log cannot be read")
VANISHED = "the driver's process exited with code 0 before the run had ended"


def adopt(draft: Draft, cluster: ClusterView) -> None:
    """Opens the record of an attempt that the cluster knows and the status doesn't (its write was lost)."""
    last = draft.status.last
    if last is not None and last.incarnation < cluster.incarnation and cluster.attempt < last.number:
        # Somebody wrote another incarnation into the status. What ran on a former cluster never goes on here: on this
        # one its number would be that of another run.
        draft.close_attempt(Reason.HEAD_LOST, "its cluster was replaced")
    known = {attempt.number for attempt in draft.status.attempts}
    if cluster.attempt > draft.status.attempt and cluster.attempt not in known:
        draft.add_attempt(cluster.attempt, cluster.incarnation)


def head_of_attempt(draft: Draft, cluster: ClusterView) -> PodView | None:
    """The head pod on which the attempt was begun, if it is still there."""
    heads = draft.observed.pods_of(cluster.name, names.HEAD_ROLE)
    return next((pod for pod in heads if pod.uid == cluster.attempt_head), None)


def head_is_lost(draft: Draft, cluster: ClusterView) -> bool:
    """Whether the head pod of the newest attempt has gone, other than by Kueue's will."""
    if not cluster.attempt_head or _stopped_by_queue(draft, cluster):
        return False
    head = head_of_attempt(draft, cluster)
    return head is None or head.ended or head.deleting_since is not None


def head_lost(draft: Draft, cluster: ClusterView) -> bool:
    """Handles the loss of the head; True when it was lost."""
    if not head_is_lost(draft, cluster):
        return False
    head = head_of_attempt(draft, cluster)
    crashed = head is not None and head.ended and not head.disrupted
    why = "the head pod was lost"
    if head is not None:
        why = f"the head pod {head.name} {taken_away(head) or head.message or 'ended'}"
    last = draft.status.last
    if (
        crashed
        and last is not None
        and last.ended is None
        and not attempt_failed(draft, Reason.HEAD_LOST, why, counts=True)
    ):
        return True
    new_incarnation(draft, cluster, Reason.HEAD_LOST, why)
    return True


def quota_taken_back(draft: Draft, cluster: ClusterView, message: str) -> None:
    """Closes the attempt that ran on a cluster which Kueue has stopped. The job has done nothing wrong."""
    last = draft.status.last
    if last is not None and last.ended is None and last.incarnation == cluster.incarnation:
        draft.close_attempt(Reason.QUOTA_TAKEN_BACK, message)


def _stopped_by_queue(draft: Draft, cluster: ClusterView) -> bool:
    """Whether the cluster's newest attempt ended because Kueue took its pods; then a missing head is no loss."""
    last = draft.status.last
    if last is None or last.incarnation != cluster.incarnation:
        return False
    return last.reason == Reason.QUOTA_TAKEN_BACK.title


def advance(draft: Draft, cluster: ClusterView, ready: Readiness) -> None:
    """Moves the job's attempts one stage on, on a cluster whose head is not lost."""
    last = draft.status.last
    if last is None or last.ended is not None:
        _begin_next(draft, cluster, ready)
    elif cluster.attempt < last.number:
        # Decided before, but the cluster doesn't know yet: the write was lost or refused.
        _begin(draft, cluster, ready, last.number)
    else:
        _watch(draft, cluster)


def _begin_next(draft: Draft, cluster: ClusterView, ready: Readiness) -> None:
    last = draft.status.last
    draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)
    if last is not None and last.ended is not None:
        if is_pausing(draft):
            return
        if last.incarnation == cluster.incarnation and not _is_clean(draft, cluster):
            return
    if not ready.enough or ready.head is None:
        draft.say(Type.RUNNING, False, ready.why_pending, ready.sentence)
        return
    number = max(draft.status.attempt, cluster.attempt) + 1
    draft.add_attempt(number, cluster.incarnation)
    _begin(draft, cluster, ready, number)


def is_pausing(draft: Draft) -> bool:
    """Whether the pause after the last attempt isn't over; then the status says so."""
    start = pause_of(draft, draft.settings)
    if start is None or draft.now >= start:
        return False
    before, reason = draft.job.status.by_type.get(Type.RUNNING.title), _why_pausing(draft)
    if before is not None and before.reason == reason.title:
        # The remaining time isn't repeated every second: the message stays as it was first written.
        draft.say(Type.RUNNING, False, reason, before.message)
        draft.wake_at(start)
    else:
        back_off(draft)
    return True


def back_off(draft: Draft) -> None:
    """Says why the last attempt failed and when the next one begins."""
    start = pause_of(draft, draft.settings)
    told = no_space.first_alike(draft.status.attempts) or draft.status.last
    assert start is not None
    assert told is not None
    seconds = round((start - draft.now).total_seconds())
    message = f"attempt {told.number}: {told.message}; attempt {draft.status.attempt + 1} starts in {seconds} s"
    draft.say(Type.RUNNING, False, _why_pausing(draft), message)
    draft.wake_at(start)


def _why_pausing(draft: Draft) -> Reason:
    return Reason.NO_SPACE if no_space.first_alike(draft.status.attempts) else Reason.BACKING_OFF


def _is_clean(draft: Draft, cluster: ClusterView) -> bool:
    """Whether nothing of the last attempt is alive. An old actor would work on with old weights, on the same GPUs."""
    last, ray = draft.status.last, draft.observed.ray
    assert last is not None
    assert last.ended is not None
    if _stopped_by_queue(draft, cluster):
        ending = [pod.name for pod in draft.observed.pods_of(cluster.name) if pod.deleting_since is not None]
        if ending:
            draft.say(Type.RUNNING, False, Reason.STARTING, f"waiting for {', '.join(ending[:5])} to end")
            draft.wake_in(draft.settings.start_poll_seconds)
            return False
        if head_of_attempt(draft, cluster) is None:
            return True
        # Admitted again before a pod was taken: the attempt is over nevertheless.
        draft.do(StopDriver(cluster.name, cluster.incarnation, last.number))
    if ray is None or not ray.reachable:
        _unreachable(draft, cluster, ray)
        return False
    if ray.leftovers == 0:
        return True
    patience = last.ended + timedelta(seconds=draft.settings.leftover_grace_seconds)
    message = f"{ray.leftovers} actors or placement groups of attempt {last.number} are still alive"
    if draft.now >= patience:
        new_incarnation(draft, cluster, Reason.LEFTOVER_PROCESSES, message)
    else:
        draft.say(Type.RUNNING, False, Reason.STARTING, message)
        draft.wake_in(draft.settings.start_poll_seconds)
    return False


def _begin(draft: Draft, cluster: ClusterView, ready: Readiness, number: int) -> None:
    if ready.head is None:
        draft.say(Type.RUNNING, False, ready.why_pending, ready.sentence)
        return
    draft.do(BeginAttempt(cluster.name, cluster.attempt, number, ready.head.uid))
    draft.do(SubmitDriver(cluster.name, cluster.incarnation, number, draft.job.generation))
    draft.say(Type.RUNNING, False, Reason.STARTING, f"attempt {number}")
    draft.wake_in(draft.settings.start_poll_seconds)


def _watch(draft: Draft, cluster: ClusterView) -> None:
    ray = draft.observed.ray
    pods = draft.observed.pods_of(cluster.name)
    mark_disruptions(draft, pods)
    note_losses(draft, cluster, pods)
    if ray is None or not ray.reachable:
        _unreachable(draft, cluster, ray)
        return
    if ray.job is None:
        draft.do(SubmitDriver(cluster.name, cluster.incarnation, cluster.attempt, cluster.generation))
        draft.say(Type.RUNNING, False, Reason.STARTING, f"attempt {cluster.attempt}")
        draft.wake_in(draft.settings.start_poll_seconds)
    elif ray.job.over:
        judge(draft, cluster, ray.job)
    elif ray.job.state == "PENDING":
        draft.say(Type.RUNNING, False, Reason.STARTING, f"attempt {cluster.attempt}")
        draft.wake_in(draft.settings.start_poll_seconds)
    else:
        talk(draft, cluster)
        _trains(draft, cluster)


def _trains(draft: Draft, cluster: ClusterView) -> None:
    """A driver that runs trains, as far as it answers; one that is silent for long may be frozen."""
    before, silence = draft.job.status.by_type.get(Type.RUNNING.title), draft.said(Type.PROGRESSING)
    silent = {reason.title: reason for reason in (Reason.NO_ANSWER, Reason.STALLED)}
    if silence is not None and silence.reason in silent:
        message = f"attempt {cluster.attempt}: {silence.message}"
        draft.say(Type.RUNNING, True, silent[silence.reason], message)
    elif silence is None and before is not None and before.is_true and before.reason in silent:
        # Until it answers: an operator that has just begun asks for the first time.
        draft.say(Type.RUNNING, True, silent[before.reason], before.message)
    else:
        draft.say(Type.RUNNING, True, Reason.TRAINING, f"attempt {cluster.attempt}")


def _unreachable(draft: Draft, cluster: ClusterView, ray: RayView | None) -> None:
    """Ray doesn't answer. After spec.deadlines.progressSeconds of this the cluster is replaced.

    Not so one that answers that it doesn't know us: what runs there is healthy, and whoever changed the operator's key
    would lose all clusters within the same hour.
    """
    if ray is not None and ray.refused:
        draft.say(Type.RUNNING, None, Reason.TOKEN_REFUSED, ray.problem)
        draft.say(Type.PROGRESSING, False, Reason.TOKEN_REFUSED, ray.problem)
        draft.wake_in(draft.settings.poll_seconds)
        return
    before = draft.job.status.by_type.get(Type.RUNNING.title)
    message = ray.problem if ray is not None else "Ray has not been queried yet"
    patience = timedelta(seconds=draft.resolved.spec.deadlines.progress_seconds)
    silence = draft.job.status.by_type.get(Type.PROGRESSING.title)
    unknown = [found.since for found in (before, silence) if found is not None and found.status == "Unknown"]
    # Both, since Running is unknown, too, while the head refuses us.
    if len(unknown) == 2 and draft.now >= max(unknown) + patience:
        new_incarnation(draft, cluster, Reason.RAY_UNREACHABLE, message)
        return
    if ray is not None:
        if before is None or before.reason != Reason.RAY_UNREACHABLE.title:
            # Its network policy may be that of an operator elsewhere, or nobody's: not to be left for the next sweep.
            keep_surroundings(draft, cluster)
        draft.say(Type.RUNNING, None, Reason.RAY_UNREACHABLE, message)
        draft.say(Type.PROGRESSING, None, Reason.NO_ANSWER)
    draft.wake_in(draft.settings.poll_seconds)


def keep_surroundings(draft: Draft, cluster: ClusterView) -> None:
    """Has job file, tokens and network policy of a cluster made anew, once a look."""
    if not any(isinstance(action, KeepSurroundings) for action in draft.actions):
        with_job_file = cluster.spec_hash == draft.job.fingerprint
        draft.do(KeepSurroundings(cluster.name, cluster.incarnation, job_file=with_job_file))


def answer_of(draft: Draft, attempt: int) -> DriverStatus | None:
    """The driver's answer, if it comes from this attempt."""
    driver = draft.observed.driver
    if driver is None or driver.status is None or driver.status.attempt != attempt:
        return None
    return driver.status


def talk(draft: Draft, cluster: ClusterView, *, suspend: bool = False) -> None:
    """Takes the running driver's answer, and tells it what is wanted until it has understood.

    With `suspend` it shall save a checkpoint and end, whatever the job file says; that is told until it has ended.
    """
    draft.wake_in(draft.settings.poll_seconds)
    answer = answer_of(draft, cluster.attempt)
    if answer is not None:
        progress.take(draft, answer)
        if (suspend or answer.generation < draft.job.generation) and answer.end is None:
            desired = progress.desired(draft.resolved, draft.job.generation, cluster.attempt, suspend=suspend)
            draft.do(TellDriver(cluster.name, cluster.incarnation, desired))
        return
    driver = draft.observed.driver
    last = draft.status.last
    if driver is None or driver.silent_since is None or last is None:
        return
    since = max(driver.silent_since, last.started)
    silent = (draft.now - since).total_seconds()
    limit = draft.resolved.spec.deadlines.progress_seconds
    if silent >= limit:
        draft.do(StopDriver(cluster.name, cluster.incarnation, cluster.attempt))
        draft.say(Type.PROGRESSING, False, Reason.STALLED, f"no answer for {limit} s: {driver.problem}")
    elif silent >= draft.settings.silence_seconds:
        draft.say(Type.PROGRESSING, None, Reason.NO_ANSWER, driver.problem)


def judge(draft: Draft, cluster: ClusterView, job: RayJobView) -> None:
    """An attempt has ended: success, suspended, hopeless, or worth another attempt."""
    finished = has_finished(draft, cluster, job)
    if finished is None:
        _unreachable(draft, cluster, NO_LOG)
        return
    message = note_end(draft, cluster, job)
    answer = answer_of(draft, cluster.attempt)
    end = answer.end if answer is not None else None
    exit_code = job.exit_code if job.exit_code is not None else end.exit_code if end is not None else None
    draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)
    if end is not None and end.kind == "suspended":
        _suspended(draft, message)
    elif finished:
        finish(draft, Type.SUCCEEDED, Reason.COMPLETED, message)
    elif exit_code == BAD_JOB_FILE:
        finish(draft, Type.FAILED, Reason.BAD_JOB_FILE, message)
    elif exit_code == BAD_DATA:
        finish(draft, Type.FAILED, Reason.BAD_DATA, message)
    elif exit_code == BAD_CHECKPOINT:
        finish(draft, Type.FAILED, Reason.BAD_CHECKPOINT, message)
    elif draft.resolved.spec.suspend:
        _suspended(draft, message)
    elif exit_code == no_space.NO_ROOM:
        if no_space.ended(draft, message):
            back_off(draft)
    else:
        _failed(draft, message)


def has_finished(draft: Draft, cluster: ClusterView, job: RayJobView) -> bool | None:
    """Whether the driver itself has said that the run has come to its end, in its last answer or in its log's last
    lines. None: its log, which would tell, cannot be read.

    That its process has ended with code 0 proves nothing: a reward could have ended it so.
    """
    if job.state != "SUCCEEDED":
        return False
    answer = answer_of(draft, cluster.attempt)
    if answer is not None and answer.end is not None:
        return answer.end.kind == "succeeded"
    lines = draft.observed.ray.lines if draft.observed.ray is not None else ()
    return any(line.startswith(DRIVE_FINISHED) for line in lines) if lines else None


def note_end(draft: Draft, cluster: ClusterView, job: RayJobView) -> str:
    """Keeps what an attempt that has ended leaves: its last answer, lines, exit code; returns why it ended."""
    ray, answer = draft.observed.ray, answer_of(draft, cluster.attempt)
    if answer is not None:
        progress.take(draft, answer)
    if ray is not None and ray.lines:
        draft.change_last_attempt(lambda attempt: attempt.changed(lines=ray.lines[-LONGEST_LINES:]))
    draft.change_last_attempt(lambda attempt: attempt.changed(exit_code=job.exit_code))
    told = answer.end.reason if answer is not None and answer.end is not None else ""
    job_lines = ray.lines if ray is not None else ()
    if job.state == "SUCCEEDED" and not told and not has_finished(draft, cluster, job):
        return VANISHED
    return told or _own_words(job_lines) or job.message or f"Ray says {job.state}"


def _own_words(lines: Sequence[str]) -> str:
    """What a driver has said of its end, without Ray's account of the command; empty: nothing."""
    begin = max((place for place, line in enumerate(lines) if line.startswith(DRIVE_SAYS)), default=None)
    if begin is None:
        return ""
    if lines[begin].startswith(DRIVE_FINISHED):
        return lines[begin].removeprefix(DRIVE_FINISHED)
    return " | ".join(lines[begin:]).removeprefix(DRIVE_SAYS)


def _suspended(draft: Draft, message: str) -> None:
    draft.close_attempt(Reason.JOB_SUSPENDED, message)
    draft.say(Type.RUNNING, False, Reason.SUSPENDING, message)
    draft.wake_in(draft.settings.start_poll_seconds)


def _failed(draft: Draft, message: str) -> None:
    last = draft.status.last
    assert last is not None
    if last.message:
        # What the driver says of an actor that is gone doesn't tell what became of the container.
        message = f"{message.replace(PERHAPS_MEMORY, '')}; {last.message}"
    stalled = draft.job.status.has(Type.PROGRESSING, Reason.STALLED)
    reason = Reason.STALLED if stalled else Reason.DRIVER_FAILED
    if attempt_failed(draft, reason, message, counts=not last.disrupted):
        back_off(draft)
