"""The fields of the job file as plain data: what ``rljob explain`` prints, error messages cite and the CRD is made of.

Read from the pydantic models, so there is one description of every field and no second truth.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as at
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from rljob_api.spec.base import NEVER, Change, Fallback, Format, IntOrString, MapKeys, Preserve

Kind = Literal["object", "list", "map", "string", "integer", "number", "boolean", "quantity", "any"]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One field, list item or map value."""

    name: str
    kind: Kind
    description: str = ""
    required: bool = False
    has_default: bool = False
    default: Any = None
    """The default as YAML has it. Without ``has_default`` nothing is set when the field is absent."""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""
    shortest: int | None = None
    """Least number of characters, items or entries."""
    longest: int | None = None
    pattern: str | None = None
    format: str | None = None
    keys: Node | None = None
    """Maps: what keys look like."""
    items: Node | None = None
    """Lists and maps: what each value looks like."""
    merge_keys: tuple[str, ...] = ()
    fallback: Any = None
    """What absent means when no preset says otherwise (``Fallback``); None: no one value."""
    change: Change = NEVER
    model: type[BaseModel] | None = field(default=None, repr=False)

    @property
    def fields(self) -> Mapping[str, Node]:
        """Child fields by YAML name, of an object or of the items of a list or map."""
        if self.model is not None:
            return _fields(self.model, self.change)
        return self.items.fields if self.items is not None else {}

    @property
    def type_name(self) -> str:
        """The type in kubectl's words: integer, []object, map[string]string."""
        if self.kind == "list" and self.items is not None:
            return f"[]{self.items.type_name}"
        if self.kind == "map" and self.items is not None:
            return f"map[string]{self.items.type_name}"
        return self.kind

    @property
    def bounds(self) -> str:
        """The allowed range in words, or nothing."""
        unit = {"string": " characters", "quantity": "", "list": " items", "map": " entries"}.get(self.kind)
        if unit is not None:
            return _range(self.shortest, self.longest, unit) if unit else ""
        parts = [f"above {_number(self.above)}"] if self.above is not None else []
        parts += [_range(self.minimum, self.maximum, "")]
        parts += [f"below {_number(self.below)}"] if self.below is not None else []
        return ", ".join(part for part in parts if part)


def _number(value: float) -> str:
    return f"{value:.15g}" if abs(value) < 1e15 else str(value)


def _range(low: float | None, high: float | None, unit: str) -> str:
    if low is not None and low == high:
        return f"{_number(low)}{unit}"
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}{unit}"
    if low is not None:
        return f"at least {_number(low)}{unit}"
    return f"at most {_number(high)}{unit}" if high is not None else ""


@cache
def root() -> Node:
    """The whole RLJob."""
    from rljob_api.spec.job import RLJob

    return Node(name="rljob", kind="object", description=documentation(RLJob), model=RLJob)


def find(path: typing.Iterable[str | int]) -> Node | None:
    """The node at a path as it occurs in a document; list positions and map keys lead to the items."""
    node = root()
    for part in path:
        if part in node.fields and not (node.kind in ("list", "map") and isinstance(part, int)):
            node = node.fields[str(part)]
        elif node.items is not None:
            node = node.items
        else:
            return None
    return node


def walk(node: Node | None = None, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Every field below ``node`` with its dotted path, parents first."""
    for name, child in (node or root()).fields.items():
        path = f"{prefix}.{name}" if prefix else name
        yield path, child
        yield from walk(child, path)


@cache
def _fields(model: type[BaseModel], inherited: Change) -> Mapping[str, Node]:
    return {
        info.alias or name: _field(info.alias or name, info, inherited) for name, info in model.model_fields.items()
    }


def _field(name: str, info: FieldInfo, inherited: Change) -> Node:
    found: dict[str, Any] = {"change": inherited}
    _constraints(info.metadata, found)
    _annotation(info.annotation, found)
    found["required"] = info.is_required()
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if default is not None:
        found["has_default"], found["default"] = True, _plain(default)
    described = [info.description or "", found.pop("meaning", "")]
    return Node(name=name, description=" ".join(filter(None, described)), **found)


def _annotation(annotation: Any, found: dict[str, Any]) -> None:
    """Adds kind, items and constraints of a type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        _annotation(args[0], found)
        _constraints(args[1:], found)
    elif origin in (Union, types.UnionType) and type(None) in args:
        (inner,) = (arg for arg in args if arg is not type(None))
        _annotation(inner, found)
    elif origin is Literal:
        found["kind"], found["choices"] = "string", tuple(args)
    elif origin is tuple:
        found["kind"], found["items"] = "list", _item(args[0], found)
    elif origin is dict:
        found["kind"], found["items"] = "map", _item(args[1], found)
        found["keys"] = _item(args[0], found)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        found["kind"], found["model"] = "object", annotation
    elif annotation is JsonValue or annotation is Any:
        found["kind"] = "any"
    else:
        # What has a format is text in the document, whatever it is in Python.
        found["kind"] = {str: "string", int: "integer", float: "number", bool: "boolean"}.get(annotation, "string")
    if found.pop("preserve", False):
        found["kind"] = "any" if found["kind"] != "map" else "map"


def _item(annotation: Any, outer: Mapping[str, Any]) -> Node:
    found: dict[str, Any] = {"change": outer["change"]}
    _annotation(annotation, found)
    model = found.get("model")
    return Node(name="", description=documentation(model) if model else "", **found)


def _constraints(metadata: typing.Iterable[Any], found: dict[str, Any]) -> None:
    for entry in metadata:
        if isinstance(entry, FieldInfo):
            _constraints(entry.metadata, found)
        elif isinstance(entry, at.Ge):
            found["minimum"] = entry.ge
        elif isinstance(entry, at.Gt):
            found["above"] = entry.gt
        elif isinstance(entry, at.Le):
            found["maximum"] = entry.le
        elif isinstance(entry, at.Lt):
            found["below"] = entry.lt
        elif isinstance(entry, at.MinLen):
            found["shortest"] = entry.min_length
        elif isinstance(entry, at.MaxLen):
            found["longest"] = entry.max_length
        elif isinstance(entry, Fallback):
            found["fallback"] = entry.value
            found["meaning"] = entry.sentence
        elif isinstance(entry, Change):
            found["change"] = entry
        elif isinstance(entry, MapKeys):
            found["merge_keys"] = entry.keys
        elif isinstance(entry, Format):
            found["kind"], found["format"], found["longest"] = "string", entry.name, entry.longest
        elif isinstance(entry, Preserve):
            found["preserve"] = True
        elif isinstance(entry, IntOrString):
            found["kind"] = "quantity"
        elif getattr(entry, "pattern", None) is not None:
            found["pattern"] = entry.pattern


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def documentation(model: type[BaseModel]) -> str:
    """A model's docstring on one line."""
    return " ".join((model.__doc__ or "").split())
