"""Plain data that remembers where in the job file each part of it is written, through the merge of a pod template.

The operator lays ``pod.template`` over the pod that it makes of the other settings (``rljob_operator.merging``). What
is wrong with the result has to be told where its author wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api.violations import path_of

MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
"""Lists whose items are merged by a key. All other lists are replaced, except tolerations, which add up."""


@dataclass(frozen=True)
class Located:
    """A value and its path. Maps and lists hold located values; what is null counts as absent."""

    path: str
    value: Any

    def get(self, name: str) -> Located | None:
        """A field that is there; None as well if this is no map."""
        found = self.value.get(name) if isinstance(self.value, dict) else None
        return found if found is not None and found.value is not None else None

    def at(self, name: str) -> str:
        """The path of a field, whether it is there or not."""
        found = self.get(name)
        return found.path if found is not None else _below(self.path, name)

    def text(self, name: str) -> str:
        """A field's text; empty when there is none, as for Kubernetes."""
        found = self.get(name)
        return found.value if found is not None and isinstance(found.value, str) else ""

    def number(self, name: str) -> int | None:
        """A field's whole number, if it is one."""
        found = self.get(name)
        is_number = found is not None and isinstance(found.value, int) and not isinstance(found.value, bool)
        return found.value if found is not None and is_number else None

    def flag(self, name: str) -> bool | None:
        """A field's true or false, if it is one."""
        found = self.get(name)
        return found.value if found is not None and isinstance(found.value, bool) else None

    def items(self, name: str) -> list[Located]:
        """The items of a list in a field; none if it is no list."""
        found = self.get(name)
        return found.value if found is not None and isinstance(found.value, list) else []

    def entries(self, name: str) -> dict[str, Located]:
        """The entries of a map in a field that are there; none if it is no map."""
        found = self.get(name)
        inner = found.value if found is not None and isinstance(found.value, dict) else {}
        return {key: entry for key, entry in inner.items() if entry.value is not None}

    def texts(self, name: str) -> Iterator[tuple[str, str]]:
        """The texts in a list in a field, with their paths."""
        yield from ((item.path, item.value) for item in self.items(name) if isinstance(item.value, str))


def located(path: str, value: Any) -> Located:
    """Plain data that stands at a path, with the paths of all that is in it."""
    if isinstance(value, Mapping):
        return Located(path, {name: located(_below(path, str(name)), item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return Located(path, [located(f"{path}[{index}]", item) for index, item in enumerate(value)])
    return Located(path, value)


def merged(ours: Located, theirs: Located) -> Located:
    """``ours`` with all that ``theirs`` says, as the operator merges a template into a pod."""
    if not isinstance(ours.value, dict) or not isinstance(theirs.value, dict):
        return theirs
    content = dict(ours.value)
    for name, value in theirs.value.items():
        content[name] = _merged(name, content[name], value) if name in content else value
    # An empty map says nothing: what is missing in it is missing in ours.
    return Located(theirs.path if theirs.value else ours.path, content)


def _merged(name: str, ours: Located, theirs: Located) -> Located:
    if isinstance(ours.value, list) and isinstance(theirs.value, list):
        if name == "tolerations":
            return Located(theirs.path, [*ours.value, *theirs.value])
        if name in MERGE_KEYS:
            return Located(theirs.path, _merged_items(ours.value, theirs.value, MERGE_KEYS[name]))
    return merged(ours, theirs)


def _merged_items(ours: list[Located], theirs: list[Located], key: str) -> list[Located]:
    found: dict[Any, Located] = {_key(item, key, index): item for index, item in enumerate(ours)}
    for item in theirs:
        if isinstance(item.value, dict) and key in item.value:
            name = _key(item, key, 0)
            found[name] = merged(found[name], item) if name in found else item
    return list(found.values())


def _key(item: Located, key: str, index: int) -> Any:
    """What an item of ours is merged by. Items without a key, or with the same, stay apart: that is told of them."""
    inner = item.get(key)
    return inner.value if inner is not None and isinstance(inner.value, str) else (index, "no key")


def _below(path: str, name: str) -> str:
    part = path_of([name])
    return f"{path}{part}" if part.startswith("[") else f"{path}.{part}"
