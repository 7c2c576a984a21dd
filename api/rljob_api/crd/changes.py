"""What may change in an existing job, as CEL: nothing for live fields, only while suspended, or never.

The rules stand on the parents, so that adding or removing a field counts as a change of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.crd.structural import Schema
from rljob_api.rules.cel import Path
from rljob_api.schema import Node, root
from rljob_api.spec.base import ChangeClass

NEVER = "cannot be changed after creation; create a new job (restore.from continues from this one's checkpoint)"
IMPLIED = "depends on rollout.replicas, which cannot be added or removed after creation; create a new job"
SUSPENDED = "can only be changed while the job is suspended; set spec.suspend: true first"


def transitions() -> dict[Path, list[Schema]]:
    """The transition rules by place."""
    spec = root().fields["spec"]
    found: dict[Path, list[Schema]] = {("spec",): []}
    # Sections that need not be there, parts of which are live: whether they are there is no live matter.
    optional = [name for name, node in spec.fields.items() if _is_optional(node) and len(_all_classes(node)) > 1]
    for name in optional:
        assert spec.fields[name].change.when == "suspended", f"spec.{name} has to say when it may come and go"
        there = f"oldSelf.suspend || has(self.{name}) == has(oldSelf.{name})"
        found["spec",].append(_rule(there, SUSPENDED, (name,)))
    for path, node, when in _uniform(spec, ()):
        if when == "live":
            continue
        if when == "suspended":
            # spec.suspend is in reach from spec only.
            same = _same(".".join(path), node)
            if path[0] in optional and len(path) > 1:
                same = f"!has(self.{path[0]}) || !has(oldSelf.{path[0]}) || {same}"
            found[("spec",)].append(_rule(f"oldSelf.suspend || {same}", SUSPENDED, path))
        else:
            at: Path = ("spec", *path[:-1])
            found.setdefault(at, []).append(_rule(_same(path[-1], node), NEVER, path[-1:]))
    # What placement is when it isn't given, as in resolution: a live field decides it.
    replicas = "has(self.rollout.replicas) == has(oldSelf.rollout.replicas)"
    implied = f"has(self.placement) || self.pipeline.mode != 'sync' || {replicas}"
    found["spec",].append(_rule(implied, IMPLIED, ("placement",)))
    return found


def immutable() -> list[Path]:
    """The largest parts of the spec that cannot be changed after creation."""
    return [path for path, _, when in _uniform(root().fields["spec"], ()) if when == "never"]


def _uniform(parent: Node, path: Path) -> Iterator[tuple[Path, Node, ChangeClass]]:
    """The largest parts of the spec in which all fields have the same class."""
    for name, node in parent.fields.items():
        classes = _all_classes(node)
        here = (*path, name)
        if len(classes) == 1:
            yield here, node, node.change.when
        else:
            yield from _uniform(node, here)


def _all_classes(node: Node) -> set[ChangeClass]:
    """Returns the classes of a part and of all that is in it."""
    return {node.change.when}.union(*(_all_classes(child) for child in node.fields.values()))


def _is_optional(node: Node) -> bool:
    return node.kind == "object" and not node.required and not node.has_default


def _same(field: str, node: Node) -> str:
    now, before = f"self.{field}", f"oldSelf.{field}"
    always = node.required or (node.has_default and node.default not in ([],) and node.kind != "map")
    if always:
        return f"{now} == {before}"
    return f"has({now}) == has({before}) && (!has({now}) || {now} == {before})"


def _rule(expression: str, message: str, field: Path) -> Schema:
    return {"rule": expression, "message": message, "fieldPath": "." + ".".join(field)}
