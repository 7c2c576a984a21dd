"""Where rows come from: JSON Lines, Parquet, Hugging Face data sets, generated tasks.

Every kind gives rows by position without holding them as Python objects, and says of each where it is from, so
that a bad row can be found. Text files are read through the page cache: a large file opens as fast as its lines
can be counted.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import mmap
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljob_trainer.data.columns import (
    MOST_LEVELS,
    Row,
    first_null,
    first_without,
    half_a_character,
    is_empty,
    levels,
    too_deep,
)
from rljob_trainer.data.feed import Rows, made_by
from rljob_trainer.data.order import Int64Array
from rljob_trainer.data.tasks import Problem
from rljob_trainer.errors import DataError, UnreachableError
from rljob_trainer.storage.bucket import REMEDY, reason
from rljob_trainer.texts import surrogate_within

CHECKED_BYTES = 64 << 20
"""JSON Lines files up to this size are parsed whole when opened; of larger ones the first rows and the last."""
CHECKED_ROWS = 4096
"""So many first rows of a larger file, and of Parquet when a column lies inside another one."""

LONGEST_ROW = 64 << 20
"""Bytes of one line. A longer one is a file whose rows are not on lines of their own."""
_MAY_HOLD_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Bytes of a JSON text: escapes of the surrogates' range, most of them pairs, and what no UTF-8 has."""
_JSON_LINES = (".jsonl", ".ndjson", ".json")


def open_rows(
    source: str, *, split: str | None = None, limit: int | None = None, base: Path | None = None, field: str = "source"
) -> Rows:
    """The rows of ``source``: a file, several (``data/*.jsonl``), a folder, or ``hf://name[:configuration]``.

    ``split`` chooses a Hugging Face split, or the files of a folder whose names begin with it. A plain name that is
    no file or folder is a Hugging Face data set. ``base`` is where relative paths start, ``field`` the job file's
    path for messages. Raises ``DataError`` saying what is wrong with which file and line, and what to do.
    """
    source = source.removeprefix("file://")
    if source.startswith("hf://"):
        rows = _hub_rows(source.removeprefix("hf://"), split, field)
    elif "://" in source:
        rows = _files_rows([_fetched(source, field)], field)
    else:
        base = base or Path.cwd()
        path = base / Path(source).expanduser()
        if path.is_file():
            rows = _files_rows([path], field)
        elif path.is_dir():
            rows = _folder_rows(path, split, field)
        elif files := sorted(Path(name) for name in glob.glob(str(path))):
            rows = _files_rows(files, field)
        elif path.suffix in (*_JSON_LINES, ".parquet") or source.startswith((".", "/", "~")) or glob.has_magic(source):
            raise DataError(f"{field}: there is no file {path}; check the path (relative ones start at {base})")
        else:
            rows = _hub_rows(source, split, field)
    return rows if limit is None or limit >= len(rows) else FirstRows(rows, limit)


class _TwiceError(ValueError):
    """A name that stands twice in one JSON object."""


def _each_once(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_each_once)


class JsonLines:
    """One JSON object a line. Empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.stat().st_size == 0:
                raise DataError(f"{path} is empty; it should contain one JSON object per line")
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as problem:
            raise DataError(f"{path} cannot be read ({problem.strerror}); check its permissions") from problem
        if self._bytes[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise DataError(f"{path} is UTF-16 text, but JSON Lines must be UTF-8; save it as UTF-8")
        self._lines, self._starts, self._ends = _line_table(self._bytes)
        if len(self._starts) == 0:
            raise DataError(f"{path} has only empty lines; it should contain one JSON object per line")
        self._checked = self._rows_to_check()
        self._shapes: dict[tuple[str, ...], int] = {}
        """The sets of columns that occur, each with its first row."""
        self._nulls: dict[str, int] = {}
        """The columns that are null somewhere, each with the first row where."""
        for index in self._checked:
            row = self[index]
            self._shapes.setdefault(tuple(row), index)
            for name, value in row.items():
                if is_empty(value):
                    self._nulls.setdefault(name, index)
        self.columns = tuple(self[0])

    def _rows_to_check(self) -> Sequence[int]:
        if len(self._bytes) <= CHECKED_BYTES:
            return range(len(self))
        first = min(CHECKED_ROWS, int(np.searchsorted(self._ends, CHECKED_BYTES)))
        return sorted({*range(first), 0, len(self) - 1})

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        size = int(self._ends[index] - self._starts[index])
        if size > LONGEST_ROW:
            raise DataError(
                f"{self.place(index)}: the line has {size / 1e6:,.0f} MB, more than the {LONGEST_ROW / 1e6:,.0f} "
                "allowed for a row; write one JSON object per line"
            )
        text = self._bytes[self._starts[index] : self._ends[index]]
        if index == 0 and self._starts[0] == 0:
            text = text.removeprefix(codecs.BOM_UTF8)
        try:
            row = _DECODER.decode(text.decode("utf-8"))
            if text.count(b"[") + text.count(b"{") > MOST_LEVELS and levels(row) > MOST_LEVELS:
                raise too_deep(self.place(index))
        except RecursionError:
            raise too_deep(self.place(index)) from None
        except UnicodeDecodeError as problem:
            raise DataError(
                f"{self.place(index)}: the text is not UTF-8 (byte {problem.start} of the line); save the file as UTF-8"
            ) from None
        except _TwiceError as twice:
            raise DataError(
                f"{self.place(index)}: the name {str(twice)[:60]!r} appears twice in one object; remove one"
            ) from None
        except ValueError as problem:
            if not isinstance(problem, json.JSONDecodeError):  # Python's limit of digits
                raise DataError(
                    f"{self.place(index)}: an integer has more than {sys.get_int_max_str_digits()} digits; shorten it, "
                    "or write it as a quoted string"
                ) from None
            if b"\r" in text.rstrip(b"\r"):
                raise DataError(
                    f"{self.place(index)}: lines end with carriage returns only, but JSON Lines need line feeds; "
                    "convert the file (tr '\\r' '\\n')"
                ) from None
            cut = index == len(self) - 1 and self._ends[index] == len(self._bytes) and problem.msg != "Extra data"
            raise DataError(
                f"{self.place(index)}: {'the file ends in the middle of a JSON object' if cut else 'not valid JSON'} "
                f"({problem}); {'copy or download the file again' if cut else 'correct the line or remove it'}. "
                f"It begins {text[:60].decode(errors='replace')!r}"
            ) from None
        if not isinstance(row, dict):
            raise DataError(
                f"{self.place(index)}: a line must contain one JSON object, not a {type(row).__name__}; "
                "write each row as an object on its own line"
            )
        if _MAY_HOLD_SURROGATES.search(text) and (found := surrogate_within(row)):
            raise half_a_character(self.place(index), *found)
        return row

    def place(self, index: int) -> str:
        return f"{self.path}, line {self._lines[index]}"

    def first_without(self, name: str) -> int | None:
        if name in self.columns:
            return min((index for columns, index in self._shapes.items() if name not in columns), default=None)
        return first_without(((index, self[index]) for index in self._checked), name)

    def first_null(self, name: str) -> int | None:
        if name in self.columns:
            return self._nulls.get(name)
        return first_null(((index, self[index]) for index in self._checked), name)


def _line_table(content: mmap.mmap) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Numbers (from 1), starts and ends of the lines that are not blank."""
    text = np.frombuffer(content, dtype=np.uint8)
    breaks = np.flatnonzero(text == ord("\n"))
    starts = np.concatenate(([0], breaks + 1))
    ends = np.concatenate((breaks, [len(content)]))
    lengths = ends - starts
    # A line break of another system leaves a carriage return on a blank line.
    only_return = (lengths == 1) & (text[np.minimum(starts, len(content) - 1)] == ord("\r"))
    kept = (lengths > 0) & ~only_return
    return np.flatnonzero(kept) + 1, starts[kept], ends[kept]


class Parquet:
    """A Parquet file, kept in Arrow's columnar form."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            self._table = pyarrow.parquet.ParquetFile(path).read().combine_chunks()
            self._table.validate(full=True)  # text that is not UTF-8, offsets beyond their data
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as problem:
            raise DataError(
                f"{path} cannot be read as Parquet ({_first_line(problem)}); copy or download the file again"
            ) from problem
        self.columns = tuple(self._table.column_names)
        if twice := sorted({name for name in self.columns if self.columns.count(name) > 1}):
            raise DataError(f"{path} has more than one column {twice[0]!r}; give each its own name")
        if any(_type_levels(field.type) >= MOST_LEVELS for field in self._table.schema):
            raise too_deep(str(path))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        try:
            row: Row = self._table.slice(index, 1).to_pylist()[0]
        except (ValueError, OverflowError, ArithmeticError) as problem:  # a time that Python has no word for
            raise DataError(
                f"{self.place(index)}: a value cannot be read ({_first_line(problem)}); correct the row or remove it"
            ) from problem
        return row

    def place(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def first_without(self, name: str) -> int | None:
        if name in self.columns:
            return None
        return first_without(((index, self[index]) for index in range(min(len(self), CHECKED_ROWS))), name)

    def first_null(self, name: str) -> int | None:
        if name not in self.columns:
            return first_null(((index, self[index]) for index in range(min(len(self), CHECKED_ROWS))), name)
        import pyarrow.compute

        column = self._table.column(name)
        may_be_nan = pyarrow.types.is_floating(column.type)
        if not column.null_count and not may_be_nan:
            return None
        found = int(pyarrow.compute.index(column.is_null(nan_is_null=may_be_nan), True).as_py())
        return None if found < 0 else found


def _type_levels(kind: Any) -> int:
    """Levels of Arrow's nested types, counted without recursion."""
    level, layer = 0, [kind]
    while layer and level < MOST_LEVELS:
        layer = [part.field(n).type for part in layer for n in range(part.num_fields)]
        level += 1
    return level


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]


class HuggingFace:
    """One split of a Hugging Face data set."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset
        self._name = name
        self.columns = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        row: Row = self._dataset[index]
        return row

    def place(self, index: int) -> str:
        return f"{self._name}, row {index}"

    def first_without(self, name: str) -> int | None:
        """None: all rows have the same columns."""
        return None

    def first_null(self, name: str) -> int | None:
        """None: a row is looked at when it is read."""
        return None


class TaskRows:
    """The problems of a generated task, columns ``question`` and ``answer``."""

    columns = ("question", "answer")

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        self._name = name
        self._problems = problems

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Row:
        problem = self._problems[index]
        return {"question": problem.prompt, "answer": problem.answer}

    def place(self, index: int) -> str:
        return f"task {self._name}, problem {index}"

    def first_without(self, name: str) -> int | None:
        """None: all problems have the same columns."""
        return None

    def first_null(self, name: str) -> int | None:
        """None: no problem lacks its text."""
        return None


class FirstRows:
    """The first ``limit`` rows of others."""

    def __init__(self, rows: Rows, limit: int) -> None:
        self._rows, self._limit = rows, limit
        self.columns = rows.columns

    @property
    def made_by(self) -> str | None:
        return made_by(self._rows)

    def __len__(self) -> int:
        return self._limit

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def place(self, index: int) -> str:
        return self._rows.place(index)

    def first_without(self, name: str) -> int | None:
        return self._within(self._rows.first_without(name))

    def first_null(self, name: str) -> int | None:
        return self._within(self._rows.first_null(name))

    def _within(self, index: int | None) -> int | None:
        return index if index is not None and index < self._limit else None


class Chain:
    """Several files one after the other. They must have the same columns."""

    def __init__(self, parts: Sequence[JsonLines | Parquet]) -> None:
        self._parts = tuple(parts)
        self._starts = np.cumsum([0, *(len(part) for part in parts)])
        self.columns = parts[0].columns
        for part in parts[1:]:
            if set(part.columns) != set(self.columns):
                raise DataError(
                    f"{part.path} has the columns {', '.join(part.columns)}, but {parts[0].path} has "
                    f"{', '.join(self.columns)}; files of one source must have the same columns: make them two sources"
                )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        part, row = self._locate(index)
        return part[row]

    def place(self, index: int) -> str:
        part, row = self._locate(index)
        return part.place(row)

    def first_without(self, name: str) -> int | None:
        return self._first(part.first_without(name) for part in self._parts)

    def first_null(self, name: str) -> int | None:
        return self._first(part.first_null(name) for part in self._parts)

    def _first(self, found: Iterable[int | None]) -> int | None:
        """The first of the rows that the parts have found, each counted from its part's start."""
        for start, index in zip(self._starts.tolist(), found, strict=False):
            if index is not None:
                return int(start) + index
        return None

    def _locate(self, index: int) -> tuple[JsonLines | Parquet, int]:
        which = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._parts[which], index - int(self._starts[which])


def _files_rows(files: Sequence[Path], field: str) -> Rows:
    parts: list[JsonLines | Parquet] = []
    for file in files:
        if file.suffix in _JSON_LINES:
            parts.append(JsonLines(file))
        elif file.suffix == ".parquet":
            parts.append(Parquet(file))
        else:
            raise DataError(
                f"{field}: {file} is neither JSON Lines ({', '.join(_JSON_LINES)}) nor Parquet (.parquet); convert "
                f"{'CSV' if file.suffix == '.csv' else 'it'} to one of them first"
            )
    return parts[0] if len(parts) == 1 else Chain(parts)


def _folder_rows(folder: Path, split: str | None, field: str) -> Rows:
    """A folder written by ``datasets.save_to_disk``, or one with data files."""
    if (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists():
        from datasets import load_from_disk

        try:
            found = load_from_disk(str(folder))
        except MemoryError:
            raise
        except Exception as problem:  # of its own, of Arrow, of JSON, KeyError ...
            raise DataError(
                f"{field}: {folder} cannot be read as a saved data set "
                f"({type(problem).__name__}: {_first_line(problem)}); copy the folder again"
            ) from problem
        return _one_split(found, str(folder), split, field)
    files = sorted(file for file in folder.iterdir() if file.suffix in (*_JSON_LINES, ".parquet"))
    if split is not None:
        files = [file for file in files if file.name.startswith(split)]
    if not files:
        beginning = f" whose names begin with {split!r} (the split)" if split else ""
        raise DataError(f"{field}: {folder} has no .jsonl or .parquet files{beginning}; check the path")
    return _files_rows(files, field)


def _hub_rows(name: str, split: str | None, field: str) -> Rows:
    """A data set of the hub. ``HF_HOME`` and ``HF_HUB_OFFLINE`` are honoured."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path, _, configuration = name.partition(":")
    try:
        found = load_dataset(path, configuration or None)
    except (DatasetsError, ValueError, OSError) as problem:
        first_line = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise DataError(
            f"{field}: {name!r} is not a file or folder and could not be loaded from the hub ({first_line}). Check "
            "the name (a configuration follows a colon: hf://owner/name:configuration); without a network, download "
            "it elsewhere and use the files, or copy that cache and set HF_HOME and HF_HUB_OFFLINE=1"
        ) from problem
    return _one_split(found, name, split, field)


def _one_split(found: Any, name: str, split: str | None, field: str) -> Rows:
    if not isinstance(found, dict):
        return HuggingFace(found, name)
    split = split or (next(iter(found)) if len(found) == 1 else "train")
    if split not in found:
        raise DataError(f"{field}: {name} has no split {split!r}; it has {', '.join(found)}: set split to one of them")
    return HuggingFace(found[split], f"{name} ({split})")


def _local_name(path: str) -> str:
    """The name of a copy: files of one name lie in many folders, and the name's ending says what a file is."""
    return f"{hashlib.sha256(path.encode()).hexdigest()[:16]}-{path.rpartition('/')[2]}"


def _fetched(url: str, field: str) -> Path:
    """A local copy of a remote file, through fsspec's cache."""
    import fsspec

    if url.startswith("pvc://"):
        raise DataError(f"{field}: {url} is a volume of the cluster; on this machine, use the path of a local copy")
    try:
        return Path(fsspec.open_local(f"filecache::{url}", filecache={"cache_mapper": _local_name}))
    except (FileNotFoundError, PermissionError, ImportError, ValueError) as problem:
        raise DataError(
            f"{field}: {url} cannot be read ({problem}); check the address, or copy the file here"
        ) from problem
    except Exception as problem:  # a store that cannot be reached now: another try may help
        raise UnreachableError(f"{field}: {url} cannot be read: {reason(problem)}; {REMEDY}") from problem
