"""What operator and driver agree on about a job's pods and their Ray, besides the HTTP interface (``status.py``)."""

from __future__ import annotations

from typing import Final

ROLE_LABEL: Final = "rljob.dev/role"
"""Label of pods and of Ray's nodes: by it the driver places engines and ranks."""
HEAD: Final = "head"
ROLLOUT: Final = "rollout"
TRAINER: Final = "trainer"
REWARD_MODEL: Final = "reward-model"
JUDGE: Final = "judge"

STORAGE_FOLDER: Final = "/mnt/rljob"
"""`pvc://claim/path` of the job file is this folder, then claim, then path, in all pods."""
CODE_FOLDER: Final = "/opt/rljob/code"
GENERATION_ANNOTATION: Final = "rljob.dev/generation"
"""The annotation of the ConfigMap with the job file that says from which generation of the RLJob it was written."""

PVC: Final = "pvc://"

DRIVE_SAYS: Final = "rljob drive: "
"""With what a driver's own words about its end begin in its log: its errors, and that it has finished."""
DRIVE_FINISHED: Final = f"{DRIVE_SAYS}finished: "
"""With what its last line begins when the run has come to its end; the reason follows."""

PERHAPS_MEMORY: Final = " (perhaps by the system because the host ran out of memory)"
"""What a driver supposes of an actor's process that is gone. The operator may know better: what became of its pod."""

RAY_ENVIRONMENT: Final = {
    # Ray would report its use to its makers.
    "RAY_USAGE_STATS_ENABLED": "0",
    # What is larger goes through the object store, which takes 2 ms and more: most batches are smaller than this. From
    # 1 MB on the store is faster. (Ray's default is 100 kB.)
    "RAY_max_direct_call_object_size": "524288",
    # When the driver comes, Ray would start a process for each CPU of every node, a hundred at once on large ones.
    # Those of ours are started when an actor is, most of them with an environment of its own.
    "RAY_prestart_worker_first_driver": "0",
}
"""How every Ray of ours is set, in pods and on one machine."""


TERMINATION_SECONDS: Final = 5
"""No pod of ours ends at SIGTERM: Kubernetes' 30 s passed to the last, and kept the next cluster waiting."""
POD_SECURITY: Final = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
"""The pod's security context. A job whose image runs as root says otherwise in its own template."""
CONTAINER_SECURITY: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""The security context of the container that Ray runs in; the job's own template may say otherwise."""


def pod_path(location: str, storage: str = STORAGE_FOLDER) -> str:
    """Where a location of the job file is in a pod: `pvc://claim/path` under ``storage``, anything else as it is."""
    return f"{storage}/{location.removeprefix(PVC)}" if location.startswith(PVC) else location


def location(path: str, storage: str = STORAGE_FOLDER) -> str:
    """What a job file would say of a path in a pod: `pvc://claim/path` below ``storage``, anything else as it is."""
    return PVC + path.removeprefix(f"{storage}/") if path.startswith(f"{storage}/") else path
