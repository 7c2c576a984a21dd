"""Pod templates of head and pools, made from the typed pool settings of the job file.

Pure: a resolved job in, plain data out. KubeRay adds Ray's command, probes and environment to the first container.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from rljob_api import ResolvedJob
from rljob_api.cluster import CONTAINER_SECURITY, POD_SECURITY, RAY_ENVIRONMENT, TERMINATION_SECONDS
from rljob_api.rules.pods import is_reserved
from rljob_api.spec.pod import Pod
from rljob_api.status import DRIVER_PORT
from rljob_operator import merging, names
from rljob_operator.pools import Role
from rljob_operator.quantities import share_in_mebibytes
from rljob_operator.settings import Settings
from rljob_operator.storage import claims

CONTAINER = "ray"
SHARED_MEMORY_SHARE = Fraction(3, 10)
NODE_LOSS_TOLERATION_SECONDS = 30
HEAD_PORTS = {
    "gcs-server": 6379,
    "dashboard": names.DASHBOARD_PORT,
    "client": 10001,
    "metrics": 8080,
    "driver": DRIVER_PORT,
}


def template(job: ResolvedJob, role: Role, tokens: str, settings: Settings) -> dict[str, Any]:
    """The pod template of a role. `tokens`: the name of the Secret with its cluster's tokens."""
    pod = role.pod
    volumes, mounts = _storage(job, role, tokens)
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        # With Never KubeRay replaces a crashed pod as a whole; with Always the kubelet would restart Ray in place, and
        # a head that has forgotten everything would look like the old one.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": TERMINATION_SECONDS,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "tolerations": [*(_toleration(item) for item in pod.tolerations), *_node_loss(pod)],
        "containers": [_container(job, role, mounts, settings)],
        "volumes": [*volumes, *pod.volumes],
    }
    optional = {
        "nodeSelector": dict(pod.node_selector),
        "affinity": dict(pod.affinity),
        "topologySpreadConstraints": [dict(item) for item in pod.topology_spread_constraints],
        "priorityClassName": pod.priority_class_name,
        "runtimeClassName": pod.runtime_class_name,
        "serviceAccountName": pod.service_account_name,
        "imagePullSecrets": [item.document() for item in pod.image_pull_secrets],
    }
    spec |= {name: value for name, value in optional.items() if value}
    annotations = dict(pod.annotations)
    if pod.topology is not None:
        annotations[f"kueue.x-k8s.io/podset-{pod.topology.mode}-topology"] = pod.topology.level
    # The job's own labels may be orders too, but to Kueue or us about the job, not about each of its pods.
    labels = {name: value for name, value in job.metadata.labels.items() if not is_reserved(name)} | dict(pod.labels)
    ours = {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}
    merged = merging.merge(ours, pod.template)
    # What finds the pods again is ours, whatever the template says.
    merged["metadata"]["labels"] = {**merged["metadata"]["labels"], **own_labels(job.metadata.name, role.name)}
    return merged


def own_labels(job: str, role: str) -> dict[str, str]:
    """Labels by which a job's pods are found."""
    return {
        "app.kubernetes.io/name": "rljob",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": "rljob-operator",
        names.JOB_LABEL: job,
        names.ROLE_LABEL: role,
    }


def _container(job: ResolvedJob, role: Role, mounts: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    pod = role.pod
    requests, limits = dict(pod.resources.requests), dict(pod.resources.limits)
    if role.gpus_per_pod:
        # KubeRay counts GPUs from limits only.
        limits[pod.gpu_resource] = str(role.gpus_per_pod)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": job.spec.image or settings.default_image,
        "env": _environment(job, role),
        "resources": {name: value for name, value in (("requests", requests), ("limits", limits)) if value},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [*mounts, *(item.document() for item in pod.volume_mounts)],
    }
    if role.name == names.HEAD_ROLE:
        container["ports"] = [{"name": name, "containerPort": port} for name, port in HEAD_PORTS.items()]
    return container


def _environment(job: ResolvedJob, role: Role) -> list[dict[str, Any]]:
    theirs = [item.document() for item in role.pod.env]
    theirs += [{"name": name, "value": value} for name, value in role.env.items()]
    ours = {
        "RLJOB_NAME": job.metadata.name,
        "RLJOB_ROLE": role.name,
        **RAY_ENVIRONMENT,
    }
    folders = [f"{names.CODE_FOLDER}/{index}" for index in range(len(job.spec.code))]
    paths = [item["value"] for item in theirs if item["name"] == "PYTHONPATH" and item.get("value")]
    if folders:
        ours["PYTHONPATH"] = ":".join([*folders, *paths])
        theirs = [item for item in theirs if item["name"] != "PYTHONPATH"]
    return [*({"name": name, "value": value} for name, value in ours.items()), *theirs]


def _storage(job: ResolvedJob, role: Role, tokens: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts that rljob itself brings: shared memory, the job file, tokens, code, storage."""
    memory: dict[str, Any] = {"medium": "Memory"}
    limit = role.pod.resources.limits.get("memory")
    size = role.pod.shared_memory or (share_in_mebibytes(limit, SHARED_MEMORY_SHARE) if limit else None)
    if size:
        memory["sizeLimit"] = size
    # Without a mount of ours KubeRay gives /dev/shm the whole memory limit, and tmpfs counts against it.
    volumes: list[dict[str, Any]] = [{"name": "rljob-shm", "emptyDir": memory}]
    mounts: list[dict[str, Any]] = [{"name": "rljob-shm", "mountPath": "/dev/shm"}]

    volumes.append({"name": "rljob-job", "configMap": {"name": names.config_map(job.metadata.name)}})
    mounts.append({"name": "rljob-job", "mountPath": names.JOB_FOLDER, "readOnly": True})

    if role.name == names.HEAD_ROLE:
        key = {"key": names.DRIVER_TOKEN_KEY, "path": names.DRIVER_TOKEN_KEY}
        volumes.append({"name": "rljob-tokens", "secret": {"secretName": tokens, "items": [key], "defaultMode": 0o444}})
        mounts.append({"name": "rljob-tokens", "mountPath": names.TOKEN_FOLDER, "readOnly": True})

    for index, code in enumerate(job.spec.code):
        name = f"rljob-code-{index}"
        mount: dict[str, Any] = {"name": name, "mountPath": f"{names.CODE_FOLDER}/{index}", "readOnly": True}
        if code.config_map is not None:
            volumes.append({"name": name, "configMap": {"name": code.config_map}})
        else:
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": code.pvc, "readOnly": True}})
            if code.path:
                mount["subPath"] = code.path
        mounts.append(mount)

    for index, claim in enumerate(claims(job)):
        read_only = not claim.written
        name = f"rljob-claim-{index}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim.name, "readOnly": read_only}})
        mounts.append({"name": name, "mountPath": f"{names.STORAGE_FOLDER}/{claim.name}", "readOnly": read_only})
    return volumes, mounts


def _toleration(item: Any) -> dict[str, Any]:
    # The document leaves defaults out, but an empty toleration would mean something else.
    return {**item.document(), "operator": item.operator}


def _node_loss(pod: Pod) -> Iterable[dict[str, Any]]:
    """Give up a lost node after half a minute, not Kubernetes' five minutes, unless the job says otherwise."""
    said = {item.key for item in pod.tolerations}
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if key not in said:
            yield {
                "key": key,
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": NODE_LOSS_TOLERATION_SECONDS,
            }
