"""Mistakes, drawn from what the API server itself publishes: the schema of the CRD, and that of pods in OpenAPI.

A mistake is one change at one place of a job. Neither the code under test nor a list of known mistakes is asked.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.malformed.jobs.parts import Document

Schema = Mapping[str, Any]
HIDDEN = {
    "affinity": "Affinity",
    "topologySpreadConstraints": "TopologySpreadConstraint",
    "volumes": "Volume",
    "template": "PodTemplateSpec",
}
"""Fields of the CRD that hold a part of a pod, which the CRD doesn't describe."""
PATHS = ("/", "//", "/x", "/x/", "x/", ".", "..", "./x", "../x", "a/../b", "../..", "/../x", "x/y")
PATTERNS = ("(", "[a", "a)", "*", "(?P<x", "a{2,1}", "\\", "[z-a]", "{x}", "{", "}", "{question", "{answer}", "(?=a)")
TEXTS = (
    *("", " ", "a", "A", "A B", "-a", "a-", "a.b", "a/b", "a..b", "a:b", "a=b", "x" * 64, "x" * 254, "é", "🚢", "True"),
    *("question", "answer", "solution", "1", "-1", "1.5", "2Gi", "1gi", "status.phase", "status.podIP", "spec.x"),
    *("metadata.labels", "metadata.annotations['a b']", "limits.gpu", "In", "Exists", "Always", "None", "linux"),
    *("10.0.0.256", "::1", "ray", "beside", "scratch", "more", "rljob-job", "kubernetes.io/x"),
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 100, 101, 1000, 65535, 65536, 2**31 - 1, 2**31, 2**63, 1.5, -0.5)
AMOUNTS: tuple[Any, ...] = (
    *(0, 1, 4, 1000, "0", "1", "2", "8", "500m", "1500m", "3Mi", "64Mi", "3Gi", "100Gi", "-1", "1.5", "x", "", "1e3"),
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """One value in a job, with what it may be."""

    holder: Any
    """The map or list that it is in."""
    key: Any
    path: tuple[str | int, ...]
    schema: Schema

    @property
    def value(self) -> Any:
        return self.holder[self.key]


@dataclass(frozen=True)
class Mistake:
    """What was done where."""

    kind: str
    path: tuple[str | int, ...]
    value: Any

    def __str__(self) -> str:
        return f"{self.kind} at {'.'.join(map(str, self.path))}: {str(self.value)[:80]}"


class Schemas:
    """What a server publishes: the CRD's schema, and the types of a pod."""

    def __init__(self, crd: Schema, pods: Mapping[str, Schema]) -> None:
        self.spec: Schema = crd["properties"]["spec"]
        self._pods = pods

    def known(self, schema: Schema) -> Schema:
        """The schema itself, behind references."""
        while "$ref" in schema or "allOf" in schema:
            schema = self._pods[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema["allOf"][0]
        return schema

    def below(self, name: str, schema: Schema) -> Schema:
        """The schema of a field of this name: of a pod where the CRD hides it."""
        schema = self.known(schema)
        if name in HIDDEN and self._hides(schema):
            pod: Schema = {"$ref": f"#/components/schemas/io.k8s.api.core.v1.{HIDDEN[name]}"}
            return {"type": "array", "items": pod} if schema.get("type") == "array" else self.known(pod)
        return schema

    @staticmethod
    def _hides(schema: Schema) -> bool:
        inner = schema.get("items", schema)
        return bool(inner.get("x-kubernetes-preserve-unknown-fields"))

    def sites(self, value: Any, schema: Schema, path: tuple[str | int, ...] = ()) -> Iterator[Site]:
        """All values below a value."""
        if isinstance(value, dict):
            for name, item in value.items():
                child = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
                if isinstance(child, Mapping):
                    inner = self.below(name, child)
                    yield Site(value, name, (*path, name), inner)
                    yield from self.sites(item, inner, (*path, name))
        elif isinstance(value, list) and "items" in schema:
            inner = self.known(schema["items"])
            for index, item in enumerate(value):
                yield Site(value, index, (*path, index), inner)
                yield from self.sites(item, inner, (*path, index))

    def example(self, name: str, schema: Schema, dice: random.Random, depth: int = 0) -> Any:
        """A value of the right type, whatever it means."""
        schema = self.below(name, schema)
        if "enum" in schema:
            return dice.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "boolean":
            return dice.random() < 0.5
        if kind in ("integer", "number"):
            return dice.choice([n for n in NUMBERS if kind == "number" or isinstance(n, int)])
        if kind == "string":
            return dice.choice((*TEXTS, *PATHS, *PATTERNS))
        if kind == "array":
            return [self.example("", schema["items"], dice, depth + 1)]
        if kind == "object" and depth < 3:
            required = schema.get("required", ())
            known = schema.get("properties", {})
            names = {*required, *dice.sample(sorted(known), min(len(known), dice.choice([0, 1, 2])))}
            return {field: self.example(field, known[field], dice, depth + 1) for field in sorted(names)}
        return dice.choice(AMOUNTS) if kind is None else {}


def make(document: Document, schemas: Schemas, dice: random.Random) -> Mistake:
    """Makes one mistake in a job."""
    while True:
        mistake = _drawn(document["spec"], schemas, dice)
        if mistake is not None:
            return mistake


def _drawn(spec: Document, schemas: Schemas, dice: random.Random) -> Mistake | None:
    """One mistake; None where the kind that was drawn has no place at the field that was drawn."""
    every = list(schemas.sites(spec, schemas.spec))
    # By name, not by place: labels and variables are many, and a job has one pattern.
    name = dice.choice(sorted({_name(site) for site in every}))
    kind = dice.choice(sorted(KINDS))
    sites = every if kind == "text of another field" else [site for site in every if _name(site) == name]
    return KINDS[kind](kind, sites, schemas, dice)


def _name(site: Site) -> str:
    """The last field in a site's path."""
    return next(part for part in reversed(site.path) if isinstance(part, str))


def _replaced(kind: str, site: Site, value: Any) -> Mistake:
    site.holder[site.key] = value
    return Mistake(kind, site.path, value)


def _wrong_type(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    site = dice.choice(sites)
    return _replaced(kind, site, copy.deepcopy(dice.choice(("text", 3, True, [], {}, ["a"], {"a": 1}))))


def _null(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    return _replaced(kind, dice.choice(sites), None)


def _missing(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    site = dice.choice(sites)
    return Mistake(kind, site.path, site.holder.pop(site.key))


def _empty(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    held = [site for site in sites if isinstance(site.value, dict | list | str) and site.value]
    if not held:
        return None
    site = dice.choice(held)
    return _replaced(kind, site, type(site.value)())


def _unknown_field(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    maps = [site for site in sites if isinstance(site.value, dict) and "properties" in site.schema]
    if not maps:
        return None
    site = dice.choice(maps)
    name = dice.choice(sorted(site.value) or ["name"])
    wrong = dice.choice([f"{name}s", name.upper(), name[:-1] or "x", "my_field", "status", "Name"])
    if wrong in site.schema["properties"]:
        return None
    site.value[wrong] = site.value.pop(name) if name in site.value and dice.random() < 0.5 else 3
    return Mistake(kind, (*site.path, wrong), site.value[wrong])


def _duplicate(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    lists = [site for site in sites if isinstance(site.value, list) and site.value]
    if not lists:
        return None
    site = dice.choice(lists)
    item = copy.deepcopy(dice.choice(site.value))
    if isinstance(item, dict) and dice.random() < 0.3:
        other = copy.deepcopy(dice.choice(site.value))
        item = {**other, **{name: value for name, value in item.items() if dice.random() < 0.5}}
    site.value.append(item)
    return Mistake(kind, (*site.path, len(site.value) - 1), item)


def _other_number(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    numbers = [site for site in sites if site.schema.get("type") in ("integer", "number")]
    return _replaced(kind, dice.choice(numbers), dice.choice(NUMBERS)) if numbers else None


def _other_amount(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    amounts = [site for site in sites if "type" not in site.schema or "x-kubernetes-int-or-string" in site.schema]
    amounts += [site for site in sites if {"requests", "limits"} & set(site.path[:-1])]
    return _replaced(kind, dice.choice(amounts), dice.choice(AMOUNTS)) if amounts else None


def _other_text(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    texts = [site for site in sites if site.schema.get("type") == "string"]
    if not texts:
        return None
    site = dice.choice(texts)
    value = site.value if isinstance(site.value, str) else ""
    like = PATHS if "/" in value else PATTERNS if re.search(r"[][{}()]", value) else TEXTS
    odd = (f"{value}x", value[:-1], value.upper(), value.lower(), f" {value}", f"{value}/", f"/{value}", f"../{value}")
    return _replaced(kind, site, dice.choice(dice.choice((odd, like, like, (*TEXTS, *PATHS, *PATTERNS)))))


def _text_of_another(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    texts = [site for site in sites if site.schema.get("type") == "string" and isinstance(site.value, str)]
    if len(texts) < 2:
        return None
    one, other = dice.sample(texts, 2)
    return _replaced(kind, one, other.value)


def _other_key(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    maps = [site for site in sites if isinstance(site.value, dict) and "additionalProperties" in site.schema]
    if not maps:
        return None
    site = dice.choice(maps)
    name = dice.choice(
        (*TEXTS, *PATHS, "cpu", "memory", "gpu", "nvidia.com/gpu", "hugepages-2Mi", "requests.cpu", "PATH")
    )
    schema = site.schema["additionalProperties"]
    value = dice.choice(list(site.value.values())) if site.value else schemas.example("", schema, dice)
    site.value[name] = value
    return Mistake(kind, (*site.path, name), value)


def _one_more_field(kind: str, sites: list[Site], schemas: Schemas, dice: random.Random) -> Mistake | None:
    maps = [site for site in sites if isinstance(site.value, dict) and "properties" in site.schema]
    if not maps:
        return None
    site = dice.choice(maps)
    absent = sorted(set(site.schema["properties"]) - set(site.value))
    if not absent:
        return None
    name = dice.choice(absent)
    site.value[name] = schemas.example(name, site.schema["properties"][name], dice)
    return Mistake(kind, (*site.path, name), site.value[name])


KINDS: Mapping[str, Callable[[str, list[Site], Schemas, random.Random], Mistake | None]] = {
    "wrong type": _wrong_type,
    "null": _null,
    "missing": _missing,
    "empty": _empty,
    "unknown field": _unknown_field,
    "twice in a list": _duplicate,
    "another number": _other_number,
    "another amount": _other_amount,
    "another text": _other_text,
    "text of another field": _text_of_another,
    "another key": _other_key,
    "one more field": _one_more_field,
}
