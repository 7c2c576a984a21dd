"""The PersistentVolumeClaims that a job file names: which, what for, and what keeps the job's pods from using them.

Every pod of a job mounts all of them, and a job has at least two pods. A ReadWriteOnce volume is at one node at a time,
so pods on a second node would wait for it without end, with their GPUs taken. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rljob_api import ResolvedJob
from rljob_api.cluster import PVC
from rljob_api.locations import READ, STATE, locations
from rljob_api.on_cluster import refused
from rljob_api.spec.pod import Pod
from rljob_operator.conditions import Reason
from rljob_operator.observed import ClaimView
from rljob_operator.pools import pools

HOST_LABEL = "kubernetes.io/hostname"
SHARED = "ReadWriteMany"
SHARED_READING = "ReadOnlyMany"
ONE_POD = "ReadWriteOncePod"


@dataclass(frozen=True)
class VolumeClaim:
    """A claim as the job file uses it."""

    name: str
    fields: tuple[str, ...]
    """The fields of the job file that name it."""
    written: bool

    @property
    def place(self) -> str:
        """Names the claim at the beginning of a sentence."""
        return f"{', '.join(self.fields)}: PersistentVolumeClaim {self.name}"


@dataclass(frozen=True)
class Obstacle:
    """Why a claim can't be used."""

    reason: Reason
    sentence: str
    lasting: bool
    """It won't go away by waiting for pods: no cluster is created as long as it is there."""


def claims(job: ResolvedJob) -> list[VolumeClaim]:
    """The claims in `pvc://claim/path` locations, by name: mounted by that name in all pods."""
    return _claims(_locations(job))


def used_claims(job: ResolvedJob) -> list[VolumeClaim]:
    """All claims of a job: those of its state, models and data, and those that its own code comes from."""
    code = ((f"spec.code[{index}].pvc", item.pvc, False) for index, item in enumerate(job.spec.code) if item.pvc)
    return _claims([*_locations(job), *code])


def problems(job: ResolvedJob) -> list[str]:
    """What no volume that comes later will mend, in sentences."""
    return [str(violation) for violation in refused(job)]


def obstacles(job: ResolvedJob, found: Mapping[str, ClaimView]) -> list[Obstacle]:
    """What is in the way, worst first. `found` are the claims that exist, by name."""
    here = [obstacle for claim in used_claims(job) if (obstacle := _obstacle(job, claim, found.get(claim.name)))]
    return sorted(here, key=lambda obstacle: not obstacle.lasting)


def _locations(job: ResolvedJob) -> Iterator[tuple[str, str, bool]]:
    """(field, claim, whether it is written to)."""
    for place in locations(job.spec, (*READ, *STATE)):
        if place.value.startswith(PVC):
            claim = place.value.removeprefix(PVC).partition("/")[0]
            yield f"spec.{place.field.replace('[]', '')}", claim, place.field == "checkpoint.uri"


def _claims(uses: Iterable[tuple[str, str, bool]]) -> list[VolumeClaim]:
    fields: dict[str, dict[str, bool]] = {}
    for field, claim, written in uses:
        fields.setdefault(claim, {})[field] = written
    return [VolumeClaim(name, tuple(fields[name]), any(fields[name].values())) for name in sorted(fields)]


def _obstacle(job: ResolvedJob, claim: VolumeClaim, view: ClaimView | None) -> Obstacle | None:
    if view is None:
        return Obstacle(Reason.VOLUME_MISSING, f"{claim.place} does not exist", lasting=True)
    if view.deleting:
        return Obstacle(Reason.VOLUME_MISSING, f"{claim.place} is being deleted", lasting=True)
    if view.phase == "Lost":
        return Obstacle(Reason.VOLUME_MISSING, f"{claim.place} has lost its volume", lasting=True)
    wrong = _wrong_modes(job, claim, view.modes)
    if wrong:
        return Obstacle(Reason.VOLUME_NOT_SHARED, f"{claim.place} {wrong}", lasting=True)
    if view.phase != "Bound":
        return Obstacle(Reason.VOLUME_UNBOUND, f"{claim.place} waits for a volume{_of(view)}", lasting=False)
    return None


def _wrong_modes(job: ResolvedJob, claim: VolumeClaim, modes: tuple[str, ...]) -> str:
    """Why the access modes won't do; empty if they will."""
    if SHARED in modes or (SHARED_READING in modes and not claim.written):
        return ""
    have = " and ".join(modes) or "without access mode"
    if modes == (SHARED_READING,):
        return f"is {have}, but checkpoints are written to it: it must be {SHARED}"
    pods = 1 + sum(pool.replicas * pool.hosts for pool in pools(job))
    need = SHARED if claim.written else f"{SHARED} or {SHARED_READING}"
    if modes == (ONE_POD,):
        return f"is {have}, but {pods} pods mount it: it must be {need}"
    if _on_one_node(job):
        return ""
    return (
        f"is {have}, but {pods} pods on arbitrary nodes mount it: it must be {need}, or the nodeSelector of head and "
        f"pools must name one {HOST_LABEL}"
    )


def _on_one_node(job: ResolvedJob) -> bool:
    def host(pod: Pod) -> str | None:
        return pod.node_selector.get(HOST_LABEL)

    hosts = {host(job.spec.head.pod), *(host(pool.role.pod) for pool in pools(job))}
    return len(hosts) == 1 and None not in hosts


def _of(view: ClaimView) -> str:
    return f" of class {view.storage_class}" if view.storage_class else ""
