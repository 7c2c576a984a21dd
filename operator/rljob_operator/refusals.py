"""Pods that the API server does not let KubeRay make: whose word that is, and how long a job waits for another. Pure.

KubeRay says so in the RayCluster's condition ReplicaFailure, in the words of the API server, and tries again and again:
a quota may have room soon, a policy may be changed. A start that is held back so for longer than
`spec.deadlines.startSeconds` has failed, be it the job's first or one after a failure.
"""

from __future__ import annotations

from datetime import timedelta

from rljob_operator.conditions import Reason, Type
from rljob_operator.draft import Draft
from rljob_operator.endings import finish
from rljob_operator.observed import ClusterView
from rljob_operator.readiness import Readiness

NAMESPACE_ENDS = "because it is being terminated"
"""How an API server refuses anything new in a namespace that is being deleted, which nothing can undo."""


def namespace_ends(draft: Draft) -> bool:
    """Whether the job's namespace is being deleted, as far as the API server has said to KubeRay or to us."""
    told = any(cluster.refused is Reason.DELETING for cluster in draft.observed.clusters)
    return told or NAMESPACE_ENDS in draft.observed.rejection or draft.job.status.has(Type.RUNNING, Reason.DELETING)


def given_up(draft: Draft, cluster: ClusterView, ready: Readiness) -> bool:
    """Ends a job whose pods have been refused for too long; False when it goes on, or can do without them."""
    if ready.enough or cluster.refused is None or cluster.problem_since is None:
        return False
    last = draft.status.last
    if last is not None and last.ended is None and cluster.attempt >= last.number:
        # A driver without some of its pods goes on, or ends and says why.
        return False
    since = max([cluster.problem_since, *([last.ended] if last is not None and last.ended is not None else [])])
    limit = draft.resolved.spec.deadlines.start_seconds
    end = since + timedelta(seconds=limit)
    if draft.now < end:
        draft.wake_at(end)
        return False
    message = f"for {limit} s (spec.deadlines.startSeconds): {cluster.problem}"
    finish(draft, Type.FAILED, cluster.refused, message)
    return True
