"""Reads YAML the way kubectl does, so that a file means the same here and on a cluster.

kubectl turns YAML into JSON with sigs.k8s.io/yaml: YAML 1.1 scalars as go-yaml resolves them (``yes`` is true, ``1e-6``
a number, ``010`` is 8, a date is text), whole floats become integers, map keys become text, NaN is an error. Stricter
than kubectl in two points where it silently drops what was written: duplicate keys, and a merge (``<<``) that comes
after a key which it overrides. Errors carry line and column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

MAX_CHARACTERS = 3 * 1024 * 1024
"""An API server takes no request that is longer."""
MAX_NODES = 200_000
MAX_DEPTH = 100

Path = tuple[str | int, ...]


class YamlError(ValueError):
    """Text that is not YAML, or not YAML that can become JSON. Line and column count from 1."""

    def __init__(self, problem: str, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}: {problem}")
        self.problem, self.line, self.column = problem, line, column


@dataclass(frozen=True)
class Document:
    """One YAML document as plain data, and where each key and list item stands (line, column)."""

    data: Any
    positions: Mapping[Path, tuple[int, int]]

    def line_of(self, path: Path) -> int | None:
        """The line of ``path``, or of the closest part of it that exists."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.positions:
                return self.positions[path[:length]][0]
        return None


def read_documents(text: str) -> list[Document]:
    """All documents of a file; empty ones are left out. Raises ``YamlError``."""
    if len(text) > MAX_CHARACTERS:
        raise YamlError(f"the file has more than {MAX_CHARACTERS} characters", 1, 1)
    documents = []
    try:
        for node in yaml.compose_all(text.removeprefix("\ufeff"), Loader=_Loader):
            reader = _Reader()
            data = reader.value(node, ())
            if data is not None:
                documents.append(Document(data, reader.positions))
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise YamlError(problem.problem or str(problem), line, column) from None
    except yaml.reader.ReaderError as problem:
        before = text[: problem.position]
        line, column = before.count("\n") + 1, problem.position - before.rfind("\n")
        raise YamlError("control characters are not allowed", line, column) from None
    except RecursionError:
        raise YamlError(f"nested more than {MAX_DEPTH} levels deep", 1, 1) from None
    return documents


def read_value(text: str) -> Any:
    """One YAML value, as on the right side of ``--set path=value``. Raises ``YamlError``."""
    documents = read_documents(text)
    if len(documents) > 1:
        raise YamlError("more than one document", 1, 1)
    return documents[0].data if documents else None


class _Loader(yaml.BaseLoader):
    """Composes nodes only; a plain scalar without a tag gets the tag ``plain``."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        plain = event.tag is None and event.implicit[0]
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if plain:
            node.tag = _PLAIN
        return node


_PLAIN = "plain"
_TAG = "tag:yaml.org,2002:"
_TRUE = {"y", "Y", "yes", "Yes", "YES", "on", "On", "ON", "true", "True", "TRUE"}
_FALSE = {"n", "N", "no", "No", "NO", "off", "Off", "OFF", "false", "False", "FALSE"}
_NULL = {"", "~", "null", "Null", "NULL"}
_NOT_FINITE = re.compile(r"^(\.nan|\.NaN|\.NAN|[-+]?\.(inf|Inf|INF))$")
_INTEGER = re.compile(r"^([-+]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)$")
_MOST_DIGITS = 1100
"""More, even binary ones, than the largest float has (1,024)."""
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")


def plain_scalar(text: str) -> Any:
    """The value of an unquoted scalar. ``math.nan`` and infinities are returned as such."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _NOT_FINITE.match(text):
        return float(text.replace(".", "", 1))
    if text[0] not in "+-.0123456789":
        return text
    bare = text.replace("_", "")
    if found := _INTEGER.match(bare):
        # A number that no float holds stays text, as there.
        return text if len(bare) > _MOST_DIGITS else _whole(_integer(found[1], found[2]), text)
    if _FLOAT.match(bare):
        value = float(bare)
        return text if math.isinf(value) else _as_json(value)
    return text


def _integer(sign: str, digits: str) -> int:
    prefix = digits[:2].lower()
    if prefix in ("0x", "0b"):
        value = int(digits, 0)
    elif digits[0] == "0":
        value = int(digits[1:].lstrip("oO") or "0", 8)
    else:
        value = int(digits)
    return -value if sign == "-" else value


def _whole(value: int, text: str) -> int | float | str:
    try:
        return _as_json(value)
    except OverflowError:
        return text


def _as_json(value: int | float) -> int | float:
    """JSON knows no difference between 3 and 3.0; numbers beyond 64 bits are floats."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and -(2**63) <= value < 2**63 else value
    return value if -(2**63) <= value < 2**63 else float(value)


class _Reader:
    """Turns composed nodes into plain data."""

    def __init__(self) -> None:
        self.positions: dict[Path, tuple[int, int]] = {}
        self._open: set[int] = set()
        self._nodes = 0

    def value(self, node: yaml.Node, path: Path) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _error(f"aliases expand to more than {MAX_NODES} values", node)
        if len(path) > MAX_DEPTH:
            raise _error(f"nested more than {MAX_DEPTH} levels deep", node)
        self.positions.setdefault(path, _place(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            raise _error("an anchor contains itself", node)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        value = node.value if node.tag != _PLAIN else plain_scalar(node.value)
        wanted = node.tag.removeprefix(_TAG)
        if node.tag.startswith(_TAG) and wanted in ("int", "float", "bool", "null"):
            value = plain_scalar(node.value)
            kinds: dict[str, tuple[type, ...]] = {
                "int": (int,),
                "float": (int, float),
                "bool": (bool,),
                "null": (type(None),),
            }
            if not isinstance(value, kinds[wanted]) or (isinstance(value, bool) and wanted != "bool"):
                raise _error(f"{node.value!r} is not of the type !!{wanted}", node)
        if node.tag == _TAG + "binary":
            raise _error("binary values are not supported", node)
        if isinstance(value, str) and "\0" in value:
            raise _error("text must not contain the character NUL", node)
        if isinstance(value, float) and not math.isfinite(value):
            raise _error(f"{node.value} is not a JSON number", node)
        if isinstance(value, str) and not value.isascii():
            return _whole_characters(value, node)
        return value

    def _mapping(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        written: dict[str, tuple[int, int]] = {}
        for key_node, value_node in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value == "<<" and key_node.tag == _PLAIN:
                self._merge(result, value_node, path, written, key_node)
                continue
            key = self._key(key_node)
            if key in written:
                raise _error(f"the key {key!r} appears twice, first on line {written[key][0]}", key_node)
            written[key] = _place(key_node)
            self.positions[(*path, key)] = _place(key_node)
            result[key] = self.value(value_node, (*path, key))
        return result

    def _merge(
        self,
        result: dict[str, Any],
        node: yaml.Node,
        path: Path,
        written: Mapping[str, tuple[int, int]],
        at: yaml.Node,
    ) -> None:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        # The first of several parts wins, hence the reverse order.
        for part in reversed(parts):
            if not isinstance(part, yaml.MappingNode):
                raise _error("<< needs a map, or a list of maps", at)
            merged = self.value(part, path)
            if overridden := sorted(written.keys() & merged.keys()):
                raise _error(f"<< would override {overridden[0]!r} before it; put << first", at)
            result.update(merged)

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise _error("a key must be text", node)
        value = self._scalar(node)
        if value is None:
            raise _error("a key must not be null", node)
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value)


def _whole_characters(text: str, node: yaml.Node) -> str:
    """JSON writes a character beyond U+FFFF as two escapes, which PyYAML reads as two halves. A half alone is refused:
    no file, tokenizer or API server takes it."""
    joined = text.encode("utf-16-le", "surrogatepass")
    try:
        return joined.decode("utf-16-le")
    except UnicodeDecodeError as problem:
        half = int.from_bytes(joined[problem.start : problem.start + 2], "little")
        raise _error(f"\\u{half:04x} is half a surrogate pair, without its other half", node) from None


def _place(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _error(problem: str, node: yaml.Node) -> YamlError:
    return YamlError(problem, *_place(node))


def walk(data: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value in ``data`` with its path, parents first."""
    yield path, data
    if isinstance(data, dict):
        for key, value in data.items():
            yield from walk(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from walk(value, (*path, index))
