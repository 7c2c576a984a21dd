"""Where volumes appear in a container."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.pod_template.located import Located
from rljob_api.pod_template.paths import descending, without_backsteps
from rljob_api.pod_template.registry import PodSeen, of, required
from rljob_api.violations import Violation


@of("Container")
def mounts_are_sound(container: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateVolumeMounts."""
    security = container.get("securityContext")
    privileged = security is not None and security.flag("privileged") is True
    for mount in container.items("volumeMounts"):
        yield from required(mount, "name", "mountPath")
        yield from _has_a_volume(mount, mount.text("name"), pod)
        sub_path, expression = mount.text("subPath"), mount.text("subPathExpr")
        if sub_path and expression:
            yield Violation(mount.at("subPathExpr"), "cannot be combined with subPath", "keep one of them")
        yield from descending(mount.at("subPath"), sub_path)
        yield from descending(mount.at("subPathExpr"), expression)
        propagation = mount.text("mountPropagation")
        if mount.get("mountPropagation") is not None:
            if propagation not in ("None", "HostToContainer", "Bidirectional"):
                problem = f'"{propagation}" is not one of None, HostToContainer, Bidirectional'
                yield Violation(mount.at("mountPropagation"), problem, "choose one of them")
            elif propagation == "Bidirectional" and not privileged:
                yield Violation(mount.at("mountPropagation"), "needs a privileged container", "use another")
        yield from _recursion(mount, propagation)


def _has_a_volume(place: Located, name: str, pod: PodSeen) -> Iterator[Violation]:
    if name and not name.startswith("rljob-") and name not in pod.volumes:
        yield Violation(place.at("name"), f'there is no volume "{name}"', "add it to the pod's volumes")


def _recursion(mount: Located, propagation: str) -> Iterator[Violation]:
    """validateMountRecursiveReadOnly."""
    if mount.get("recursiveReadOnly") is None:
        return
    value, path = mount.text("recursiveReadOnly"), mount.at("recursiveReadOnly")
    if value in ("Enabled", "IfPossible"):
        if not mount.flag("readOnly"):
            yield Violation(path, "applies only to read-only mounts", "set readOnly: true")
        if propagation not in ("", "None"):
            yield Violation(path, "cannot be combined with mountPropagation", "remove one of them")
    elif value != "Disabled":
        yield Violation(path, f'"{value}" is not one of Disabled, IfPossible, Enabled', "choose one of them")


@of("Container")
def devices_are_sound(container: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateVolumeDevices."""
    mounts = container.items("volumeMounts")
    names, paths = {mount.text("name") for mount in mounts}, {mount.text("mountPath") for mount in mounts}
    seen: set[str] = set()
    for device in container.items("volumeDevices"):
        name, path = device.text("name"), device.text("devicePath")
        yield from required(device, "name", "devicePath")
        yield from without_backsteps(device.at("devicePath"), path)
        yield from _has_a_volume(device, name, pod)
        if pod.spec.flag("hostUsers") is False:
            yield Violation(device.path, "cannot be combined with hostUsers: false", "remove one of them")
        volume = pod.volumes.get(name)
        if volume is not None and not (volume.get("persistentVolumeClaim") or volume.get("ephemeral")):
            yield Violation(device.at("name"), f"the volume {name} is not a claim", "use a persistentVolumeClaim")
        if name in names or path in paths:
            yield Violation(device.at("name"), "is also mounted as a folder", "keep one of them")
        if name in seen:
            yield Violation(device.at("name"), f'"{name}" is listed twice', "keep one of them")
        seen.add(name)
