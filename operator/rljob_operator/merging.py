"""Merging a user's pod template over ours, in the way `kubectl apply` would: maps by key, known lists by their key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
"""Lists whose items are merged by a key. All other lists are replaced, except tolerations, which add up."""


def merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """`ours` with everything that `theirs` says; neither is changed."""
    merged = dict(ours)
    for name, value in theirs.items():
        merged[name] = _merged(name, merged[name], value) if name in merged else value
    return merged


def _merged(name: str, ours: Any, theirs: Any) -> Any:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return merge(ours, theirs)
    if isinstance(ours, Sequence) and isinstance(theirs, Sequence) and not isinstance(ours, str):
        if name == "tolerations":
            return [*ours, *theirs]
        if name in MERGE_KEYS:
            return _merged_list(ours, theirs, MERGE_KEYS[name])
    return theirs


def _merged_list(ours: Sequence[Any], theirs: Sequence[Any], key: str) -> list[Any]:
    # Our items keep their places: KubeRay takes the first container for Ray's.
    merged = {item[key]: item for item in ours}
    for item in theirs:
        if isinstance(item, Mapping) and key in item:
            name = item[key]
            merged[name] = merge(merged[name], item) if name in merged else item
    return list(merged.values())
