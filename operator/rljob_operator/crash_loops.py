"""A start that fails because pods keep crashing, before there is a driver that could fail. Pure.

KubeRay puts another pod in the place of one that crashed, within two seconds and for ever. One crash says little: a
replacement heals most of them. What fails a start is a pod that crashed although it was made
`Settings.crash_loop_seconds` or more after the first crash. Pods know when they were made; when the first crash was
stands on the RayCluster, where it outlasts the operator and goes with the pods that it tells of.

Not counted are pods that were taken away, pods that never ran (no node, image or Secret), and workers as long as no
head is there for them to join. While an attempt runs none of this applies: its driver goes on without the pod, or it
fails.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from rljob_operator import names
from rljob_operator.actions import NoteFirstCrash
from rljob_operator.attempts import back_off
from rljob_operator.conditions import Reason
from rljob_operator.draft import Draft
from rljob_operator.endings import CRASHES_IN_MESSAGE, attempt_failed, has_crashed, new_incarnation
from rljob_operator.observed import ClusterView, PodView
from rljob_operator.readiness import Readiness
from rljob_operator.status import CLOCKS_DIFFER


def start_failed(draft: Draft, cluster: ClusterView, ready: Readiness) -> bool:
    """Handles crashes of pods that an attempt needs before it begins; True when they have ended this start.

    The attempt that was to begin counts as failed, and its cluster goes: while the retry pauses, nobody makes pods.
    """
    if ready.enough or _is_begun(draft, cluster):
        return False
    crashed = [
        pod
        for pod in draft.observed.pods_of(cluster.name)
        if has_crashed(pod) and (pod.group == names.HEAD_ROLE or ready.head is not None)
    ]
    if not crashed:
        return False
    first = _first_crash(draft, cluster)
    if first is None:
        draft.do(NoteFirstCrash(cluster.name, cluster.attempt, draft.now))
        return False
    late = first + timedelta(seconds=draft.settings.crash_loop_seconds)
    looping = [pod for pod in crashed if pod.created >= late]
    if looping:
        _fail(draft, cluster, first, _sentence(looping))
    return bool(looping)


def _is_begun(draft: Draft, cluster: ClusterView) -> bool:
    """Whether an attempt runs: it is open, and the cluster knows of it."""
    last = draft.status.last
    return last is not None and last.ended is None and cluster.attempt >= last.number


def _first_crash(draft: Draft, cluster: ClusterView) -> datetime | None:
    """Since when pods crash in this start. What lies too far back, or before the last attempt's end, is of no loop."""
    first, last = cluster.first_crash, draft.status.last
    if first is None or first > draft.now + CLOCKS_DIFFER:
        return None
    if draft.now > first + timedelta(seconds=draft.settings.crash_memory_seconds):
        return None
    if last is not None and last.ended is not None and first < last.ended:
        return None
    return first


def _fail(draft: Draft, cluster: ClusterView, first: datetime, crashes: str) -> None:
    seconds = round((draft.now - first).total_seconds())
    message = f"pods have been crashing for {seconds} s and the driver cannot start: {crashes}"
    last = draft.status.last
    if last is None or last.ended is not None:
        draft.add_attempt(max(draft.status.attempt, cluster.attempt) + 1, cluster.incarnation, first)
    if attempt_failed(draft, Reason.POD_ERROR, message, counts=True):
        new_incarnation(draft, cluster, Reason.POD_ERROR, message)
        back_off(draft)


def _sentence(pods: list[PodView]) -> str:
    named = pods[:CRASHES_IN_MESSAGE]
    return "; ".join(
        f"{pod.name}: " + (f"container {pod.container}: " if pod.container else "") + pod.message for pod in named
    )
