"""Makes violations of pydantic's errors: what is wrong and what to do, in the words of the job file."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from rljob_api import schema
from rljob_api.schema import Node
from rljob_api.spec.base import IN_MODULE
from rljob_api.violations import Violation, path_of

Location = tuple[str | int, ...]


def violations_of(error: ValidationError) -> list[Violation]:
    """Every error of a validation as a violation, in the order of the document."""
    details = error.errors(include_url=False)
    places = [tuple(entry["loc"]) for entry in details]
    meant = probably_meant(error)
    # pydantic counts only the good items of a list: "too short" beside a bad item says nothing new. Nor does "required"
    # of a field whose name is written wrong.
    return [
        _violation(entry)
        for entry, place in zip(details, places, strict=True)
        if (entry["type"] != "too_short" or not any(p[: len(place)] == place and p != place for p in places))
        and (entry["type"] != "missing" or path_of(place) not in meant)
    ]


def probably_meant(error: ValidationError) -> set[str]:
    """Paths of the fields that unknown names were meant to be."""
    unknown = (entry["loc"] for entry in error.errors(include_url=False) if entry["type"] == "extra_forbidden")
    return {path_of((*place[:-1], near)) for place in unknown if (near := near_field(place))}


def near_field(location: Location) -> str | None:
    """The field that is probably meant by an unknown name."""
    wrong, parent = str(location[-1]), schema.find(location[:-1])
    names = list(parent.fields) if parent is not None else []
    camel = to_camel(wrong)
    return camel if camel in names else did_you_mean(wrong, names)


def did_you_mean(wrong: str, known: Iterable[str]) -> str | None:
    """The known name that a wrong one probably stands for: one of its words (async for fullyAsync), its letters in
    another order, letters that are nearly the same, or its initials (lr for learningRate)."""
    by_letters = {_letters(name): name for name in known}
    letters = _letters(wrong)
    if letters in by_letters:
        return by_letters[letters]
    close = difflib.get_close_matches(letters, by_letters, n=3, cutoff=0.75)
    with_it = [name for name in by_letters.values() if letters in _words(name)]
    if len(with_it) == 1 and not difflib.get_close_matches(letters, by_letters, cutoff=0.9):
        return with_it[0]
    if close:
        return by_letters[next((name for name in close if sorted(name) == sorted(letters)), close[0])]
    by_initials = {"".join(word[0] for word in _words(name)): name for name in by_letters.values()}
    return by_initials.get(letters) if len(letters) > 1 else None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def shown(value: Any) -> str:
    """A value as a reader of the job file knows it, shortened."""
    if isinstance(value, dict | list):
        return f"a {'map' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + '..."'


_EXPECTED = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a map",
    "map": "a map",
    "list": "a list",
    "quantity": "a quantity such as 4, 500m or 16Gi",
    "any": "a value",
}

_PATTERNS: Mapping[str, str] = {
    "label": "use lower-case letters, digits and '-', with a letter or digit at both ends",
    "function": "write module:function, for example my_rewards:score",
    "image": "write registry/name:tag, with the name in lower case",
    "backend": "write fsdp2, or your own class as module:Class",
    "env": "use letters, digits and '_', not starting with a digit",
    "path": "use an absolute path without ':'",
    "quantity": "write a quantity such as 4, 500m or 16Gi",
    "key": "use at most 63 letters, digits, '_', '.' and '-', with a letter or digit at both ends",
    "source": "use letters, digits, '_', '.', '-' and '/', with a letter or digit at both ends",
}


def _violation(details: Any) -> Violation:
    location: Location = tuple(details["loc"])
    is_key = bool(location) and location[-1] == "[key]"
    if is_key:
        location = location[:-1]
    location = _document_location(location)
    node = schema.find(location)
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    path = path_of(location) or "the document"
    if kind == "missing":
        return Violation(path, "is required", f"add it: {_summary(node)}" if node else "add it")
    if kind == "extra_forbidden":
        return Violation(path, "there is no such field", _unknown_field(location))
    if node is None:
        return Violation(path, details["msg"], "correct it; see `rljob explain`")
    if is_key:
        container = schema.find(location[:-1])
        keys = container.keys if container is not None and container.keys is not None else node
        _, remedy = _constraint(kind, value, context, keys)
        return Violation(path_of(location[:-1]), f"the name {shown(location[-1])} does not have the right form", remedy)
    problem, remedy = _constraint(kind, value, context, node)
    return Violation(path, problem, remedy)


def _document_location(location: Location) -> Location:
    """The location in the document: the parts that pydantic adds for its branches of unions and types are left out."""
    kept: list[str | int] = []
    for part in location:
        if schema.find([*kept, part]) is None and kept:
            parent = schema.find(kept)
            if parent is not None and parent.kind not in ("object",):
                continue
        kept.append(part)
    return tuple(kept)


def _constraint(kind: str, value: Any, context: Mapping[str, Any], node: Node) -> tuple[str, str]:
    """Problem and remedy for a value of the wrong type or outside its bounds."""
    if kind == "literal_error":
        return _choice(value, node)
    if kind.endswith("_type") or kind in ("is_instance_of", "invalid-json-value"):
        return _wrong_type(value, node)
    if kind == "string_pattern_mismatch":
        if (node.pattern or "").startswith("^https?://"):
            return _address(str(value))
        return f"{shown(value)} does not have the right form", _form(node, str(value))
    if kind in ("string_too_short", "string_too_long", "too_short", "too_long"):
        counted = {"list": "items", "map": "entries"}.get(node.kind, "characters")
        has = context.get("actual_length", len(value) if isinstance(value, str | list | dict) else "?")
        return f"has {has} {counted}", f"use {node.bounds}"
    if kind == "finite_number":
        return f"{value} is not a finite number", f"use {node.bounds or 'a number'}"
    if kind.startswith(("greater_than", "less_than")):
        side = "too small" if kind.startswith("greater") else "too large"
        return f"{shown(value)} is {side}", f"must be {node.bounds}"
    return f"{shown(value)} is not valid", f"write {node.type_name}"


def _choice(value: Any, node: Node) -> tuple[str, str]:
    if not isinstance(value, str):
        problem, _ = _wrong_type(value, node)
        return problem, f"choose one of {', '.join(node.choices)}"
    problem = f"{shown(value)} is not one of {', '.join(node.choices)}"
    close = did_you_mean(value, node.choices)
    return problem, f"did you mean {close}?" if close else "choose one of them"


def _beyond_every_number(text: str) -> bool:
    """Whether it is written as a number that no float holds, and has therefore been left a text."""
    bare = text.replace("_", "")
    if re.fullmatch(r"[-+]?0[xob][0-9a-f]{257,}", bare, re.IGNORECASE):
        return True
    if not re.fullmatch(r"[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", bare, re.IGNORECASE):
        return False
    return math.isinf(float(bare))


def _wrong_type(value: Any, node: Node) -> tuple[str, str]:
    expected = _EXPECTED[node.kind]
    actual = f"the text {shown(value)}" if isinstance(value, str) else shown(value)
    problem = f"must be {expected}, not {actual}"
    numeric = node.kind in ("integer", "number")
    if value is None:
        return f"must be {expected}, but is empty", "give it a value, or remove the line"
    too_large = isinstance(value, str) and _beyond_every_number(value)
    # Whole numbers that 64 bits do not hold are read as others.
    too_large = too_large or (node.kind == "integer" and isinstance(value, float) and abs(value) >= 2**63)
    if numeric and too_large:
        return f"must be {expected}, but {shown(value)} is too large for one", f"use {node.bounds or 'a smaller one'}"
    if isinstance(value, str) and numeric and re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", value, re.IGNORECASE):
        return problem, "remove the quotes"
    if isinstance(value, str) and node.kind == "boolean":
        return problem, "write true or false, without quotes"
    if node.kind == "string" and isinstance(value, bool):
        return (
            problem,
            f"put it in quotes (YAML reads words such as yes, no, on and off as booleans): '{str(value).lower()}'",
        )
    if node.kind == "string" and isinstance(value, int | float):
        return problem, f"put it in quotes: '{value}'"
    if node.kind == "integer" and isinstance(value, float):
        return problem, f"use {node.bounds or 'a whole number'}"
    if node.kind == "list":
        return problem, "start each item with '- ', or write them in [ ]"
    if node.kind in ("object", "map"):
        fields = ", ".join(list(node.fields)[:8])
        return problem, f"write name: value pairs{f', of {fields}' if fields else ''}"
    return problem, f"use {node.bounds or expected}"


def _form(node: Node, value: str) -> str:
    pattern = node.pattern or ""
    if node.kind == "quantity":
        return _PATTERNS["quantity"]
    if pattern.startswith(("^[a-z0-9]", "^([a-z0-9]")) and "/" not in pattern:
        return _PATTERNS["label"]
    if pattern.startswith("^(?:"):
        return _PATTERNS["image"]
    if pattern.startswith("^(fsdp2|"):
        return _PATTERNS["backend"]
    if pattern.startswith("^("):
        return _PATTERNS["key"]
    if ":" in pattern and pattern.startswith("^[A-Za-z_]"):
        return function_of_file(value) or _PATTERNS["function"]
    if pattern.startswith("^[A-Za-z_]"):
        return _PATTERNS["env"]
    if pattern.startswith("^/"):
        return _PATTERNS["path"]
    return _PATTERNS["source"]


def _address(text: str) -> tuple[str, str]:
    """What is wrong with the address of an endpoint. Where it may hold a secret it isn't repeated."""
    scheme, _, rest = text.partition("://")
    place = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if not rest or scheme not in ("http", "https"):
        said = shown(text) if "@" not in text and "?" not in text else "the address"
        return f"{said} does not begin with http:// or https://", "write https://host/path"
    if "@" in place:
        return "contains a user, and perhaps a password, which everybody who reads the job would see", "remove them"
    if "?" in rest or "#" in rest:
        return "contains a query or fragment, which everybody who reads the job would see", "remove it"
    if place.startswith("[") and "]" not in place:
        return f'{shown(text)} lacks the "]" after its IPv6 address', "write http://[::1]:8000/path"
    _, _, port = place.rpartition("]")[2].rpartition(":")
    if port.isdigit() and not 1 <= int(port) <= 65535:
        return f"{shown(text)} has the port {port}", "use 1 to 65535"
    return f"{shown(text)} is not the address of an endpoint", "write https://host:port/path"


def function_of_file(text: str) -> str | None:
    """What to write in the place of a function whose file is named; None: no file is."""
    file, _, function = text.partition(":")
    if not file.endswith(".py"):
        return None
    module = file.removesuffix(".py").removeprefix("./").replace("/", ".")
    if re.fullmatch(IN_MODULE, f"{module}:x") is None:
        module = file.removesuffix(".py").rpartition("/")[2]
        return f"put the file beside the job file, and write its name without .py: {module}:{function or 'function'}"
    return f"write the module, without .py: {module}:{function or 'function'}"


def _unknown_field(location: Location) -> str:
    """A remedy for a name that does not exist: a near name here, or the same name elsewhere in the tree."""
    if location == ("metadata", "generateName"):
        return "write metadata.name: applying a file again must change the same job, not create another"
    if near := near_field(location):
        return f"did you mean {near}?"
    parent = schema.find(location[:-1])
    known = ", ".join(parent.fields) if parent is not None else ""
    path = path_of(location)
    elsewhere = places_of(to_camel(str(location[-1])), path)
    if not elsewhere:
        return f"the fields here are {known}" if known else "remove it"
    hint = f"did you mean {' or '.join(elsewhere[:2])}?"
    return f"the fields here are {known}; or {hint}" if known and _is_far(elsewhere[0], path) else hint


def places_of(name: str, near: str) -> list[str]:
    """The paths of the fields that a name may stand for, of those the closest to ``near``."""
    paths = {path: node.name for path, node in schema.walk() if ".pod." not in path}
    meant = name if name in paths.values() else did_you_mean(name, paths.values())
    places = sorted((path for path in paths if paths[path] == meant), key=lambda path: (path.count("."), path))
    closest = [path for path in places if _shared(path, near) == max(_shared(other, near) for other in places)]
    return [path for path in closest if meant == name or not _is_far(path, near)]


def _is_far(one: str, other: str) -> bool:
    """Whether both are in sections, and in different ones."""
    return _shared(one, other) < 2 < len(other.split("."))


def _shared(one: str, other: str) -> int:
    """How many leading parts two dotted paths have in common."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _summary(node: Node) -> str:
    description = node.description.split(". ")[0].rstrip(".")
    return description[:1].lower() + description[1:] if description else node.type_name
