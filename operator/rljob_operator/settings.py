"""What the person who installs the operator decides, and the operator's own patience. Jobs can't change any of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.pod_policy import PodPolicy


@dataclass(frozen=True)
class Settings:
    """One value of each for the whole operator. Times are in seconds."""

    default_image: str = "rljob/trainer:0.1.0"
    """The image of jobs without spec.image."""
    ray_version: str = "2.60.0"
    """Ray in the images. KubeRay needs it to choose probes and to allow token authentication (2.52 or newer)."""
    token_authentication: bool = True
    """Ray's own services ask for the cluster's token."""

    network_policy: bool = True
    """Training pods take connections from their own job and the operator only."""
    operator_namespace: str = "rljob"
    """Where the operator's pods are, for the network policy."""
    pod_policy: PodPolicy = field(default_factory=PodPolicy)
    """What pods of jobs may do to their nodes and to other tenants."""
    ingress: tuple[Mapping[str, Any], ...] = ()
    """Further ingress rules of the network policy, as Kubernetes writes them: a Prometheus, for example."""

    poll_seconds: float = 5.0
    """Time between two looks at a running driver."""
    start_poll_seconds: float = 2.0
    """Time between two looks at Ray while the driver is being started or stopped."""
    progress_write_seconds: float = 10.0
    """Least time between two writes of status.progress when nothing but progress has changed."""
    progress_writes_per_second: float = 20.0
    """Writes of all jobs together: of more than 200 running jobs each is written less often. The API server takes 10 to
    20 ms to check a job's status."""
    suspend_grace_seconds: float = 900.0
    """How long a driver may take for its checkpoint before the pods of a suspended job are freed anyway."""
    drain_grace_seconds: float = 900.0
    """How long engines may take to hand back their samples before the surplus pods are removed anyway."""
    unseen_seconds: float = 10.0
    """How long a pod that KubeRay has made may take until the operator sees it."""
    silence_seconds: float = 60.0
    """How long a driver may leave questions unanswered before the status says so."""
    leftover_grace_seconds: float = 30.0
    """How long actors of a failed attempt may take to end before the pods are replaced."""
    lost_node_seconds: float = 30.0
    """How long a pod may outlive its termination grace period before it is removed by force (its node is gone)."""
    crash_loop_seconds: float = 60.0
    """Pods that still crash this long after the first one did fail a start. A minute is what a node may need that has
    just come up, until its devices, network and volumes work."""
    crash_memory_seconds: float = 1800.0
    """Crashes in a start that are further apart than this have nothing to do with each other."""
    scheduler_seconds: float = 30.0
    """How long a pod may be without a word from its scheduler until that is taken to be missing."""
    kuberay_retry_seconds: float = 30.0
    """Time between two looks for a KubeRay that is missing."""
    resync_seconds: float = 1800.0
    """A job at rest is looked at this often even if nothing happens; five thousand of them cost 1 % of a core."""
    sweep_seconds: float = 600.0
    """Time between two comparisons of all that is known with all there is."""
    attempts_kept: int = 10
    """Attempts listed in the status."""
