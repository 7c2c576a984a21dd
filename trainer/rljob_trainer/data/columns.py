"""Columns of a row: names, dotted paths into nested values, and ``{column}`` templates."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Mapping
from typing import Any

from rljob_trainer.errors import DataError, JobFileError

Row = Mapping[str, Any]


def column(row: Row, name: str) -> Any:
    """The value under ``name``: a column, or a path such as ``reward_model.ground_truth``. None for NaN too, which is
    what pandas makes of an empty cell and Python's JSON writes. ``KeyError`` when absent."""
    value: Any = row
    for part in (name,) if name in row else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = value[part]
    return None if is_empty(value) else value


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing: null, or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


MOST_LEVELS = 64
"""Deeper columns than any data set has: whoever walks through a row (rewards in other processes, Ray, the ledger) does
so recursively."""


def levels(value: Any) -> int:
    """How many maps and lists lie inside each other, counted without recursion up to one more than are allowed."""
    level, layer = 0, [value]
    while level <= MOST_LEVELS:
        inner: list[Any] = []
        found = False
        for item in layer:
            if isinstance(item, Mapping):
                inner.extend(item.values())
                found = True
            elif isinstance(item, list | tuple):
                inner.extend(item)
                found = True
        if not found:
            break
        level, layer = level + 1, inner
    return level


def too_deep(place: str) -> DataError:
    return DataError(
        f"{place}: its columns are nested more than {MOST_LEVELS} levels deep; flatten the row or remove it"
    )


def is_template(text: str) -> bool:
    """Whether ``data.prompt`` is a template over columns and not a column's name."""
    return "{" in text or "}" in text


class NullColumnError(ValueError):
    """A template names a column that is null in this row; the only argument is its name."""


class Template:
    """Text with ``{column}`` places (``{{`` and ``}}`` stand for braces). Nothing in it is evaluated."""

    def __init__(self, text: str, field: str) -> None:
        """``field`` is the job file's path, for messages. Raises ``JobFileError`` on malformed templates."""
        self.text = text
        try:
            self._parts = list(string.Formatter().parse(text))
        except ValueError as problem:
            raise JobFileError(f"{field}: malformed template ({problem}); write {{{{ and }}}} for braces") from problem
        for _, name, form, conversion in self._parts:
            if name == "" or (name is not None and (form or conversion)):
                raise JobFileError(f"{field}: braces must enclose a column name and nothing else, as in {{question}}")
        self.columns = tuple(dict.fromkeys(name for _, name, _, _ in self._parts if name))

    def render(self, row: Row) -> str:
        """The text with this row's values. ``KeyError`` names a missing column, ``NullColumnError`` a null."""
        return "".join(literal + ("" if name is None else _cell(row, name)) for literal, name, _, _ in self._parts)


def _cell(row: Row, name: str) -> str:
    value = column(row, name)
    if value is None:
        raise NullColumnError(name)
    return as_text(value)


def as_text(value: Any) -> str:
    """A cell as text. Whole floats lose their ``.0``: Parquet turns integers into floats beside empty cells."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def first_without(rows: Iterable[tuple[int, Row]], name: str) -> int | None:
    """The number of the first of some numbered rows that lacks a column; None: all have it."""
    for index, row in rows:
        try:
            column(row, name)
        except KeyError:
            return index
    return None


def first_null(rows: Iterable[tuple[int, Row]], name: str) -> int | None:
    """The number of the first of some numbered rows in which a column is there and null; None: there is none."""
    for index, row in rows:
        try:
            if column(row, name) is None:
                return index
        except KeyError:
            continue
    return None


def half_a_character(place: str, name: str, escape: str) -> DataError:
    """What is said of a row in which a text holds a lone surrogate: no tokenizer and no file takes it."""
    return DataError(
        f'{place}: the column "{name}" contains half a character ({escape}, an unpaired surrogate): the text was '
        "truncated or badly encoded; correct it, or remove the row"
    )


def null_column(place: str, name: str, field: str) -> DataError:
    """What is said of a row in which a column that ``field`` of the job file names must not be null, and is."""
    return DataError(f'{place}: the column "{name}" (set by {field}) is null or NaN; fill it in, or remove the row')


def lacks_column(place: str, row: Row, name: str, field: str) -> DataError:
    """What is said of a row without a column that ``field`` of the job file names."""
    return DataError(
        f'{place}: the row has no column "{name}" (set by {field}); it has {", ".join(row) or "none"}; '
        "add it to the row, or remove the row"
    )


def require_columns(wanted: Iterable[str], present: Iterable[str], field: str, where: str) -> None:
    """Raises ``JobFileError`` naming every wanted column that a data set lacks, and those that it has."""
    present = tuple(present)
    missing = [name for name in wanted if name not in present and name.split(".")[0] not in present]
    if missing:
        raise JobFileError(
            f"{field}: {where} has no column {', '.join(map(repr, missing))}; it has {', '.join(present) or 'none'}"
        )
