"""The passages of a corpus."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.data.columns import Row, column, lacks_column, null_column
from rljob_trainer.data.feed import Rows
from rljob_trainer.data.sources import CHECKED_ROWS, open_rows
from rljob_trainer.errors import DataError, JobFileError
from rljob_trainer.world.protocol import WorldError

if TYPE_CHECKING:
    from rljob_api.spec.environment import CorpusSpec


@dataclass(frozen=True, slots=True)
class Passage:
    """A text and its title, which is empty where passages have none."""

    title: str
    text: str

    @property
    def whole(self) -> str:
        """What is indexed of it."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    @property
    def seal(self) -> int:
        """A number of 64 bits by which the passage is known."""
        digest = hashlib.blake2b(f"{len(self.title)} {self.title}{self.text}".encode(), digest_size=8).digest()
        return int.from_bytes(digest)


class Corpus:
    """Passages by position, read from their source when they are asked for: the file stays what it was, or it is
    noticed."""

    def __init__(self, given: CorpusSpec, field: str, base: Path) -> None:
        """``field``: where the job names it; ``base``: where relative paths start. Raises ``DataError`` and
        ``JobFileError`` for what can't be opened, has no rows, or fewer than a call is to return."""
        self._text, self._title, self._field = given.text, given.title, field
        self._seals = array("Q")
        """Of each passage, once ``sealed`` has read them all."""
        self._rows: Rows = open_rows(given.source, split=given.split, base=base, field=f"{field}.source")
        if len(self._rows) == 0:
            raise DataError(f"{field}.source: {given.source} has no rows; use a file with one passage per row")
        if given.passages > len(self._rows):
            raise JobFileError(
                f"{field}.passages: {given.passages} per call is more than the {len(self._rows)} of {given.source}; "
                "lower it"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def sealed(self, each: Callable[[], None] = lambda: None) -> str:
        """Reads all passages and gives their digest; from now on each must be what it was. ``each`` is called for every
        one."""
        digest, seals = CorpusDigest(), array("Q")
        for index in range(len(self)):
            passage = self._read(index)
            digest.add(passage)
            seals.append(passage.seal)
            each()
        self._seals = seals
        return str(digest)

    def __getitem__(self, index: int) -> Passage:
        """Raises ``DataError`` naming a row whose text or title is not there, and ``WorldError`` for one that has
        changed since the passages were ``sealed``."""
        if not self._seals:
            return self._read(index)
        try:
            passage = self._read(index)
        except DataError as problem:
            raise WorldError(f"{self._changed(index)} ({problem})") from problem
        if passage.seal != self._seals[index]:
            raise WorldError(self._changed(index))
        return passage

    def _changed(self, index: int) -> str:
        return (
            f"{self._rows.place(index)} is not the passage that this run has indexed for {self._field}: the file has "
            "changed. Restore it and start again; to change a corpus, use a new file"
        )

    def _read(self, index: int) -> Passage:
        row = self._rows[index]
        title = "" if self._title is None else self._cell(row, index, self._title, "title", may_be_empty=True)
        return Passage(title, self._cell(row, index, self._text, "text"))

    def __iter__(self) -> Iterator[Passage]:
        return (self[index] for index in range(len(self)))

    def check(self) -> None:
        """Raises ``DataError`` naming a row that lacks a column, among those that are looked at when a file is opened,
        or that holds no text, among the first and the last; all are looked at when they are indexed."""
        for name, said in ((self._text, "text"), (self._title, "title")):
            if name is not None and (index := self._rows.first_without(name)) is not None:
                raise lacks_column(self._rows.place(index), self._rows[index], name, f"{self._field}.{said}")
        if (index := self._rows.first_null(self._text)) is not None:
            raise null_column(self._rows.place(index), self._text, f"{self._field}.text")
        for index in sorted({*range(min(len(self), CHECKED_ROWS)), len(self) - 1}):
            self[index]

    def _cell(self, row: Row, index: int, name: str, said: str, *, may_be_empty: bool = False) -> str:
        field = f"{self._field}.{said}"
        try:
            value = column(row, name)
        except KeyError:
            raise lacks_column(self._rows.place(index), row, name, field) from None
        if value is None:
            if may_be_empty:
                return ""
            raise null_column(self._rows.place(index), name, field)
        if not isinstance(value, str):
            raise DataError(
                f'{self._rows.place(index)}: the column "{name}" (set by {field}) is {type(value).__name__}, not text; '
                "put it in quotes, or use another column"
            )
        return value


class CorpusDigest:
    """A digest of passages in their order, by which a corpus is known wherever it lies."""

    def __init__(self) -> None:
        self._sum = hashlib.blake2b(digest_size=16)

    def add(self, passage: Passage) -> None:
        """The next passage."""
        for part in (passage.title, passage.text):
            encoded = part.encode()
            self._sum.update(len(encoded).to_bytes(8, "little"))
            self._sum.update(encoded)

    def __str__(self) -> str:
        return self._sum.hexdigest()
