"""Whether what a pod holds has the fields and types that Kubernetes knows, and all that the checks say of each part."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.pod_template.fields import KUBERNETES, ObjectType, types
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.quantities import QUANTITY
from rljob_api.pod_template.registry import CHECKS, PodSeen
from rljob_api.problems import did_you_mean, shown
from rljob_api.violations import Violation

_BITS = {"int32": 31, "int64": 63}
_LIST = "start each item with '- '"
_MAP = "write name: value pairs"


def violations(node: Located, kind: str, pod: PodSeen) -> Iterator[Violation]:
    """Everything wrong with a value of a kind (as ``fields`` writes it) and with all below it."""
    if kind.startswith("["):
        yield from _list(node, kind[1:-1], pod)
    elif kind.startswith("{"):
        yield from _map(node, kind[1:-1], pod)
    elif kind in types():
        yield from _object(node, types()[kind], pod)
    else:
        yield from _scalar(node, kind)


def _object(node: Located, kind: ObjectType, pod: PodSeen) -> Iterator[Violation]:
    if not isinstance(node.value, dict):
        yield Violation(node.path, f"must be a map, not {_shown(node)}", _MAP)
        return
    for name, child in node.value.items():
        if name not in kind.fields:
            close = did_you_mean(str(name), kind.fields)
            yield Violation(
                child.path,
                f"Kubernetes {KUBERNETES} pods have no such field",
                f"did you mean {close}?" if close else f"the fields here are {', '.join(kind.fields)}",
            )
        elif child.value is not None:
            yield from violations(child, kind.fields[name], pod)
    for name in sorted(kind.required):
        if node.get(name) is None:
            yield Violation(node.at(name), "is required", "add it")
    for name, keys in kind.keys.items():
        yield from _repeated(node.items(name), keys)
    for check in CHECKS[kind.name]:
        yield from check(node, pod)


def _repeated(items: list[Located], keys: tuple[str, ...]) -> Iterator[Violation]:
    """Items of a list that Kubernetes merges by keys, and whose keys are there already."""
    seen = []
    for item in items:
        values = {key: found.value for key in keys if (found := item.get(key)) is not None}
        if "protocol" in keys:
            values = {"protocol": "TCP"} | values
        if values and values in seen:
            said = ", ".join(f"{key} {shown(value)}" for key, value in values.items())
            yield Violation(item.path, f"{said} is listed twice", "keep one of them")
        seen.append(values)


def _list(node: Located, kind: str, pod: PodSeen) -> Iterator[Violation]:
    if not isinstance(node.value, list):
        yield Violation(node.path, f"must be a list, not {_shown(node)}", _LIST)
        return
    for item in node.value:
        yield from violations(item, kind, pod)


def _map(node: Located, kind: str, pod: PodSeen) -> Iterator[Violation]:
    if not isinstance(node.value, dict):
        yield Violation(node.path, f"must be a map, not {_shown(node)}", _MAP)
        return
    for item in node.value.values():
        if item.value is not None:
            yield from violations(item, kind, pod)


def _scalar(node: Located, kind: str) -> Iterator[Violation]:
    value = node.value
    name, _, choices = kind.removesuffix(")").partition("(")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "string":
        if not isinstance(value, str):
            yield Violation(node.path, f"must be text, not {_shown(node)}", "put it in quotes")
        elif choices and value not in ("", *choices.split("|")):
            close = did_you_mean(value, choices.split("|"))
            problem = f"{shown(value)} is not one of {choices.replace('|', ', ')}"
            yield Violation(node.path, problem, f"did you mean {close}?" if close else "choose one of them")
    elif name == "boolean":
        if not isinstance(value, bool):
            yield Violation(node.path, f"must be true or false, not {_shown(node)}", "write true or false")
    elif name in _BITS:
        if not isinstance(value, int) or isinstance(value, bool):
            yield Violation(node.path, f"must be a whole number, not {_shown(node)}", "write a whole number")
        elif not -(2 ** _BITS[name]) <= value < 2 ** _BITS[name]:
            yield Violation(node.path, f"{value} is too {'large' if value > 0 else 'small'}", f"it has {name}'s bounds")
    elif name == "quantity":
        if not is_number and not (isinstance(value, str) and re.fullmatch(QUANTITY, value)):
            yield Violation(node.path, f"{_shown(node)} is not a quantity", "write one like 4, 500m or 16Gi")
    elif name == "intOrString" and not isinstance(value, str) and (not isinstance(value, int) or not is_number):
        yield Violation(node.path, f"must be a whole number or text, not {_shown(node)}", "write one of them")


def _shown(node: Located) -> str:
    """A value as its author knows it."""
    if isinstance(node.value, dict | list):
        return f"a {'map' if isinstance(node.value, dict) else 'list'} of {len(node.value)}"
    return shown(node.value)
