"""What Kueue says about a job's cluster, in Kueue's own words. Pure.

Kueue makes a Workload for each RayCluster that names a queue, and holds the cluster back by `spec.suspend`, which only
Kueue writes. A cluster that grows gets a second Workload (a slice) for its new size, which replaces the first once it
has quota; until then the cluster goes on at its old size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

NOT_SEEN = (
    "spec.suspend of the RayCluster is true, but Kueue has made no Workload for it: is Kueue running? If something "
    "else set spec.suspend, unset it there"
)


@dataclass(frozen=True)
class WorkloadView:
    """A Workload of one of the job's clusters."""

    name: str
    created: datetime
    true: frozenset[str] = frozenset()
    """Types of the conditions that are True."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """Messages of the conditions, by type."""
    active: bool = True
    checks: tuple[str, ...] = ()
    """Admission checks that aren't ready: name and message."""

    def is_true(self, kind: str) -> bool:
        return kind in self.true

    @property
    def admitted(self) -> bool:
        return self.is_true("Admitted") and not self.is_true("Evicted")


@dataclass(frozen=True)
class QueueView:
    """What is to know about a cluster's place in its queue."""

    known: bool = False
    """There is a Workload: Kueue looks after the cluster."""
    taken_back: bool = False
    """The quota that the cluster had is taken back; its pods go any moment, if they aren't gone yet."""
    message: str = ""
    """Why the cluster waits, or its new size; empty if nothing waits."""


def queue_view(workloads: Sequence[WorkloadView]) -> QueueView:
    """The place of a cluster, from all its Workloads."""
    open_ = sorted((w for w in workloads if not w.is_true("Finished")), key=lambda w: (w.created, w.name))
    if not open_:
        return QueueView(known=bool(workloads))
    newest = open_[-1]
    taken_back = all(workload.is_true("Evicted") for workload in open_)
    return QueueView(True, taken_back, "" if newest.admitted else _why(newest))


def _why(workload: WorkloadView) -> str:
    said = workload.messages
    if not workload.active:
        return f"deactivated in the queue: {said.get('Evicted') or 'spec.active of its Workload is false'}"
    parts = []
    if workload.is_true("Evicted"):
        parts.append("quota reclaimed: " + (said.get("Preempted") or said.get("Evicted", "")))
    if workload.is_true("QuotaReserved") and not workload.is_true("Evicted"):
        parts.append(f"waits for admission: {'; '.join(workload.checks) or said.get('Admitted', '')}")
    else:
        # At an eviction the reservation outlives the pods, and its words are about having quota.
        words = "" if workload.is_true("QuotaReserved") else said.get("QuotaReserved", "")
        if not parts or words not in (said.get("Evicted"), said.get("Preempted"), ""):
            parts.append(f"waits for quota: {words or 'Kueue has not processed it yet'}")
    return "; ".join(parts)
