"""Rules about pod.template: it says of a pod what the job file has no field for, and nothing of what makes the pod part
of the job's cluster.

The operator lays it over the pod that it makes: maps by key, containers, volumes and variables by name, mounts by path.
So whatever these rules let through wins. Its volumes and mounts are judged in ``volumes``. What a pod may do to its
node (hostPath, privileges) is not judged here but in ``pod_policy``, since an installation may allow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api.problems import shown
from rljob_api.rules.pods import names_in_reserved_domains
from rljob_api.rules.registry import Job, rule
from rljob_api.rules.variables import reserved_variable
from rljob_api.spec.pod import Pod
from rljob_api.violations import Violation

CONTAINER = "ray"
"""Name of the container that a template may add to; other names are sidecars."""
METADATA = ("labels", "annotations")
KEYED = {"containers": "name", "volumes": "name", "imagePullSecrets": "name"}
"""Lists of the pod that are merged item by item, and by what."""
KEYED_IN_CONTAINER = {"env": "name", "volumeMounts": "mountPath"}
OURS = ("is set by rljob itself", "remove it")
IN_POD: Mapping[str, tuple[str, str]] = {
    "restartPolicy": OURS,
    "automountServiceAccountToken": OURS,
    "hostNetwork": OURS,
    "hostPID": OURS,
    "hostIPC": OURS,
    "initContainers": OURS,
    # Process 1 would be no longer Ray's, whose output the driver writes to, and a sidecar could read the head's tokens.
    "shareProcessNamespace": ("would merge the process namespaces of all containers", "remove it"),
    # Neither taints, Kueue nor the room on the node would count: KubeRay would replace refused pods without end.
    "nodeName": ("bypasses the scheduler", "use pod.nodeSelector, for example with kubernetes.io/hostname"),
    "ephemeralContainers": ("can only be added to running pods", "use kubectl debug"),
}
IN_CONTAINER = (
    *("command", "args", "ports", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe"),
    # Ray restarted in place would be a head that has forgotten everything, as with the pod's restartPolicy.
    *("restartPolicy", "restartPolicyRules"),
)


@dataclass(frozen=True)
class PodTemplate:
    """A template as far as it has the right shape; ``templates_are_well_formed`` names the rest."""

    path: str
    pod: Pod

    @property
    def metadata(self) -> dict[str, Any]:
        return as_map(self.pod.template.get("metadata"))

    @property
    def spec(self) -> dict[str, Any]:
        return as_map(self.pod.template.get("spec"))

    @property
    def volumes(self) -> list[tuple[str, dict[str, Any]]]:
        """The template's volumes, each with its path in the job file."""
        return maps_in(f"{self.path}.spec.volumes", self.spec.get("volumes"))

    @property
    def containers(self) -> list[tuple[str, dict[str, Any]]]:
        return maps_in(f"{self.path}.spec.containers", self.spec.get("containers"))

    @property
    def ray(self) -> list[tuple[str, dict[str, Any]]]:
        """The container that Ray runs in."""
        return [(path, container) for path, container in self.containers if container.get("name") == CONTAINER]


def as_map(value: Any) -> dict[str, Any]:
    """The value if it is a map, else an empty one."""
    return value if isinstance(value, dict) else {}


def maps_in(path: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """The maps in a list, with their paths; none if it is no list."""
    items = value if isinstance(value, list) else []
    return [(f"{path}[{index}]", item) for index, item in enumerate(items) if isinstance(item, dict)]


def templates(job: Job) -> list[PodTemplate]:
    return [PodTemplate(f"{path}.template", pod) for path, pod in job.pods]


@rule(not_in_cel="the content of the template is hidden from CEL")
def templates_are_well_formed(job: Job) -> Iterator[Violation]:
    # What has another shape would take the place of ours, or be left out without a word, or end the operator's look.
    for template in templates(job):
        path, content = template.path, template.pod.template
        yield from _unknown(path, content, ("metadata", "spec"), "a pod template")
        yield from _not_maps(path, content, ("metadata", "spec"))
        yield from _unknown(f"{path}.metadata", template.metadata, METADATA, "metadata of a pod template")
        yield from _not_maps(f"{path}.metadata", template.metadata, METADATA)
        yield from _not_lists(f"{path}.spec", template.spec, {**KEYED, "tolerations": None})
        for where, container in template.containers:
            name = container.get("name")
            if isinstance(name, str) and name not in ("", CONTAINER) and not container.get("image"):
                problem = (
                    f'is required: "{name}" is a sidecar, since the container that Ray runs in is named {CONTAINER}'
                )
                yield Violation(f"{where}.image", problem, f"add it, or name the container {CONTAINER}")
            yield from _not_lists(where, container, KEYED_IN_CONTAINER)
            yield from _not_maps(where, container, ("resources",))
            resources = as_map(container.get("resources"))
            yield from _not_maps(f"{where}.resources", resources, ("requests", "limits"))


def _unknown(path: str, content: Mapping[str, Any], known: tuple[str, ...], whole: str) -> Iterator[Violation]:
    for name in content:
        if name not in known:
            yield Violation(f"{path}.{name}", f"{whole} can only have {' and '.join(known)}", "move or remove it")


def _not_maps(path: str, content: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[Violation]:
    for name in names:
        if name in content and not isinstance(content[name], dict):
            yield Violation(f"{path}.{name}", f"must be a map, not {shown(content[name])}", "write name: value pairs")


def _not_lists(path: str, content: Mapping[str, Any], keys: Mapping[str, str | None]) -> Iterator[Violation]:
    for name, key in keys.items():
        value = content.get(name)
        if name in content and not isinstance(value, list):
            yield Violation(f"{path}.{name}", f"must be a list, not {shown(value)}", "start each item with '- '")
        elif isinstance(value, list) and key is not None:
            yield from _not_keyed(f"{path}.{name}", value, key)


def _not_keyed(path: str, items: list[Any], key: str) -> Iterator[Violation]:
    seen: set[str] = set()
    for index, item in enumerate(items):
        value = as_map(item).get(key)
        if not isinstance(value, str) or not value:
            yield Violation(f"{path}[{index}]", f"must be a map with a string as its {key}", f"give it a {key}")
        elif value in seen:
            yield Violation(f"{path}[{index}]", f'"{value}" is listed twice', "keep one of them")
        else:
            seen.add(value)


@rule(not_in_cel="the content of the template is hidden from CEL")
def templates_leave_ray_alone(job: Job) -> Iterator[Violation]:
    for template in templates(job):
        for name, (problem, remedy) in IN_POD.items():
            if name in template.spec:
                yield Violation(f"{template.path}.spec.{name}", problem, remedy)
        for path, container in template.ray:
            for name in IN_CONTAINER:
                if name in container:
                    yield Violation(f"{path}.{name}", *OURS)


@rule(not_in_cel="the content of the template is hidden from CEL")
def template_variables_leave_ours_alone(job: Job) -> Iterator[Violation]:
    for template in templates(job):
        for where, container in template.ray:
            for path, variable in maps_in(f"{where}.env", container.get("env")):
                name = variable.get("name")
                if not isinstance(name, str):
                    continue
                yield from reserved_variable(f"{path}.name", name)
                if name == "PYTHONPATH" and job.spec.code:
                    yield Violation(
                        f"{path}.name", "would hide spec.code", "set it in pod.env, which places it after spec.code"
                    )


@rule(not_in_cel="the content of the template is hidden from CEL")
def template_labels_have_own_domains(job: Job) -> Iterator[Violation]:
    for template in templates(job):
        for kind in METADATA:
            names = as_map(template.metadata.get(kind))
            yield from names_in_reserved_domains(f"{template.path}.metadata.{kind}", names)


@rule(not_in_cel="the content of the template is hidden from CEL")
def template_gpus_are_counted_once(job: Job) -> Iterator[Violation]:
    for template in templates(job):
        name = template.pod.gpu_resource
        for path, container in template.ray:
            for kind in ("requests", "limits"):
                if name in as_map(as_map(container.get("resources")).get(kind)):
                    head = template.path.startswith("spec.head")
                    yield Violation(
                        f"{path}.resources.{kind}[{name}]",
                        "the head uses no GPU" if head else "gpusPerReplica sets the number of GPUs",
                        "remove it" if head else "set gpusPerReplica instead",
                    )
