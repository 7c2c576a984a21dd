"""Rules about pod settings, the head and code volumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.rules.data import exactly_one
from rljob_api.rules.registry import Job, rule
from rljob_api.spec.pod import Pod
from rljob_api.violations import Violation

RESERVED_DOMAINS = ("rljob.dev", "ray.io", "kueue.x-k8s.io")
RESERVED_MOUNTS = ("/dev/shm", "/tmp/ray", "/etc/rljob", "/var/run/secrets")
RESERVED_VOLUMES = ("shared-mem", "ray-logs")
FORBIDDEN_IN_POD = (
    "restartPolicy",
    "automountServiceAccountToken",
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "initContainers",
)
FORBIDDEN_IN_CONTAINER = ("command", "args", "ports", "livenessProbe", "readinessProbe", "lifecycle")
CONTAINER = "ray"
"""Name of the container that a pod template may add to."""


def _pods(job: Job) -> list[tuple[str, Pod]]:
    spec = job.spec
    return [
        ("spec.rollout.pod", spec.rollout.pod),
        ("spec.trainer.pod", spec.trainer.pod),
        ("spec.head.pod", spec.head.pod),
    ]


@rule
def variables_have_one_value(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        for index, entry in enumerate(pod.env):
            where = f"{path}.env[{index}]"
            if entry.value is not None and entry.value_from is not None:
                yield Violation(where, "has value and valueFrom, of which only one can be", "keep one of them")
            if entry.value_from is not None:
                sources = dict(entry.value_from)
                names = ("secretKeyRef", "configMapKeyRef", "fieldRef")
                yield from exactly_one(f"{where}.valueFrom", names, tuple(sources.values()))


def _repeated(path: str, names: list[str]) -> Iterator[Violation]:
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Violation(f"{path}[{index}]", f'"{name}" is there twice', "keep one of them")


@rule
def variables_differ(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        yield from _repeated(f"{path}.env", [entry.name for entry in pod.env])


@rule
def pull_secrets_differ(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        yield from _repeated(f"{path}.imagePullSecrets", [entry.name for entry in pod.image_pull_secrets])


@rule
def variables_are_set_in_one_place(job: Job) -> Iterator[Violation]:
    for pool, settings in (("rollout", job.spec.rollout), ("trainer", job.spec.trainer)):
        for index, entry in enumerate(settings.pod.env):
            if entry.name in settings.env:
                yield Violation(
                    f"spec.{pool}.pod.env[{index}].name", f"is set in spec.{pool}.env too", "keep one of them"
                )


@rule
def volumes_have_names(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        seen: set[str] = set()
        for index, volume in enumerate(pod.volumes):
            where, name = f"{path}.volumes[{index}].name", volume.get("name")
            if not isinstance(name, str) or not name:
                yield Violation(where, "is required", "give the volume a name")
            elif name in seen:
                yield Violation(where, f'"{name}" is there twice', "give each volume its own name")
            elif name.startswith("rljob-") or name in RESERVED_VOLUMES:
                yield Violation(where, f'"{name}" is a name that rljob uses', "choose another")
            seen.add(str(name))


@rule
def mounts_have_volumes(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        known = {volume.get("name") for volume in pod.volumes} | _template_volumes(pod.template)
        for index, mount in enumerate(pod.volume_mounts):
            if mount.name not in known:
                yield Violation(
                    f"{path}.volumeMounts[{index}].name",
                    f'there is no volume "{mount.name}"',
                    f"add it to {path}.volumes",
                )


def _template_volumes(template: dict[str, Any]) -> set[Any]:
    spec = template.get("spec")
    volumes = spec.get("volumes") if isinstance(spec, dict) else None
    return {volume.get("name") for volume in volumes or () if isinstance(volume, dict)}


@rule
def mount_paths_are_free(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        seen: set[str] = set()
        for index, mount in enumerate(pod.volume_mounts):
            where, target = f"{path}.volumeMounts[{index}].mountPath", mount.mount_path.rstrip("/")
            if target in seen:
                yield Violation(
                    f"{path}.volumeMounts[{index}]", f'"{mount.mount_path}" is there twice', "use another path"
                )
            elif any(target == taken or target.startswith(taken + "/") for taken in RESERVED_MOUNTS):
                remedy = "set pod.sharedMemory instead" if target == "/dev/shm" else "use another path"
                yield Violation(where, f'"{mount.mount_path}" is used by rljob or Ray themselves', remedy)
            seen.add(target)


@rule
def tolerations_are_complete(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        for index, toleration in enumerate(pod.tolerations):
            where = f"{path}.tolerations[{index}]"
            if toleration.operator == "Exists" and toleration.value:
                yield Violation(f"{where}.value", "has no meaning with operator Exists", "remove it")
            if toleration.operator == "Equal" and not toleration.key:
                yield Violation(f"{where}.key", "is required by operator Equal", "add it, or use operator: Exists")
            if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
                yield Violation(
                    f"{where}.tolerationSeconds", "has a meaning for effect NoExecute only", "set effect: NoExecute"
                )


@rule
def gpus_are_counted_once(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        for kind, resources in (("requests", pod.resources.requests), ("limits", pod.resources.limits)):
            if pod.gpu_resource in resources:
                head = path.startswith("spec.head")
                yield Violation(
                    f"{path}.resources.{kind}[{pod.gpu_resource}]",
                    "the head uses no GPU" if head else "GPUs are counted by gpusPerReplica",
                    "remove it" if head else "set gpusPerReplica instead",
                )


@rule
def own_labels_have_own_domains(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        for kind, names in (("labels", pod.labels), ("annotations", pod.annotations)):
            for name in names:
                domain = name.partition("/")[0] if "/" in name else ""
                if any(domain == taken or domain.endswith("." + taken) for taken in RESERVED_DOMAINS):
                    yield Violation(f"{path}.{kind}[{name}]", f"{domain} is reserved", "use a domain of your own")


@rule
def templates_leave_ray_alone(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        where = f"{path}.template"
        for name in pod.template:
            if name not in ("metadata", "spec"):
                yield Violation(f"{where}.{name}", "a pod template has metadata and spec only", "move or remove it")
        spec = pod.template.get("spec", {})
        if not isinstance(spec, dict):
            yield Violation(f"{where}.spec", "must be a map", "write name: value pairs")
            continue
        for name in FORBIDDEN_IN_POD:
            if name in spec:
                yield Violation(f"{where}.spec.{name}", "is set by rljob itself", "remove it")
        containers = spec.get("containers", [])
        for index, container in enumerate(containers if isinstance(containers, list) else []):
            if isinstance(container, dict) and container.get("name") == CONTAINER:
                for name in FORBIDDEN_IN_CONTAINER:
                    if name in container:
                        yield Violation(
                            f"{where}.spec.containers[{index}].{name}", "is set by rljob itself", "remove it"
                        )


@rule
def topology_needs_a_queue(job: Job) -> Iterator[Violation]:
    for path, pod in _pods(job):
        if pod.topology is not None and job.spec.queue_name is None:
            yield Violation(
                f"{path}.topology", "is Kueue's, but the job has no queue", "set spec.queueName, or use affinity"
            )


@rule
def code_has_one_origin(job: Job) -> Iterator[Violation]:
    for index, code in enumerate(job.spec.code):
        path = f"spec.code[{index}]"
        yield from exactly_one(path, ("configMap", "pvc"), (code.config_map, code.pvc))
        if code.path is not None and code.pvc is None:
            yield Violation(f"{path}.path", "has a meaning for pvc only", "remove it")


@rule
def code_is_mounted_once(job: Job) -> Iterator[Violation]:
    seen = set()
    for index, code in enumerate(job.spec.code):
        key = (code.config_map, code.pvc, code.path)
        if key in seen:
            yield Violation(f"spec.code[{index}]", "is there twice", "keep one of them")
        seen.add(key)
