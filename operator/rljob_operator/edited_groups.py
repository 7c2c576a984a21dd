"""What somebody has changed by hand in the groups of a RayCluster, put back. Pure.

What the operator has written is its own; what others add is theirs: Kueue puts node selectors, tolerations and labels
into templates, the API server defaults. So a group is as it should be when everything that was written is still there.
Sizes are not looked at here (`resizing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rljob_operator import names
from rljob_operator.merging import MERGE_KEYS

FIXED = ("rayStartParams", "labels", "template")
"""The fields of a group, the head's too, that nothing changes while the cluster lives."""
_ONE_OF_A_KIND = {"env", "volumes", "volumeMounts"}
"""Lists whose items are one thing or another: a volume that is a claim as well as a folder is none."""
_ADD_UP = {"tolerations", "schedulingGates"}


def restoring(made: Mapping[str, Any], there: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The JSON Patch that puts back what is no longer as it was written; empty where all is.

    Args:
        made: the RayCluster as the operator made it.
        there: as it is in the API server.
    """
    if made["metadata"]["annotations"].get(names.MADE_AS_ANNOTATION) != _made_as(there):
        # A former operator's, or of a job that was changed since: how its groups were written is not known.
        return []
    operations: list[Mapping[str, Any]] = []
    places = {group.get("groupName"): index for index, group in enumerate(there["spec"].get("workerGroupSpecs") or ())}
    pairs = [("headGroupSpec", made["spec"]["headGroupSpec"], there["spec"].get("headGroupSpec") or {})]
    for group in made["spec"]["workerGroupSpecs"]:
        if group["groupName"] in places:
            index = places[group["groupName"]]
            pairs.append((f"workerGroupSpecs/{index}", group, there["spec"]["workerGroupSpecs"][index]))
    for path, wanted, found in pairs:
        for field in FIXED:
            value = _overlaid(field, wanted[field], found.get(field)) if field in wanted else found.get(field)
            if value != found.get(field):
                operations.append({"op": "add", "path": f"/spec/{path}/{field}", "value": value})
    if not operations:
        return []
    version = there["metadata"]["resourceVersion"]
    return [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *operations]


def _made_as(cluster: Mapping[str, Any]) -> str | None:
    return (cluster["metadata"].get("annotations") or {}).get(names.MADE_AS_ANNOTATION)


def _overlaid(name: str, ours: Any, there: Any) -> Any:
    """What is there, with everything that is ours as it was written."""
    if isinstance(ours, Mapping):
        if not isinstance(there, Mapping):
            return ours
        return {**there, **{key: _overlaid(key, value, there.get(key)) for key, value in ours.items()}}
    if not isinstance(ours, list) or not isinstance(there, list):
        return ours
    if name in MERGE_KEYS:
        return _overlaid_by_key(name, ours, there)
    if name in _ADD_UP:
        return [*there, *(item for item in ours if item not in there)]
    if len(ours) != len(there):
        return ours
    # Items that a server has filled up with defaults.
    return [_overlaid("", *pair) for pair in zip(ours, there, strict=True)]


def _overlaid_by_key(name: str, ours: Sequence[Any], there: Sequence[Any]) -> list[Any]:
    """Items that are there in their order, ours as they were written, each key once; those that are gone at the end."""
    key = MERGE_KEYS[name]
    wanted, kept = {item[key]: item for item in ours}, {}
    for item in there:
        found = item.get(key) if isinstance(item, Mapping) else None
        if found in kept or found is None:
            continue
        mine = wanted.get(found)
        if mine is None:
            kept[found] = item
        elif name in _ONE_OF_A_KIND and set(mine) != set(item):
            kept[found] = mine
        else:
            kept[found] = _overlaid("", mine, item)
    return list({**kept, **{found: item for found, item in wanted.items() if found not in kept}}.values())
