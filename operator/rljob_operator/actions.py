"""What the operator can do to the world: one small class per deed, carried out by `executor`, in order.

Every action is safe to repeat, and each that changes an existing object names the state it assumes, so that one
decided on old knowledge is refused by the server instead of doing harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from rljob_api.job_status import timestamp
from rljob_api.status import Desired
from rljob_operator import names


@dataclass(frozen=True)
class ApplyConfigMap:
    """Writes the job file for the pods."""


@dataclass(frozen=True)
class CheckPods:
    """Asks the API server whether it would take the pods of an incarnation, before anything of it exists."""

    incarnation: int


@dataclass(frozen=True)
class CreateCluster:
    """Creates the RayCluster of an incarnation, after what its pods need: job file, tokens and network policy."""

    incarnation: int


@dataclass(frozen=True)
class KeepSurroundings:
    """Makes anew what somebody has deleted or changed beside a cluster: job file, tokens, network policy."""

    cluster: str
    incarnation: int
    job_file: bool
    """The cluster's pods are to have the job file of today's generation."""


@dataclass(frozen=True)
class DeleteCluster:
    """Removes a RayCluster, and with it its pods."""

    name: str
    uid: str


@dataclass(frozen=True)
class RemovePod:
    """Removes a pod by force whose node doesn't answer any more."""

    name: str
    uid: str


@dataclass(frozen=True)
class NoteGeneration:
    """Notes on the RayCluster which generation of the job its ConfigMap carries."""

    cluster: str
    before: int
    after: int


@dataclass(frozen=True)
class BeginAttempt:
    """Notes on the RayCluster that an attempt begins on this head, before anything is submitted."""

    cluster: str
    before: int
    attempt: int
    head_uid: str


@dataclass(frozen=True)
class NoteFirstCrash:
    """Notes on the RayCluster since when its pods crash with no attempt running."""

    cluster: str
    attempt: int
    """The newest that has run on the cluster."""
    time: datetime


@dataclass(frozen=True)
class SubmitDriver:
    """Submits the driver to Ray. Submitting an attempt again changes nothing: Ray knows its id."""

    cluster: str
    incarnation: int
    attempt: int
    generation: int


@dataclass(frozen=True)
class StopDriver:
    """Asks Ray to end an attempt."""

    cluster: str
    incarnation: int
    attempt: int


@dataclass(frozen=True)
class TellDriver:
    """`PUT /v1/desired`."""

    cluster: str
    incarnation: int
    desired: Desired


@dataclass(frozen=True)
class ResizeGroup:
    """Changes the size of a worker group and its bounds, and names the pods that go."""

    cluster: str
    index: int
    group: str
    before: int
    replicas: int
    least: int
    most: int
    removing: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReshapeGroup:
    """Puts a worker group back whose replicas got other numbers of pods, or that was switched off."""

    cluster: str
    index: int
    group: str
    before: int
    hosts: int
    """Pods of a replica."""


@dataclass(frozen=True)
class PassPriority:
    """Puts Kueue's priority class of the job on a RayCluster that has another one (None: has it taken off)."""

    cluster: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class RestoreGroups:
    """Puts worker groups back that somebody has taken out of a RayCluster. Their pods live on, and join them again."""

    cluster: str
    version: str
    """Resource version of the RayCluster that lacks them."""
    incarnation: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class ClearRemoved:
    """Forgets the names of removed pods, which KubeRay leaves in the spec."""

    cluster: str
    index: int
    group: str
    replicas: int


@dataclass(frozen=True)
class DeleteJob:
    """Deletes the RLJob itself (its time to live is over)."""

    uid: str


Action = (
    ApplyConfigMap
    | CheckPods
    | CreateCluster
    | KeepSurroundings
    | DeleteCluster
    | RemovePod
    | NoteGeneration
    | BeginAttempt
    | NoteFirstCrash
    | SubmitDriver
    | StopDriver
    | TellDriver
    | ResizeGroup
    | ReshapeGroup
    | PassPriority
    | RestoreGroups
    | ClearRemoved
    | DeleteJob
)


@dataclass(frozen=True)
class Event:
    """Something worth a line in `kubectl describe`."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


def groups_patch(version: str, groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The JSON Patch that adds groups to a RayCluster which is as it was seen; a second time would double them."""
    add = [{"op": "add", "path": "/spec/workerGroupSpecs/-", "value": group} for group in groups]
    return [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *add]


def cluster_patch(
    action: NoteGeneration | BeginAttempt | NoteFirstCrash | PassPriority | ResizeGroup | ReshapeGroup | ClearRemoved,
) -> list[Mapping[str, Any]]:
    """The JSON Patch of an action on a RayCluster: first the tests, then the change.

    The list of worker groups is never applied as a whole: Kueue and autoscalers write into it too.
    """

    def annotation(name: str) -> str:
        return "/metadata/annotations/" + name.replace("~", "~0").replace("/", "~1")

    match action:
        case NoteGeneration():
            path = annotation(names.GENERATION_ANNOTATION)
            return [
                {"op": "test", "path": path, "value": str(action.before)},
                {"op": "replace", "path": path, "value": str(action.after)},
            ]
        case BeginAttempt():
            path = annotation(names.ATTEMPT_ANNOTATION)
            return [
                {"op": "test", "path": path, "value": str(action.before)},
                {"op": "replace", "path": path, "value": str(action.attempt)},
                {"op": "add", "path": annotation(names.ATTEMPT_HEAD_ANNOTATION), "value": action.head_uid},
            ]
        case NoteFirstCrash():
            return [
                {"op": "test", "path": annotation(names.ATTEMPT_ANNOTATION), "value": str(action.attempt)},
                {"op": "add", "path": annotation(names.FIRST_CRASH_ANNOTATION), "value": timestamp(action.time)},
            ]
        case PassPriority():
            path = "/metadata/labels/" + names.PRIORITY_LABEL.replace("/", "~1")
            known = [] if action.before is None else [{"op": "test", "path": path, "value": action.before}]
            if action.after is None:
                return [*known, {"op": "remove", "path": path}]
            return [*known, {"op": "add", "path": path, "value": action.after}]
        case ResizeGroup() | ReshapeGroup() | ClearRemoved():
            group = f"/spec/workerGroupSpecs/{action.index}"
            before = action.replicas if isinstance(action, ClearRemoved) else action.before
            tests: list[Mapping[str, Any]] = [
                {"op": "test", "path": f"{group}/groupName", "value": action.group},
                {"op": "test", "path": f"{group}/replicas", "value": before},
            ]
            if isinstance(action, ClearRemoved):
                return [*tests, {"op": "replace", "path": f"{group}/scaleStrategy", "value": {}}]
            if isinstance(action, ReshapeGroup):
                return [
                    *tests,
                    {"op": "add", "path": f"{group}/numOfHosts", "value": action.hosts},
                    {"op": "add", "path": f"{group}/suspend", "value": False},
                ]
            return [
                *tests,
                {"op": "replace", "path": f"{group}/replicas", "value": action.replicas},
                {"op": "add", "path": f"{group}/minReplicas", "value": action.least},
                {"op": "add", "path": f"{group}/maxReplicas", "value": action.most},
                {
                    "op": "add",
                    "path": f"{group}/scaleStrategy",
                    "value": {"workersToDelete": list(action.removing)} if action.removing else {},
                },
            ]
