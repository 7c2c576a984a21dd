"""The fields of a pod: names, types, allowed values and keys, as Kubernetes publishes them.

``fields.json`` is made from the OpenAPI document of an API server (``scripts/pod_fields.py``). A type is a map from
field to what it holds:

    string, boolean, int32, int64, quantity, intOrString, any    a scalar, or anything at all
    Volume                                                        another type of the file
    [Volume]  {string}                                            a list; a map by free names
    "string(Always|Never)"                                        one of these values

Of a type, ``required`` names the fields that must be there, and ``keys`` those by which the items of a list differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("fields.json")
KUBERNETES = "1.36"
"""Whose fields these are."""
ROOT = "PodTemplateSpec"
_CORE = "io.k8s.api.core.v1."
_QUANTITY, _INT_OR_STRING = "Quantity", "IntOrString"
_LEFT_OUT = {
    # Not in the schema of RayCluster (KubeRay 1.6), which a pod of ours has to pass as well.
    "PodSpec": {"schedulingGroup"},
}
_METADATA = dict.fromkeys(("labels", "annotations"), "{string}") | {"name": "string", "namespace": "string"}
"""What is taken as metadata in a template, with finalizers. What counts are labels and annotations."""


@dataclass(frozen=True)
class ObjectType:
    """One type of object in a pod."""

    name: str
    fields: Mapping[str, str]
    required: frozenset[str]
    keys: Mapping[str, tuple[str, ...]]
    """The fields that are lists, each with the key by which its items differ."""


@cache
def types() -> Mapping[str, ObjectType]:
    """All types by name."""
    return {
        name: ObjectType(
            name,
            known["fields"],
            frozenset(known.get("required", ())),
            {field: tuple(keys) for field, keys in known.get("keys", {}).items()},
        )
        for name, known in json.loads(FILE.read_text()).items()
    }


def compact(document: Mapping[str, Any]) -> dict[str, Any]:
    """The types that a pod template is made of, from an API server's OpenAPI document (``/openapi/v3/api/v1``)."""
    schemas = document["components"]["schemas"]
    found: dict[str, Any] = {}
    waiting = [_CORE + ROOT]
    while waiting:
        whole = waiting.pop()
        name = _short(whole)
        if name in found or name in (_QUANTITY, _INT_OR_STRING):
            continue
        if name == "ObjectMeta":
            found[name] = {"fields": {**_METADATA, "finalizers": "[string]"}}
            continue
        schema = schemas[whole]
        fields = {
            field: _kind(child, waiting)
            for field, child in sorted(schema.get("properties", {}).items())
            if field not in _LEFT_OUT.get(name, ())
        }
        keys = {
            field: child["x-kubernetes-list-map-keys"]
            for field, child in sorted(schema.get("properties", {}).items())
            if "x-kubernetes-list-map-keys" in child
        }
        found[name] = {"fields": fields}
        if schema.get("required"):
            found[name]["required"] = sorted(schema["required"])
        if keys:
            found[name]["keys"] = keys
    return found


def _kind(schema: Mapping[str, Any], waiting: list[str]) -> str:
    """What a field holds, as the file writes it; types that it names are put on the list."""
    if "allOf" in schema:
        return _kind(schema["allOf"][0], waiting)
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        short = _short(name)
        if short in (_QUANTITY, _INT_OR_STRING):
            return short[:1].lower() + short[1:]
        waiting.append(name)
        return short
    if schema["type"] == "array":
        return f"[{_kind(schema['items'], waiting)}]"
    if schema["type"] == "object":
        return f"{{{_kind(schema['additionalProperties'], waiting)}}}" if "additionalProperties" in schema else "any"
    if schema["type"] == "integer":
        return str(schema["format"])
    choices = "|".join(schema.get("enum", ()))
    return f"{schema['type']}({choices})" if choices else str(schema["type"])


def _short(name: str) -> str:
    return name.rpartition(".")[2]
