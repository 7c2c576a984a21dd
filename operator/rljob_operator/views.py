"""Makes of API objects what `observed` holds: keeps what the operator looks at and forgets the rest.

Objects come from watches, so nothing here trusts a field to be there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rljob_api import API_VERSION, KIND, check, resolve
from rljob_operator import names
from rljob_operator.answers import clean
from rljob_operator.conditions import Reason, parse_time
from rljob_operator.objects import spec_hash
from rljob_operator.observed import ClaimView, ClusterView, GroupView, JobView, PodView, Trouble
from rljob_operator.queueing import WorkloadView
from rljob_operator.status import JobStatus

Object = Mapping[str, Any]

IMAGE_TROUBLE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
CRASH_TROUBLE = {"CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
DISRUPTIONS = {"Evicted", "Preempting", "Preempted", "NodeLost", "NodeShutdown", "Shutdown", "Terminated"}
LONGEST_POD_MESSAGE = 240
LONGEST_PROBLEM = 600
"""Most characters of what a RayCluster says went wrong: refusals by Pod Security list all that is wrong with a pod."""
REFUSALS = (
    (r" because it is being terminated", Reason.DELETING),
    (r"(exceeded|failed) quota: ", Reason.QUOTA_REFUSED),
    (r"violates PodSecurity ", Reason.POD_SECURITY_REFUSED),
    (r" is forbidden: | denied (the )?request: | is invalid: ", Reason.PODS_REFUSED),
)
"""How an API server that refuses a pod says who it was, the first that fits."""
_MOST_REPLICAS = 2**31 - 1
"""KubeRay's default."""
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def job_view(raw: Object, before: JobView | None = None) -> JobView:
    """An RLJob. A spec that doesn't pass our own rules (an old object, a loose server) comes with its problems.

    With an earlier view of it nothing is read again that hasn't changed: most changes are our own, of the status.
    """
    metadata = raw.get("metadata", {})
    spec, labels = raw.get("spec", {}), metadata.get("labels") or {}
    # Of annotations only Kueue's are anything to a job; one alone may hold a whole manifest.
    given = metadata.get("annotations") or {}
    annotations = {name: value for name, value in given.items() if name.startswith(names.OF_KUEUE)}
    said = (metadata.get("uid"), spec, labels, annotations)
    if before is not None and (before.uid, before.document, before.labels, before.annotations) == said:
        return replace(
            before,
            generation=int(metadata.get("generation", 0)),
            version=str(metadata.get("resourceVersion", "")),
            status=JobStatus.read(raw.get("status", {})),
            deleting="deletionTimestamp" in metadata,
            finalizers=tuple(metadata.get("finalizers") or ()),
        )
    kept = {name: metadata[name] for name in ("name", "namespace", "labels") if metadata.get(name)}
    if annotations:
        kept["annotations"] = annotations
    job, violations = check({"apiVersion": API_VERSION, "kind": KIND, "metadata": kept, "spec": spec})
    good = job if not violations else None
    return JobView(
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        generation=int(metadata.get("generation", 0)),
        version=str(metadata.get("resourceVersion", "")),
        created=parse_time(metadata.get("creationTimestamp")) or _LONG_AGO,
        document=spec,
        labels=labels,
        annotations=annotations,
        fingerprint=spec_hash(good.spec) if good is not None else "",
        job=resolve(good) if good is not None else None,
        problems=tuple(str(violation) for violation in violations),
        status=JobStatus.read(raw.get("status", {})),
        deleting="deletionTimestamp" in metadata,
        finalizers=tuple(metadata.get("finalizers") or ()),
    )


def cluster_view(raw: Object) -> ClusterView:
    """A RayCluster."""
    metadata, spec, status = raw.get("metadata", {}), raw.get("spec", {}), raw.get("status", {})
    annotations = metadata.get("annotations", {})
    groups = enumerate(spec.get("workerGroupSpecs") or ())
    return ClusterView(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        incarnation=_number(annotations.get(names.INCARNATION_ANNOTATION), 0),
        generation=_number(annotations.get(names.GENERATION_ANNOTATION), 0),
        spec_hash=str(annotations.get(names.SPEC_HASH_ANNOTATION, "")),
        attempt=_number(annotations.get(names.ATTEMPT_ANNOTATION), 0),
        attempt_head=str(annotations.get(names.ATTEMPT_HEAD_ANNOTATION, "")),
        version=str(metadata.get("resourceVersion", "")),
        token_key=str(annotations.get(names.TOKEN_KEY_ANNOTATION, "")),
        priority=metadata.get("labels", {}).get(names.PRIORITY_LABEL),
        first_crash=parse_time(annotations.get(names.FIRST_CRASH_ANNOTATION)),
        groups=tuple(_group(index, group) for index, group in groups),
        suspended=bool(spec.get("suspend", False)),
        deleting="deletionTimestamp" in metadata,
        **_cluster_problem(status),
    )


def trimmed_job(raw: Object) -> dict[str, Any]:
    """A job without the record of who wrote which field, which is as long as the job itself."""
    metadata = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
    return {**raw, "metadata": metadata}


def trimmed_cluster(raw: Object) -> dict[str, Any]:
    """A RayCluster without what `cluster_view` doesn't read: its pod templates above all."""
    metadata, spec, status = raw.get("metadata", {}), raw.get("spec", {}), raw.get("status", {})
    kept = ("name", "namespace", "uid", "labels", "annotations", "resourceVersion", "deletionTimestamp")
    sizes = ("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "suspend", "scaleStrategy")
    groups = [{name: group[name] for name in sizes if name in group} for group in spec.get("workerGroupSpecs") or ()]
    return {
        "metadata": {name: metadata[name] for name in kept if name in metadata},
        "spec": {"suspend": spec.get("suspend", False), "workerGroupSpecs": groups},
        "status": {name: status[name] for name in ("conditions",) if name in status},
    }


def _group(index: int, raw: Object) -> GroupView:
    strategy = raw.get("scaleStrategy") or {}
    return GroupView(
        index=index,
        name=str(raw.get("groupName", "")),
        replicas=int(raw.get("replicas", 0)),
        most=int(raw.get("maxReplicas", _MOST_REPLICAS)),
        least=int(raw.get("minReplicas", 0)),
        hosts=int(raw.get("numOfHosts", 1)),
        suspended=bool(raw.get("suspend", False)),
        removing=tuple(strategy.get("workersToDelete") or ()),
    )


def _cluster_problem(status: Object) -> dict[str, Any]:
    """The fields of a ClusterView that say what KubeRay says is wrong; none, if nothing is."""
    for item in status.get("conditions") or ():
        if item.get("type") != "ReplicaFailure" or item.get("status") != "True":
            continue
        # KubeRay repeats the reason as the message's first line.
        reason = str(item.get("reason", ""))
        said = clean(str(item.get("message", "")).removeprefix(f"{reason}\n"))
        refused = next((found for words, found in REFUSALS if re.search(words, said)), None)
        return {
            "problem": f"{reason}: {said}"[:LONGEST_PROBLEM],
            "problem_since": parse_time(item.get("lastTransitionTime")),
            "refused": refused if reason.startswith("FailedCreate") else None,
        }
    return {}


def pod_view(raw: Object) -> PodView:
    """A pod of a job."""
    metadata, status = raw.get("metadata", {}), raw.get("status", {})
    labels = metadata.get("labels", {})
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    ended = status.get("phase") in ("Failed", "Succeeded")
    ready = conditions.get("Ready", {}).get("status") == "True" and not ended
    trouble, message, container = (
        (None, "", "") if ready else _trouble(metadata, raw.get("spec", {}), status, conditions)
    )
    head = labels.get(names.RAY_NODE_TYPE_LABEL) == "head"
    target = conditions.get("DisruptionTarget", {})
    target = target if target.get("status") == "True" else {}
    return PodView(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        cluster=str(labels.get(names.RAY_CLUSTER_LABEL, "")),
        group=names.HEAD_ROLE if head else str(labels.get(names.RAY_GROUP_LABEL, "")),
        ready=ready,
        created=parse_time(metadata.get("creationTimestamp")) or _LONG_AGO,
        ended=ended,
        trouble=trouble,
        message=message[:LONGEST_POD_MESSAGE],
        container=container,
        disrupted=bool(target) or status.get("reason") in DISRUPTIONS,
        disruption=str(target.get("reason", "")),
        scheduler=_silent_scheduler(raw.get("spec", {}), status, conditions),
        replica=str(labels.get("ray.io/worker-group-replica-name", "")),
        deleting_since=parse_time(metadata.get("deletionTimestamp")),
    )


def claim_view(raw: Object) -> ClaimView:
    """A PersistentVolumeClaim."""
    metadata, spec, status = raw.get("metadata", {}), raw.get("spec", {}), raw.get("status", {})
    modes = status.get("accessModes") or spec.get("accessModes") or ()
    return ClaimView(
        name=str(metadata.get("name", "")),
        phase=str(status.get("phase", "Pending")),
        modes=tuple(str(mode) for mode in modes),
        storage_class=str(spec.get("storageClassName") or ""),
        deleting="deletionTimestamp" in metadata,
    )


def workload_view(raw: Object) -> WorkloadView:
    """A Workload of Kueue's."""
    metadata, spec, status = raw.get("metadata", {}), raw.get("spec", {}), raw.get("status", {})
    conditions = [item for item in status.get("conditions") or () if item.get("type")]
    checks = [item for item in status.get("admissionChecks") or () if item.get("state") != "Ready"]
    return WorkloadView(
        name=str(metadata.get("name", "")),
        created=parse_time(metadata.get("creationTimestamp")) or _LONG_AGO,
        true=frozenset(str(item["type"]) for item in conditions if item.get("status") == "True"),
        messages={str(item["type"]): clean(str(item.get("message", ""))) for item in conditions},
        active=spec.get("active") is not False,
        checks=tuple(clean(f"{item.get('name', '')}: {item.get('message') or item.get('state')}") for item in checks),
    )


def workload_owner(raw: Object) -> str:
    """UID of the RayCluster that a Workload was made for; empty if it was made for something else."""
    owners = raw.get("metadata", {}).get("ownerReferences") or ()
    mine = [str(item.get("uid")) for item in owners if item.get("kind") == "RayCluster" and item.get("controller")]
    return mine[0] if mine else ""


def trimmed_workload(raw: Object) -> dict[str, Any]:
    """A Workload without what `workload_view` doesn't read: it repeats all pod templates."""
    metadata, spec, status = raw.get("metadata", {}), raw.get("spec", {}), raw.get("status", {})
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "ownerReferences")
    return {
        "metadata": {name: metadata[name] for name in kept if name in metadata},
        "spec": {name: spec[name] for name in ("active",) if name in spec},
        "status": {name: status[name] for name in ("conditions", "admissionChecks") if name in status},
    }


def _silent_scheduler(spec: Object, status: Object, conditions: Mapping[Any, Object]) -> str:
    """The scheduler of a pod that no scheduler has looked at; empty, if one has."""
    if spec.get("nodeName") or "PodScheduled" in conditions or status.get("phase", "Pending") != "Pending":
        return ""
    return str(spec.get("schedulerName", ""))


def _trouble(
    metadata: Object, spec: Object, status: Object, conditions: Mapping[Any, Object]
) -> tuple[Trouble | None, str, str]:
    """Why a pod isn't ready, as far as Kubernetes says: what kind of trouble, in words, and which container ended."""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        if scheduled.get("reason") == "SchedulingGated":
            gates = ", ".join(str(gate.get("name", "")) for gate in spec.get("schedulingGates") or ())
            return "gated", f"{metadata.get('name', '')} waits for its scheduling gates {gates} to be removed", ""
        return "unschedulable", str(scheduled.get("message") or scheduled.get("reason", "")), ""
    for container in _containers(status):
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        before = (container.get("lastState") or {}).get("terminated") or {}
        reason = waiting.get("reason", "")
        if reason in IMAGE_TROUBLE:
            return "image", f"{reason}: {waiting.get('message', '')}".strip(": "), ""
        if reason in CRASH_TROUBLE:
            why = f" (last time {before.get('reason')}, exit code {before.get('exitCode')})" if before else ""
            return "crash", f"{reason}: {waiting.get('message', '')}".strip(": ") + why, ""
        if ended and ended.get("exitCode"):
            code = f"{ended.get('reason', 'Error')}, exit code {ended['exitCode']}"
            return "crash", code, str(container.get("name", ""))
    if status.get("phase") == "Failed":
        return "crash", f"{status.get('reason', 'Failed')}: {status.get('message', '')}".strip(": "), ""
    return None, "", ""


def _containers(status: Object) -> Iterable[Object]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def trimmed_claim(raw: Object) -> dict[str, Any]:
    """A claim without what `claim_view` doesn't read: those of everybody are held in memory."""
    metadata, spec, status = raw.get("metadata", {}), raw.get("spec", {}), raw.get("status", {})
    kept = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
    return {
        "metadata": {name: metadata[name] for name in kept if name in metadata},
        "spec": {name: spec[name] for name in ("accessModes", "storageClassName") if name in spec},
        "status": {name: status[name] for name in ("accessModes", "phase") if name in status},
    }


def trimmed_pod(raw: Object) -> dict[str, Any]:
    """A pod without what `pod_view` doesn't read; thousands are held in memory."""
    metadata, spec, status = raw.get("metadata", {}), raw.get("spec", {}), raw.get("status", {})
    kept = ("name", "namespace", "uid", "labels", "resourceVersion", "creationTimestamp", "deletionTimestamp")
    said = ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses")
    placed = ("nodeName", "schedulerName", "schedulingGates")
    return {
        "metadata": {name: metadata[name] for name in kept if name in metadata},
        "spec": {name: spec[name] for name in placed if name in spec},
        "status": {name: status[name] for name in said if name in status},
    }


def _number(text: object, default: int) -> int:
    """The number that an annotation of ours holds, of nine digits at most; ``default`` for what somebody else wrote."""
    return int(text) if isinstance(text, str) and re.fullmatch("[0-9]{1,9}", text) else default
