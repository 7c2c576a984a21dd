"""Makes a structural schema (OpenAPI v3 as Kubernetes takes it) from the fields of the models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob_api.rules.cel import Path, text
from rljob_api.schema import Node
from rljob_api.spec.base import DNS_LABEL

Schema = dict[str, Any]


def structural(node: Node, rules: Mapping[Path, list[Schema]], path: Path = ()) -> Schema:
    """The schema of one field with the validation ``rules`` of it and of everything below."""
    schema = _typed(node, rules, path)
    if node.description:
        schema["description"] = node.description
    if default := _default(node):
        schema["default"] = default[0]
    found = [*_key_rules(node), *rules.get(path, [])]
    if found:
        schema["x-kubernetes-validations"] = found
    return schema


def _typed(node: Node, rules: Mapping[Path, list[Schema]], path: Path) -> Schema:
    if node.kind == "object":
        return _object(node, rules, path)
    if node.kind == "list":
        return _list(node, rules, path)
    if node.kind == "map":
        return _map(node, rules, path)
    if node.kind == "quantity":
        # A structural schema allows exactly this union.
        return _without_none(
            {
                "x-kubernetes-int-or-string": True,
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "pattern": node.pattern,
                "maxLength": node.longest,
            }
        )
    if node.kind == "any":
        return {"x-kubernetes-preserve-unknown-fields": True}
    if node.kind == "string":
        return _without_none(
            {
                "type": "string",
                "enum": list(node.choices) or None,
                "minLength": node.shortest,
                "maxLength": node.longest if not node.choices else None,
                "pattern": node.pattern,
                "format": node.format,
            }
        )
    return _number(node)


def _number(node: Node) -> Schema:
    low = node.minimum if node.above is None else node.above
    high = node.maximum if node.below is None else node.below
    return _without_none(
        {
            "type": node.kind,
            "minimum": low,
            "exclusiveMinimum": True if node.above is not None else None,
            "maximum": high,
            "exclusiveMaximum": True if node.below is not None else None,
        }
    )


def _object(node: Node, rules: Mapping[Path, list[Schema]], path: Path) -> Schema:
    fields = {name: structural(child, rules, (*path, name)) for name, child in node.fields.items()}
    required = [name for name, child in node.fields.items() if child.required]
    return _without_none({"type": "object", "properties": fields, "required": required or None})


def _list(node: Node, rules: Mapping[Path, list[Schema]], path: Path) -> Schema:
    assert node.items is not None
    items = structural(node.items, rules, (*path, "[]"))
    if node.merge_keys and node.items.kind == "map":
        # What is somebody else's schema has to show at least what it is merged by.
        name = {"type": "string", "minLength": 1, "maxLength": 63, "pattern": DNS_LABEL}
        items |= {"properties": dict.fromkeys(node.merge_keys, name), "required": list(node.merge_keys)}
    return _without_none(
        {
            "type": "array",
            "items": items,
            "minItems": node.shortest,
            "maxItems": node.longest,
            "x-kubernetes-list-type": "map" if node.merge_keys else "atomic",
            "x-kubernetes-list-map-keys": list(node.merge_keys) or None,
        }
    )


def _map(node: Node, rules: Mapping[Path, list[Schema]], path: Path) -> Schema:
    assert node.items is not None
    schema: Schema = {"type": "object", "maxProperties": node.longest}
    if node.items.kind == "any":
        schema["x-kubernetes-preserve-unknown-fields"] = True
    else:
        schema["additionalProperties"] = structural(node.items, rules, (*path, "{}"))
    return _without_none(schema)


def _key_rules(node: Node) -> list[Schema]:
    """A schema has no pattern for the keys of a map, so a rule stands in for it."""
    if node.kind != "map" or node.keys is None or node.keys.pattern is None:
        return []
    example = "example.com/name" if "/" in node.keys.pattern else "MY_NAME"
    length = f" && size(k) <= {node.keys.longest}" if node.keys.longest else ""
    return [
        {
            "rule": f"self.all(k, k.matches({text(node.keys.pattern)}){length})",
            "message": f"a name must look like {example}",
        }
    ]


def _default(node: Node) -> list[Any]:
    """The default in a list, or nothing.

    A section that may be left out gets all its defaults written out: the API server checks the rules on a default
    before it fills in the defaults inside it.
    """
    if not node.has_default or node.default == []:
        return []
    if node.kind == "object" and node.default == {}:
        return [{name: default[0] for name, child in node.fields.items() if (default := _default(child))}]
    return [node.default] if node.default != {} else []


def _without_none(schema: Schema) -> Schema:
    return {name: value for name, value in schema.items() if value is not None}
