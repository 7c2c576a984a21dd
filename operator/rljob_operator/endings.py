"""How things end: an attempt, an incarnation, a job. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from rljob_api.job_status import Attempt
from rljob_operator.actions import RemovePod
from rljob_operator.conditions import Reason, Type
from rljob_operator.draft import Draft
from rljob_operator.observed import ClusterView, PodView
from rljob_operator.pods import CONTAINER
from rljob_operator.settings import Settings

LINES_IN_MESSAGE = 3
LOST = "lost pods: "
CRASHES_IN_MESSAGE = 3
DISRUPTIONS = {
    "EvictionByEvictionAPI": "was evicted, as when its node is drained",
    "DeletionByTaintManager": "was evicted because of a taint of its node",
    "PreemptionByScheduler": "was preempted by a pod of higher priority",
    "TerminationByKubelet": "was ended by its node",
    "DeletionByPodGC": "has lost its node",
}
"""How a pod was taken away, by the reason of its condition DisruptionTarget."""
OUT_OF_MEMORY = "OOMKilled"
AT_ONCE = {reason.title for reason in (Reason.JOB_SUSPENDED, Reason.LEFTOVER_PROCESSES, Reason.QUOTA_TAKEN_BACK)}
"""Ends of an attempt after which the next one needs no pause."""


def attempt_failed(draft: Draft, reason: Reason, message: str, *, counts: bool) -> bool:
    """Closes the open attempt as failed; False when that was one failure too many and the job is given up."""
    last = draft.status.last
    assert last is not None, "only an attempt that was begun can fail"
    if counts:
        draft.set(failures=failures_since_checkpoint(draft) + 1)
    draft.close_attempt(reason, message, counted=counts)
    limit = draft.resolved.spec.retry.limit
    if counts and draft.status.failures > limit:
        text = f"attempt {last.number} failed ({message}); {draft.status.failures} failures since the last checkpoint"
        finish(draft, Type.FAILED, Reason.RETRY_LIMIT_EXCEEDED, f"{text}, spec.retry.limit is {limit}")
        return False
    return True


def failures_since_checkpoint(draft: Draft) -> int:
    """Failures since the newest checkpoint: one that was written after the last counted failure wipes them out."""
    counted = [attempt for attempt in draft.status.attempts if attempt.counted]
    newest = draft.status.checkpoint
    if counted and counted[-1].checkpoint_step != (newest and newest.step):
        return 0
    return draft.status.failures


def next_start(last: Attempt, failures: int, base: float, longest: float) -> datetime:
    """When the attempt after a failed one may begin: the pause doubles with each counted failure."""
    assert last.ended is not None
    # 2**30 times anything is beyond the longest pause; a larger power would only overflow.
    pause = base * 2 ** min(30, max(0, failures - 1)) if last.counted else base
    return last.ended + timedelta(seconds=min(pause, longest))


def new_incarnation(draft: Draft, cluster: ClusterView | None, reason: Reason, message: str) -> None:
    """Gives the cluster up; the next one is created when nothing is left of it."""
    draft.close_attempt(reason, message)
    draft.set(incarnation=draft.status.incarnation + 1)
    if cluster is not None:
        draft.remove(cluster)
    draft.say(Type.RUNNING, False, reason, message)
    draft.say(Type.CLUSTER_READY, False, Reason.REPLACING_CLUSTER, message)
    draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)
    draft.wake_in(draft.settings.start_poll_seconds)


def finish(draft: Draft, kind: Type, reason: Reason, message: str = "") -> None:
    """Ends the job. Its clusters go at once: quota and GPUs are worth more than a warm cluster that nobody uses."""
    draft.close_attempt(reason, message)
    if kind is Type.FAILED:
        message = _with_last_lines(draft.status.last, message or reason.meaning)
    draft.set(end_time=draft.now, suspend_time=None, resize_time=None)
    draft.say(Type.SUCCEEDED, kind is Type.SUCCEEDED, reason, message)
    draft.say(Type.FAILED, kind is Type.FAILED, reason, message)
    draft.say(Type.FINISHED, True, reason, message)
    draft.say(Type.RUNNING, False, reason, message)
    draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)
    draft.say(Type.CLUSTER_READY, False, Reason.CLUSTER_FREED)
    draft.say(Type.RESIZING, False, Reason.AT_SIZE)
    free(draft)


def _with_last_lines(last: Attempt | None, message: str) -> str:
    """What a reader of `kubectl describe` wants next: the end of the driver's log. Ray's own message may have it."""
    lines = [line for line in last.lines[-LINES_IN_MESSAGE:] if line not in message] if last is not None else []
    return f"{message}; its log ends: {' | '.join(lines)}" if lines else message


def free(draft: Draft) -> None:
    """Removes whatever clusters there are."""
    for cluster in draft.observed.clusters:
        draft.remove(cluster)
    remove_stuck_pods(draft, {cluster.name for cluster in draft.observed.clusters})
    if draft.observed.clusters or draft.observed.pods:
        draft.wake_in(draft.settings.start_poll_seconds)


def remove_stuck_pods(draft: Draft, clusters: set[str]) -> None:
    """Pods on a lost node stay Terminating for ever, and KubeRay counts them: those are removed by force."""
    for pod in draft.observed.pods:
        if pod.deleting_since is None or (clusters and pod.cluster not in clusters):
            continue
        patience = pod.deleting_since + timedelta(seconds=draft.settings.lost_node_seconds)
        if draft.now >= patience:
            draft.do(RemovePod(pod.name, pod.uid))
        else:
            draft.wake_at(patience)


def mark_disruptions(draft: Draft, pods: list[PodView]) -> None:
    """Remembers on the running attempt that a pod was taken from it, so that its failure isn't held against the job."""
    last = draft.status.last
    if last is not None and last.ended is None and not last.disrupted and any(pod.disrupted for pod in pods):
        draft.change_last_attempt(lambda attempt: attempt.changed(disrupted=True))


def note_losses(draft: Draft, cluster: ClusterView, pods: list[PodView]) -> None:
    """Remembers on the running attempt which pods crashed or were taken away, and how: KubeRay has others in their
    place at once.

    A pod that is taken away ends with an exit code too: once it is being deleted, only a lack of memory is its own.
    """
    last = draft.status.last
    if last is None or last.ended is not None:
        return
    known = last.message.removeprefix(LOST).split("; ") if last.message else []
    removed = {name for group in cluster.groups for name in group.removing}
    found = {
        pod.name: f"{pod.name}: {pod.message}" if has_crashed(pod) else f"{pod.name} {taken_away(pod)}"
        for pod in pods
        if pod.name not in removed and (has_crashed(pod) or taken_away(pod))
    }
    said = {text.partition(" ")[0].rstrip(":") for text in known}
    if len(known) == CRASHES_IN_MESSAGE and said <= found.keys():
        return  # of more that are there at once, whose names would take turns
    losses = [*known, *(text for name, text in found.items() if name not in said)]
    if losses != known:
        message = LOST + "; ".join(losses[-CRASHES_IN_MESSAGE:])
        draft.change_last_attempt(lambda attempt: attempt.changed(message=message))


def taken_away(pod: PodView) -> str:
    """How somebody took the pod away: "was deleted"; empty, if nobody did. KubeRay deletes what has ended by itself."""
    if pod.disrupted:
        how = DISRUPTIONS.get(pod.disruption, "was evicted")
        return f"{how}: {pod.message}" if pod.message else how
    return "was deleted" if pod.deleting_since is not None and not pod.ended else ""


def has_crashed(pod: PodView) -> bool:
    """Whether a pod ended by itself, and with an error: as a whole, or Ray in it while a sidecar lives on."""
    if not (pod.ended or pod.container == CONTAINER) or pod.trouble != "crash" or pod.disrupted:
        return False
    return pod.deleting_since is None or OUT_OF_MEMORY in pod.message


def pause_of(draft: Draft, settings: Settings) -> datetime | None:
    """When the next attempt may begin; None: at once."""
    last = draft.status.last
    if last is None or last.ended is None or last.reason in AT_ONCE:
        return None
    retry = draft.resolved.spec.retry
    if last.reason == Reason.NO_SPACE.title:
        return last.ended + timedelta(seconds=retry.max_backoff_seconds)
    return next_start(last, draft.status.failures, retry.backoff_seconds, retry.max_backoff_seconds)
