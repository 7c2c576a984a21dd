"""Environment variables and where their values come from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rljob_api.pod_template import names
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.paths import without_backsteps
from rljob_api.pod_template.quantities import known
from rljob_api.pod_template.registry import PodSeen, of, required
from rljob_api.violations import Violation

SOURCES = ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef")
IN_VARIABLES = (
    *("metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName"),
    *("status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"),
)
"""Fields of the pod that a variable may have."""
IN_FILES = ("metadata.name", "metadata.namespace", "metadata.labels", "metadata.annotations", "metadata.uid")
"""Fields of the pod that a file of a volume may have."""
_AMOUNTS = tuple(f"{kind}.{name}" for kind in ("limits", "requests") for name in ("cpu", "memory", "ephemeral-storage"))
_HUGE = ("limits.hugepages-", "requests.hugepages-")
_UNITS = tuple(f"1{unit}" for unit in ("", *"kMGTPE", *(f"{letter}i" for letter in "KMGTPE")))


@of("EnvVar")
def variables_have_one_origin(variable: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateEnv, validateEnvVarValueFrom."""
    name = variable.text("name")
    yield from required(variable, "name")
    if name and not names.is_variable(name):
        yield Violation(variable.at("name"), f'"{name}" is not a valid variable name', "use letters, digits and _")
    origin = variable.get("valueFrom")
    if origin is None:
        return
    given = [source for source in SOURCES if origin.get(source) is not None]
    if len(given) != 1:
        yield Violation(origin.path, f"needs exactly one of {', '.join(SOURCES)}", "set one")
    elif variable.text("value"):
        yield Violation(origin.path, "cannot be combined with value", "keep one of them")


@of("EnvVarSource")
def variables_name_fields_that_exist(origin: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateObjectFieldSelector, validateContainerResourceFieldSelector."""
    yield from pod_field(origin.get("fieldRef"), IN_VARIABLES)
    yield from amount_field(origin.get("resourceFieldRef"), in_file=False)


def pod_field(reference: Located | None, known_fields: Sequence[str]) -> Iterator[Violation]:
    """A field of the pod that is named as the origin of a value."""
    if reference is None:
        return
    path, at = reference.text("fieldPath"), reference.at("fieldPath")
    version = reference.text("apiVersion")
    if version not in ("", "v1"):
        yield Violation(reference.at("apiVersion"), f'"{version}" is not a version of the pod API', "write v1")
    subscript = re.fullmatch(r"(.*)\['(.*)'\]", path, re.DOTALL)
    if not path:
        yield Violation(at, "is required", f"use one of {', '.join(known_fields)}")
    elif subscript:
        if subscript[1] not in ("metadata.annotations", "metadata.labels"):
            yield Violation(at, f'"{subscript[1]}" has no keys', "use a label or an annotation")
        else:
            is_label = subscript[1] == "metadata.labels"
            yield from names.qualified(at, subscript[2] if is_label else subscript[2].lower())
    elif path not in known_fields and not (path == "spec.host" and "spec.nodeName" in known_fields):
        labels = "metadata.labels['name']"
        yield Violation(at, f'"{path}" is not an available field', f"use one of {', '.join(known_fields)}, {labels}")


def amount_field(reference: Located | None, *, in_file: bool) -> Iterator[Violation]:
    """A container's request or limit that is named as the origin of a value."""
    if reference is None:
        return
    name = reference.text("resource")
    if in_file:
        yield from required(reference, "containerName")
    if name not in _AMOUNTS and not name.startswith(_HUGE):
        yield Violation(reference.at("resource"), f'"{name}" is not available', f"use one of {', '.join(_AMOUNTS)}")
        return
    divisor = reference.get("divisor")
    value = known(divisor.value) if divisor is not None else None
    allowed = ("1m", "1") if name.endswith(".cpu") else _UNITS
    if divisor is not None and value and value not in map(known, allowed):
        yield Violation(divisor.path, f"{divisor.value} is not a unit for {name}", f"use one of {', '.join(allowed)}")


@of("ConfigMapKeySelector", "SecretKeySelector")
def keys_have_names(selector: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateConfigMapKeySelector, validateSecretKeySelector."""
    if not names.is_subdomain(selector.text("name")):
        yield Violation(selector.at("name"), "is not an object name", "write it in lower case")
    if not names.is_key(selector.text("key")):
        yield Violation(
            selector.at("key"), f'"{selector.text("key")}" is not a valid key', "use letters, digits, -, _ and ."
        )


@of("FileKeySelector")
def files_have_names(selector: Located, pod: PodSeen) -> Iterator[Violation]:
    """validateFileKeySelector, validateFileKeyRefVolumes."""
    yield from required(selector, "key", "volumeName", "path")
    key, name = selector.text("key"), selector.text("volumeName")
    if key and not names.is_variable(key):
        yield Violation(selector.at("key"), f'"{key}" is not a valid variable name', "use letters, digits and _")
    yield from names.label(selector.at("volumeName"), name)
    yield from without_backsteps(selector.at("path"), selector.text("path"))
    volume = pod.volumes.get(name)
    if name and (volume is None or volume.get("emptyDir") is None):
        yield Violation(selector.at("volumeName"), f'there is no emptyDir volume "{name}"', "add one")


@of("EnvFromSource")
def variables_come_from_one_object(source: Located, pod: PodSeen) -> Iterator[Violation]:
    """ValidateEnvFrom."""
    prefix = source.text("prefix")
    if prefix and not names.is_variable(prefix):
        yield Violation(source.at("prefix"), f'"{prefix}" is not a valid prefix of a variable name', "use letters")
    given = [name for name in ("configMapRef", "secretRef") if source.get(name) is not None]
    if len(given) != 1:
        yield Violation(source.path, "needs exactly one of configMapRef and secretRef", "set one")
    for name in given:
        if (reference := source.get(name)) is not None:
            yield from required(reference, "name")
            text = reference.text("name")
            # The last letter of what names are made from may be missing: it is how a prefix is judged.
            if text and not names.is_subdomain(text.removesuffix("-")):
                yield from names.subdomain(reference.at("name"), text)
