"""Changes to a job file: ``--set path=value`` from the command line, and files laid over it."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from rljob_api.yaml_reading import YamlError, read_value

_PART = re.compile(r"([^.\[\]]+)|\[([^\[\]]+)\]")
_ROOTS = ("spec", "metadata", "apiVersion", "kind")


def merged(document: Any, overlay: Any) -> Any:
    """The document with an overlay laid over it (JSON merge patch, RFC 7386): maps are merged field by field, ``null``
    removes a field, anything else, lists included, replaces what was there. Neither argument is changed."""
    if not isinstance(overlay, dict):
        return copy.deepcopy(overlay)
    result = dict(document) if isinstance(document, dict) else {}
    for name, value in overlay.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def apply(document: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy of the document with ``path=value`` assignments made, in order.

    Paths are dotted; ``spec.`` may be left out; list positions stand in brackets or as numbers
    (``reward.functions[0].weight``), the position after the last one appends; missing maps are created. Keys with dots
    stand in brackets (``pod.nodeSelector[kubernetes.io/arch]``). The value is read as YAML; ``null`` removes the field.
    Raises ``ValueError`` naming the assignment.
    """
    result = copy.deepcopy(document)
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        if not separator:
            raise ValueError(f"{assignment!r} has no '='; write path=value")
        try:
            value = read_value(text)
        except YamlError as problem:
            raise ValueError(f"{assignment!r}: the value is not YAML ({problem.problem})") from None
        _assign(result, _parse(path.strip(), assignment), value, assignment)
    return result


def _parse(path: str, assignment: str) -> list[str]:
    parts: list[str] = []
    position = 0
    while position < len(path):
        if path[position] == "." and parts and position + 1 < len(path) and path[position + 1] not in ".[":
            position += 1
        found = _PART.match(path, position)
        if found is None or (parts and path[position - 1] != "." and found[1]):
            raise ValueError(f"{assignment!r}: malformed path; write for example trainer.optimizer.learningRate=1e-6")
        parts.append(found[1] or found[2])
        position = found.end()
    if not parts:
        raise ValueError(f"{assignment!r} has no path before '='")
    return parts if parts[0] in _ROOTS else ["spec", *parts]


def _assign(document: Any, parts: list[str], value: Any, assignment: str) -> None:
    if not isinstance(document, dict):
        return  # refused as a whole by whoever reads it
    holder: Any = document
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        where = ".".join(parts[:depth]) or "the document"
        if isinstance(holder, list):
            if not re.fullmatch(r"[0-9]+", part) or int(part) > len(holder):
                raise ValueError(
                    f"{assignment!r}: {where} is a list of {len(holder)}; {part!r} is not a position in it"
                )
            index = int(part)
            if last and value is None:
                if index < len(holder):
                    del holder[index]
                return
            if index == len(holder):
                holder.append({})
            if last:
                holder[index] = value
            elif holder[index] is None:
                holder[index] = {}
            holder = holder[index]
        elif isinstance(holder, dict):
            if last:
                if value is None:
                    holder.pop(part, None)
                else:
                    holder[part] = value
                return
            if holder.get(part) is None:
                holder[part] = [] if parts[depth + 1] == "0" else {}
            holder = holder[part]
        else:
            raise ValueError(f"{assignment!r}: {where} is neither a map nor a list, so it has no {part!r}")
