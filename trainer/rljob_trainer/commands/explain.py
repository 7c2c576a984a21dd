"""Describes a field of the job file: meaning, type, default, bounds, and when it may be changed.

Examples:
  rljob explain                             the whole document
    rljob explain pipeline.staleness          a section (spec. can be omitted)
    rljob explain learningRate                a field by its name; lists the paths if there are several
  rljob explain --recursive rollout         all fields below it
  rljob explain algorithm.presets           the presets
  rljob explain algorithm.presets.dapo      what a preset fills in
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api import API_VERSION, KIND, schema
from rljob_api.method import MethodSpec
from rljob_api.methods import ESTIMATORS, POLICY_LOSSES
from rljob_api.presets import PRESETS, Preset
from rljob_api.problems import did_you_mean, places_of
from rljob_api.schema import Node

WIDTH = 100
UNKNOWN = 2
_METHODS: Mapping[str, Mapping[Any, MethodSpec]] = {
    "spec.algorithm.advantage": ESTIMATORS,
    "spec.algorithm.policyLoss": POLICY_LOSSES,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", default="", help="path of a field, for example trainer.optimizer")
    parser.add_argument("--recursive", "-r", action="store_true", help="list all fields below the path")


def run(args: argparse.Namespace) -> int:
    parts = [part for part in args.path.replace("[", ".").replace("]", "").split(".") if part and not part.isdigit()]
    if parts and parts[0].lower() == KIND.lower():
        parts = parts[1:]
    if parts and parts[0] not in schema.root().fields:
        parts = ["spec", *parts]
    if parts[:3] == ["spec", "algorithm", "presets"]:
        return _presets(parts[3:])
    if len(parts) == 2 and parts[0] == "spec" and parts[1] in PRESETS:
        return _presets(parts[1:])
    path = ".".join(parts)
    if schema.find(parts) is None and (places := _below_the_top(".".join(parts[1:]))):
        if len(places) > 1:
            print("\n".join(_list_of(places)))
            return 0
        path = places[0]
    node = schema.root()
    for depth, part in enumerate(names := path.split(".") if path else []):
        if part not in node.fields:
            print(_unknown(names[:depth], part, node), file=sys.stderr)
            return UNKNOWN
        node = node.fields[part]
    print("\n".join(_tree(node) if args.recursive else _page(node, path)))
    return 0


def _below_the_top(name: str) -> list[str]:
    """The paths that end with a name, or with the end of a path; those in pods only if there are no others."""
    places = [path for path, _ in schema.walk() if path.endswith(f".{name}")]
    return [path for path in places if ".pod." not in path] or places


def _list_of(places: list[str]) -> Iterator[str]:
    yield f"There are {len(places)} fields with that name:"
    for path in places:
        node = schema.find(path.split("."))
        assert node is not None
        yield f"  {path}\t<{node.type_name}>"
        yield from _wrapped(node.description, "    ")


def _unknown(parents: list[str], wrong: str, parent: Node) -> str:
    where = ".".join(parents) or KIND
    if not parent.fields:
        return f"rljob explain: {where} has no fields, so it has no {wrong!r}"
    if close := did_you_mean(wrong, parent.fields):
        hint = f"did you mean {close}?"
    elif places := places_of(wrong, f"{where}.{wrong}"):
        hint = f"did you mean {' or '.join(places[:2])}?"
    elif values := [path for path, node in schema.walk() if wrong in node.choices and ".pod." not in path]:
        hint = f"it is a value of {' and '.join(values[:3])}"
    else:
        hint = f"its fields are {', '.join(parent.fields)}"
    return f"rljob explain: {where} has no field {wrong!r}; {hint}"


def _page(node: Node, path: str) -> Iterator[str]:
    yield f"KIND:     {KIND}"
    yield f"VERSION:  {API_VERSION}"
    yield ""
    if path:
        yield f"FIELD:    {path} <{node.type_name}>{' -required-' if node.required else ''}"
        yield from (f"{label + ':':<10}{value}" for label, value in _facts(node, path))
        yield ""
    yield "DESCRIPTION:"
    yield from _wrapped(node.description, "    ")
    if node.fields:
        yield ""
        yield "FIELDS:"
        for child in node.fields.values():
            yield from _summary(child)
    if path in _METHODS:
        yield ""
        yield "PARAMETERS OF EACH METHOD (with the method's own default):"
        for name, method in _METHODS[path].items():
            yield f"  {name}: {_parameters(method, node)}"
    if path in ("spec.reward.functions.type", "spec.reward.functions.params"):
        yield ""
        yield "PARAMETERS OF EACH FUNCTION (with its default):"
        yield from _reward_functions()
    if path == "spec.algorithm.preset":
        yield ""
        yield from _preset_list()


def _facts(node: Node, path: str) -> Iterator[tuple[str, str]]:
    if node.choices:
        yield "ALLOWED", ", ".join(node.choices)
    if node.bounds:
        yield "BOUNDS", node.bounds
    if node.items is not None and node.items.bounds:
        yield "EACH", node.items.bounds
    if node.has_default and not node.fields:
        yield "DEFAULT", _yaml(node.default)
    if path.startswith("spec"):
        mixed = any(below.change != node.change for below in _below(node))
        yield "CHANGE", node.change.sentence + (", except fields that say otherwise" if mixed else "")


def _below(node: Node) -> Iterator[Node]:
    for child in node.fields.values():
        yield child
        yield from _below(child)


def _summary(node: Node) -> Iterator[str]:
    facts = ["-required-"] if node.required else []
    if node.has_default and not node.fields:
        facts.append(f"default {_yaml(node.default)}")
    if node.choices:
        facts.append(f"one of {', '.join(node.choices)}")
    elif node.bounds:
        facts.append(node.bounds)
    if node.change.when != "never":
        facts.append(node.change.sentence)
    yield f"  {node.name}\t<{node.type_name}>"
    yield from _wrapped("; ".join(facts), "    ")
    yield from _wrapped(node.description, "    ")
    yield ""


def _tree(node: Node, indent: str = "  ") -> Iterator[str]:
    for child in node.fields.values():
        default = f" (default {_yaml(child.default)})" if child.has_default and not child.fields else ""
        required = " -required-" if child.required else ""
        yield f"{indent}{child.name}\t<{child.type_name}>{required}{default}"
        yield from _tree(child, indent + "  ")


def _parameters(method: MethodSpec, node: Node) -> str:
    names = {field.replace("_", "").lower(): field for field in node.fields}
    said = []
    for attribute, default in method.parameters.items():
        name = next(yaml for key, yaml in names.items() if key == attribute.replace("_", "").lower())
        said.append(f"{name} {'off' if default is None else _yaml(default)}")
    return ", ".join(said) or "none"


def _reward_functions() -> Iterator[str]:
    from rljob_trainer.rewards.parameters import described, prose
    from rljob_trainer.rewards.rules import built_in

    types = schema.find(("spec", "reward", "functions", 0, "type"))
    assert types is not None
    for name in types.choices:
        rule = built_in(name)
        # A pattern has a field of its own.
        yield f"  {name}: {described(rule.function, leave_out=('pattern',)) if rule else 'those of your function'}"
        if rule:
            yield from _wrapped(prose(rule.function), "    ")


def _presets(rest: list[str]) -> int:
    if not rest:
        print("\n".join(_preset_list()))
        return 0
    name = rest[0]
    preset = next((preset for key, preset in PRESETS.items() if key == name), None)
    if preset is None or len(rest) > 1:
        close = did_you_mean(name, PRESETS)
        hint = f"did you mean {close}?" if close and close != name else f"use one of {', '.join(PRESETS)}"
        print(f"rljob explain: unknown preset {'.'.join(rest)!r}; {hint}", file=sys.stderr)
        return UNKNOWN
    print("\n".join(_preset_page(name, preset)))
    return 0


def _preset_list() -> Iterator[str]:
    yield "PRESETS:"
    for name, preset in PRESETS.items():
        yield f"  {name}"
        yield from _wrapped(f"{preset.title} ({preset.source})", "    ")


def _preset_page(name: str, preset: Preset) -> Iterator[str]:
    import yaml

    yield f"PRESET:   {name}"
    yield f"SOURCE:   {preset.source}"
    yield ""
    yield "DESCRIPTION:"
    yield from _wrapped(preset.title, "    ")
    yield ""
    yield "FILLS IN (every line can be overridden; 0 means off):"
    algorithm = preset.algorithm.model_dump(mode="json", by_alias=True, exclude_none=True)
    settings = {
        "algorithm": _without_empty(algorithm),
        "batch": {"samplesPerPrompt": preset.samples_per_prompt},
    }
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=False)
    yield from ("    " + line for line in text.splitlines())


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        inner = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item not in ({}, [])}
    return value


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent) if text else []


def _yaml(value: Any) -> str:
    """A default as it would stand in the job file."""
    if isinstance(value, float):
        return f"{value:g}" if value != int(value) or abs(value) >= 1e6 else f"{value:.1f}"
    return value if isinstance(value, str) else json.dumps(value)
