"""Which answers a look needs that cost an HTTP call: asked of Ray and the driver, never of the API server. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_operator import names
from rljob_operator.conditions import Type
from rljob_operator.observed import Observed


@dataclass(frozen=True)
class Questions:
    """What to ask on the head of one cluster."""

    cluster: str
    incarnation: int
    attempt: int
    leftovers: bool
    """The attempt has ended: ask what is still alive. Otherwise: ask how it is, and its driver too."""


def questions(observed: Observed) -> Questions | None:
    """None: the head is not there, or nothing was submitted to it."""
    job = observed.job
    if job.deleting or job.job is None or job.status.is_true(Type.FINISHED):
        return None
    newest = max(observed.clusters, key=lambda cluster: cluster.incarnation, default=None)
    if newest is None or newest.deleting or newest.suspended or newest.attempt == 0:
        return None
    if newest.incarnation < job.status.incarnation:
        return None
    heads = observed.pods_of(newest.name, names.HEAD_ROLE)
    if not any(pod.uid == newest.attempt_head and not pod.ended and pod.deleting_since is None for pod in heads):
        return None
    last = job.status.last
    ended = last is not None and last.number == newest.attempt and last.ended is not None
    return Questions(newest.name, newest.incarnation, newest.attempt, leftovers=ended)
