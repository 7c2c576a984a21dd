"""What one look at the world finds: plain immutable data, all that `reconcile` may base a decision on.

`views` makes these from API objects; `questions` says which of the answers that cost an HTTP call are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from rljob_api import ResolvedJob
from rljob_api.status import DriverStatus
from rljob_operator.conditions import Reason
from rljob_operator.queueing import QueueView
from rljob_operator.status import JobStatus

RayState = Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
Trouble = Literal["unschedulable", "image", "crash", "gated", "unserved", "waiting"]


@dataclass(frozen=True)
class JobView:
    """The RLJob."""

    namespace: str
    name: str
    uid: str
    generation: int
    version: str
    """Resource version: a status written on a later one is refused."""
    created: datetime
    document: Mapping[str, Any]
    """The spec as stored."""
    fingerprint: str
    """The hash of all settings that a running cluster cannot follow (`objects.spec_hash`)."""
    job: ResolvedJob | None
    """None: the spec is not valid, `problems` says why."""
    problems: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Kueue's."""
    status: JobStatus = field(default_factory=JobStatus)
    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    """Other people's: what keeps a job that is being deleted."""


@dataclass(frozen=True)
class GroupView:
    """One worker group of a RayCluster's spec."""

    index: int
    """Its place in the list, which JSON Patch needs."""
    name: str
    replicas: int
    most: int
    least: int = 0
    hosts: int = 1
    suspended: bool = False
    """Somebody has switched the group alone off; neither we nor Kueue do that."""
    removing: tuple[str, ...] = ()
    """scaleStrategy.workersToDelete."""

    @property
    def asked(self) -> int:
        """Replicas that KubeRay makes: their number within the bounds, which anybody may have changed."""
        return self.least if self.replicas < self.least else min(self.replicas, self.most)


@dataclass(frozen=True)
class ClusterView:
    """A RayCluster of the job."""

    name: str
    uid: str
    incarnation: int
    generation: int
    """Generation of the job that its ConfigMap carries."""
    spec_hash: str
    attempt: int
    attempt_head: str
    version: str = ""
    """Resource version."""
    token_key: str = ""
    """Id of the key from which its tokens derive."""
    priority: str | None = None
    """Kueue's priority class."""
    first_crash: datetime | None = None
    """Since when pods crash with no attempt running."""
    groups: tuple[GroupView, ...] = ()
    suspended: bool = False
    """Kueue holds it back."""
    deleting: bool = False
    problem: str = ""
    """What KubeRay says is wrong."""
    problem_since: datetime | None = None
    refused: Reason | None = None
    """The problem is that the API server does not take the pods: whose word that is."""

    def group(self, name: str) -> GroupView | None:
        return next((group for group in self.groups if group.name == name), None)


@dataclass(frozen=True)
class PodView:
    """A pod of the job, without all that the operator doesn't look at."""

    name: str
    uid: str
    cluster: str
    group: str
    """`head`, or the worker group."""
    ready: bool
    created: datetime
    ended: bool = False
    """Phase Failed or Succeeded."""
    trouble: Trouble | None = None
    message: str = ""
    container: str = ""
    """The container whose end the message tells of, where it does."""
    disrupted: bool = False
    """Evicted, preempted, or on a lost node: not the job's fault."""
    disruption: str = ""
    """Reason of the condition DisruptionTarget, where Kubernetes gives one."""
    scheduler: str = ""
    """The scheduler that should find it a node and has not said anything yet."""
    replica: str = ""
    """The replica that the pod belongs to, where a replica has several hosts."""
    deleting_since: datetime | None = None
    """When it should have been gone (deletionTimestamp, grace period included)."""


@dataclass(frozen=True)
class ClaimView:
    """A PersistentVolumeClaim that the job names."""

    name: str
    phase: str
    """Pending, Bound or Lost."""
    modes: tuple[str, ...]
    """Access modes: of the volume once there is one, else as asked for."""
    storage_class: str = ""
    deleting: bool = False


@dataclass(frozen=True)
class RayJobView:
    """Ray's record of a submission."""

    submission: str
    state: RayState
    message: str = ""
    exit_code: int | None = None

    @property
    def over(self) -> bool:
        return self.state in ("STOPPED", "SUCCEEDED", "FAILED")


@dataclass(frozen=True)
class RayView:
    """What Ray's dashboard answered."""

    reachable: bool
    problem: str = ""
    refused: bool = False
    """It does not answer because it does not take the operator's token."""
    job: RayJobView | None = None
    """None: Ray knows no such submission (if reachable)."""
    lines: tuple[str, ...] = ()
    """Last lines of an ended driver, cleaned and masked."""
    leftovers: int = 0
    """Live actors and placement groups, asked for only after an attempt has ended."""


@dataclass(frozen=True)
class DriverView:
    """What the driver answered; never both."""

    status: DriverStatus | None = None
    problem: str = ""
    silent_since: datetime | None = None
    """Since when no question was answered, as far as this process remembers."""


@dataclass(frozen=True)
class Observed:
    """Everything about one job at one moment."""

    job: JobView
    clusters: tuple[ClusterView, ...] = ()
    pods: tuple[PodView, ...] = ()
    ray: RayView | None = None
    """None: not asked."""
    driver: DriverView | None = None
    claims: tuple[ClaimView, ...] = ()
    """The claims that the job names, as far as they exist."""
    queue: QueueView = field(default_factory=QueueView)
    """What Kueue says about the newest cluster."""
    kuberay: bool = True
    """The RayCluster resource is served."""
    rejection: str = ""
    """Why the API server refused what was to be done for the job, if it did."""
    surroundings_due: bool = False
    """It is time to see whether somebody has deleted what the cluster's pods need beside it."""
    sized_since: datetime | None = None
    """Since when the newest cluster's groups have asked for the pods that they ask for now, as far as this process
    remembers."""

    def pods_of(self, cluster: str, group: str | None = None) -> list[PodView]:
        """Pods of a cluster, or of one of its groups, by name."""
        found = (pod for pod in self.pods if pod.cluster == cluster and group in (None, pod.group))
        return sorted(found, key=lambda pod: pod.name)
