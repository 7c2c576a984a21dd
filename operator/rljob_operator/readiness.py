"""Pods into words: how far the pools are, and why they aren't further. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from rljob_api.job_status import PoolStatus
from rljob_operator import names
from rljob_operator.conditions import Reason
from rljob_operator.endings import has_crashed
from rljob_operator.observed import ClusterView, Observed, PodView, Trouble
from rljob_operator.pools import WorkerGroup

WORST_FIRST: tuple[tuple[Trouble, Reason], ...] = (
    ("image", Reason.IMAGE_ERROR),
    ("crash", Reason.POD_ERROR),
    ("unserved", Reason.SCHEDULER_MISSING),
    ("unschedulable", Reason.UNSCHEDULABLE),
    ("gated", Reason.SCHEDULING_GATED),
)


REFUSED = (Reason.QUOTA_REFUSED, Reason.POD_SECURITY_REFUSED, Reason.PODS_REFUSED)


@dataclass(frozen=True)
class Readiness:
    """The state of a cluster's pods."""

    head: PodView | None
    """The head pod that can be talked to, if there is one."""
    enough: bool
    """Training can start or go on."""
    complete: bool
    """All pods are ready."""
    reason: Reason
    sentence: str

    @property
    def why_pending(self) -> Reason:
        """Why nothing runs yet, in the word that `kubectl get` shows: something is to be done about a refusal."""
        return self.reason if self.reason in REFUSED else Reason.PENDING


def pool_status(observed: Observed, job: str, cluster: ClusterView | None, pool: WorkerGroup) -> PoolStatus:
    """Counts of a pool, in replicas."""
    pods = [] if cluster is None else observed.pods_of(cluster.name, pool.name)
    alive = [pod for pod in pods if not pod.ended and pod.deleting_since is None]
    selector = f"{names.JOB_LABEL}={job},{names.ROLE_LABEL}={pool.name}"
    ready = sum(pod.ready for pod in alive)
    return PoolStatus(
        desired=pool.replicas,
        replicas=len(alive) // pool.hosts,
        ready=ready // pool.hosts,
        summary=f"{ready // pool.hosts}/{pool.replicas}",
        selector=selector,
    )


def unserved(pod: PodView, since: timedelta, now: datetime) -> PodView:
    """The pod; one that no scheduler has looked at for that long is in trouble."""
    if not pod.scheduler or pod.trouble is not None or now < pod.created + since:
        return pod
    message = f"the scheduler {pod.scheduler} has not handled the pod for {since.total_seconds():.0f} s: is it running?"
    return replace(pod, trouble="unserved", message=message)


def readiness(observed: Observed, cluster: ClusterView, pools: Sequence[WorkerGroup], was_complete: bool) -> Readiness:
    """How far the cluster is. `was_complete` makes missing pods a loss instead of a start, but for pools that grow."""
    heads = [pod for pod in observed.pods_of(cluster.name, names.HEAD_ROLE) if _alive(pod)]
    head = next((pod for pod in heads if pod.ready), None)
    short, enough, lost = [], head is not None, head is None
    if head is None:
        told = [pod for pod in observed.pods_of(cluster.name, names.HEAD_ROLE) if _tells(pod)]
        short.append(_sentence("head", 0, 1, told))
    for pool in pools:
        pods = [pod for pod in observed.pods_of(cluster.name, pool.name) if _tells(pod)]
        ready, wanted = sum(pod.ready for pod in pods), pool.replicas * pool.hosts
        if ready < wanted:
            short.append(_sentence(pool.name, ready, wanted, pods))
            group = cluster.group(pool.name)
            lost = lost or group is None or group.asked >= pool.replicas
        enough = enough and ready >= pool.least * pool.hosts
    if not short:
        return Readiness(head, enough, True, Reason.POOLS_READY, "")
    waiting = [pod for pod in observed.pods_of(cluster.name) if _tells(pod) and not pod.ready]
    found = {pod.trouble for pod in waiting}
    reason = next((reason for trouble, reason in WORST_FIRST if trouble in found), None)
    if cluster.refused is not None and reason not in (Reason.IMAGE_ERROR, Reason.POD_ERROR):
        reason = cluster.refused
    if reason is None:
        reason = Reason.POOL_DEGRADED if was_complete and lost else Reason.WAITING_FOR_PODS
    sentence = "; ".join(short)
    if cluster.problem and (cluster.refused is not None or not waiting):
        sentence = f"{sentence}; KubeRay: {cluster.problem}"
    return Readiness(head, enough, False, reason, sentence)


def _alive(pod: PodView) -> bool:
    return not pod.ended and pod.deleting_since is None


def _tells(pod: PodView) -> bool:
    """Whether a pod counts or says why one is missing: KubeRay replaces those that crashed, so they aren't alive."""
    return _alive(pod) or (pod.ended and has_crashed(pod))


def _sentence(pool: str, ready: int, wanted: int, pods: Sequence[PodView]) -> str:
    """ "rollout: 3 of 8 pods wait: 0/5 nodes have nvidia.com/gpu"."""
    waiting = [pod for pod in pods if not pod.ready]
    reasons = [trouble for trouble, _ in WORST_FIRST] + ["waiting"]
    told = sorted((pod for pod in waiting if pod.message), key=lambda pod: reasons.index(pod.trouble or "waiting"))
    why = f": {told[0].message}" if told else ""
    if told and told[0].trouble in ("image", "crash"):
        why = f": {told[0].name}{why}"
    missing = wanted - ready
    verb = "waits" if missing == 1 else "wait"
    return f"{pool}: {missing} of {wanted} pod{'s' if wanted > 1 else ''} {verb}{why}"
