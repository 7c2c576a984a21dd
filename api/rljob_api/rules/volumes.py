"""Rules about the volumes of a pod and where they are mounted, by the pod settings or by a template."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.cluster import CODE_FOLDER, STORAGE_FOLDER
from rljob_api.rules.cel import PODS, Cel, among, one_of, text
from rljob_api.rules.registry import Job, rule
from rljob_api.rules.templates import as_map, maps_in, templates
from rljob_api.violations import Violation

RESERVED_MOUNTS = (
    *("/dev/shm", "/tmp/ray", "/etc/rljob", "/var/run/secrets"),
    # spec.code, pvc:// locations, and what /var/run/secrets is in most images.
    *(CODE_FOLDER, STORAGE_FOLDER, "/run/secrets"),
)


NOT_PLAIN = r"^[^/]|^/?$|//|/\.\.?(/|$)"
"""Finds paths that are not absolute, are the root, or have empty, `.` or `..` parts: /dev/./shm is /dev/shm too."""
RESERVED_VOLUMES = ("shared-mem", "ray-logs")
OWN_VOLUMES = "rljob-"
"""What the names of our volumes begin with."""
API_SIGNER = "kubernetes.io/kube-apiserver-client-pod"
"""The signer of certificates by which a pod is known to the API server."""


@rule(
    cel=[
        Cel(
            (*pod, "volumes", "[]"),
            f"!self.name.startsWith({text(OWN_VOLUMES)}) && !({among('self.name', RESERVED_VOLUMES)})",
            "is a name used by rljob; choose another",
            ".name",
        )
        for pod in PODS
    ]
)
def volumes_have_names(job: Job) -> Iterator[Violation]:
    for path, pod in job.pods:
        seen: set[str] = set()
        for index, volume in enumerate(pod.volumes):
            where, name = f"{path}.volumes[{index}].name", volume.get("name")
            if not isinstance(name, str) or not name:
                yield Violation(where, "is required", "give the volume a name")
            elif name in seen:
                yield Violation(
                    f"{path}.volumes[{index}]", f'"{name}" is listed twice', "give each volume its own name"
                )
            else:
                yield from _reserved_name(where, name)
            seen.add(str(name))


@rule(not_in_cel="the content of the template is hidden from CEL")
def template_volumes_have_own_names(job: Job) -> Iterator[Violation]:
    for template in templates(job):
        for path, volume in template.volumes:
            if isinstance(name := volume.get("name"), str):
                yield from _reserved_name(f"{path}.name", name)


def _reserved_name(path: str, name: str) -> Iterator[Violation]:
    if name.startswith(OWN_VOLUMES) or name in RESERVED_VOLUMES:
        yield Violation(path, f'"{name}" is a name used by rljob', "choose another")


@rule(not_in_cel="the content of volumes is hidden from CEL")
def volumes_hold_no_credentials(job: Job) -> Iterator[Violation]:
    # A job's code is anybody's. Whatever a Secret holds is the author's to know, who may read it anyway.
    for template, (where, pod) in zip(templates(job), job.pods, strict=True):
        for path, volume in [*maps_in(f"{where}.volumes", list(pod.volumes)), *template.volumes]:
            sources = as_map(volume.get("projected")).get("sources")
            for place, source in maps_in(f"{path}.projected.sources", sources):
                if "serviceAccountToken" in source:
                    yield Violation(
                        f"{place}.serviceAccountToken",
                        "training pods get no Kubernetes credentials",
                        "remove it; a cloud's own webhook adds its tokens to pods with pod.serviceAccountName",
                    )
                if as_map(source.get("podCertificate")).get("signerName") == API_SIGNER:
                    yield Violation(
                        f"{place}.podCertificate.signerName",
                        "training pods get no Kubernetes credentials",
                        "use another signer",
                    )


@rule(not_in_cel="the content of volumes is hidden from CEL")
def mounts_have_volumes(job: Job) -> Iterator[Violation]:
    for template, (path, pod) in zip(templates(job), job.pods, strict=True):
        volumes = [*pod.volumes, *(volume for _, volume in template.volumes)]
        known = {name for volume in volumes if isinstance(name := volume.get("name"), str)}
        for index, mount in enumerate(pod.volume_mounts):
            if mount.name not in known:
                yield Violation(
                    f"{path}.volumeMounts[{index}].name",
                    f'there is no volume "{mount.name}"',
                    f"add it to {path}.volumes",
                )


@rule(
    cel=[
        *(
            Cel(
                (*pod, "volumeMounts", "[]"),
                f"{one_of(RESERVED_MOUNTS)}.all(p, self.mountPath != p && !self.mountPath.startsWith(p + '/'))",
                "is used by rljob or Ray; use another path (for /dev/shm: pod.sharedMemory)",
                ".mountPath",
            )
            for pod in PODS
        ),
        *(
            Cel(
                pod,
                # Equal paths are refused as equal keys of the list; comparing paths takes most of what CEL may cost.
                "!has(self.volumeMounts) || !self.volumeMounts.exists(m, "
                "m.mountPath.endsWith('/') && self.volumeMounts.exists(n, n.mountPath + '/' == m.mountPath))",
                "two volumes are mounted at the same path; use another path",
                ".volumeMounts",
            )
            for pod in PODS
        ),
    ]
)
def mount_paths_are_free(job: Job) -> Iterator[Violation]:
    for path, pod in job.pods:
        seen: set[str] = set()
        for index, mount in enumerate(pod.volume_mounts):
            where, target = f"{path}.volumeMounts[{index}].mountPath", mount.mount_path.rstrip("/")
            if target in seen:
                yield Violation(
                    f"{path}.volumeMounts[{index}]", f'"{mount.mount_path}" is used twice', "use another path"
                )
            else:
                yield from _reserved_path(where, mount.mount_path)
            seen.add(target)


@rule(
    cel=[
        Cel(
            (*pod, "volumeMounts", "[]"),
            f"!self.mountPath.matches({text(NOT_PLAIN)})",
            "is not a plain absolute path; write it without empty, . and .. parts",
            ".mountPath",
        )
        for pod in PODS
    ]
)
def mount_paths_are_plain(job: Job) -> Iterator[Violation]:
    for path, pod in job.pods:
        for index, mount in enumerate(pod.volume_mounts):
            yield from _not_plain(f"{path}.volumeMounts[{index}].mountPath", mount.mount_path)


@rule(not_in_cel="the content of the template is hidden from CEL")
def template_mount_paths_are_plain(job: Job) -> Iterator[Violation]:
    for path, mount_path in _template_paths(job):
        yield from _not_plain(path, mount_path)


@rule(not_in_cel="the content of the template is hidden from CEL")
def template_mounts_leave_ours_alone(job: Job) -> Iterator[Violation]:
    for path, mount_path in _template_paths(job):
        yield from _reserved_path(path, mount_path)
    for template in templates(job):
        # Of sidecars too: the tokens are Ray's and the driver's. A sidecar brings its own volume of the same claim.
        for where, container in template.containers:
            for path, mount in maps_in(f"{where}.volumeMounts", container.get("volumeMounts")):
                name = mount.get("name")
                if isinstance(name, str) and name.startswith(OWN_VOLUMES):
                    yield Violation(f"{path}.name", f'"{name}" is one of rljob\'s own volumes', "mount one of your own")


def _template_paths(job: Job) -> Iterator[tuple[str, str]]:
    """Where templates mount something in Ray's container. What sidecars see where is their own affair."""
    for template in templates(job):
        for where, container in template.ray:
            for path, mount in maps_in(f"{where}.volumeMounts", container.get("volumeMounts")):
                if isinstance(mount_path := mount.get("mountPath"), str):
                    yield f"{path}.mountPath", mount_path


def _reserved_path(where: str, path: str) -> Iterator[Violation]:
    target = path.rstrip("/")
    if any(target == taken or target.startswith(taken + "/") for taken in RESERVED_MOUNTS):
        remedy = "set pod.sharedMemory instead" if target == "/dev/shm" else "use another path"
        yield Violation(where, f'"{path}" is used by rljob or Ray', remedy)


def _not_plain(where: str, path: str) -> Iterator[Violation]:
    if re.search(NOT_PLAIN.replace("$", r"\Z"), path):
        yield Violation(where, f'"{path}" is not a plain absolute path', "write it without empty, . and .. parts")
