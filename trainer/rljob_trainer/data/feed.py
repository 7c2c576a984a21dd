"""The stream of prompts that a run trains on: without end, or for a number of epochs.

All sources form one pool of rows. Each epoch visits every row once, or each source in proportion to its weight, in an
order that is a pure function of (seed, epoch); the position is therefore all there is to remember, and a resumed feed
goes on with exactly the prompt that came next. Rows are read and tokenised some blocks ahead of their use
(``data/ahead.py``): whoever asks for prompts mostly finds them ready. Later epochs find those that fit into memory as
the first one read them (``data/kept.py``), and so does the first one if they could be read while engines were starting.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from rljob_trainer.data.ahead import ReadAhead
from rljob_trainer.data.columns import Row, as_text, column, lacks_column, null_column, require_columns
from rljob_trainer.data.kept import KeptPrompts
from rljob_trainer.data.order import Int64Array, permutation
from rljob_trainer.data.tokenisation import EncodedPrompt, PromptEncoder
from rljob_trainer.episodes.episode import Prompt
from rljob_trainer.episodes.receipts import prompt_digest
from rljob_trainer.errors import CheckpointError, DataError, IntegrityError, JobFileError
from rljob_trainer.texts import writable

SOURCE_COLUMN = "spec.data.train.sourceColumn"
OTHER = "other"
MOST_COUNTED = 32
"""Data sources that have metrics of their own; further ones have those of ``OTHER`` together."""
_LONGEST_NAME = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]+")
_WITNESSES = 64
"""Rows of each source, spread evenly, by which it is recognised."""
BLOCK = 64
"""Rows tokenised together: enough to use a batch tokenizer, little enough to start at once."""


class Rows(Protocol):
    """Rows of one source, by position."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...

    def place(self, index: int) -> str:
        """Where a row is from, for messages: file and line, or source and row."""
        ...

    def first_without(self, name: str, /) -> int | None:
        """The first row that lacks a column which the first row has, among those that were looked at."""
        ...

    def first_null(self, name: str, /) -> int | None:
        """The first row in which a column is there and null, among those that were looked at."""
        ...


def made_by(rows: Rows) -> str | None:
    """The program, with its version, that makes rows of another kind in another version; None: they are read."""
    maker: str | None = getattr(rows, "made_by", None)
    return maker


@dataclass(frozen=True, slots=True)
class Source:
    """A named set of rows and how they become prompts. The name routes rewards and validation."""

    name: str
    rows: Rows
    encoder: PromptEncoder
    data_source: str | None = None
    """The column (or path) that says which data set a row is from."""
    weight: float | None = None
    """Its share of an epoch's prompts, over the sum of all sources' weights; None: each of its rows once."""

    def check_columns(self) -> None:
        """Raises ``JobFileError`` naming the columns that are needed and not there."""
        self.encoder.check_columns(self.rows.columns, f"data source {self.name!r}")
        if self.data_source is not None:
            require_columns([self.data_source], self.rows.columns, SOURCE_COLUMN, f"data source {self.name!r}")

    def check_rows(self) -> None:
        """Raises ``DataError`` naming a row that lacks what prompt or answer need, or in which it is null and must not
        be, if one is known already."""
        said = [] if self.data_source is None else [(self.data_source, SOURCE_COLUMN)]
        for name, field in [*self.encoder.needed, *said]:
            index = self.rows.first_without(name)
            if index is not None:
                raise lacks_column(self.rows.place(index), self.rows[index], name, field)
        for name, field in [*self.encoder.never_null, *said]:
            index = self.rows.first_null(name)
            if index is not None:
                raise null_column(self.rows.place(index), name, field)

    def encode(self, indices: Sequence[int]) -> list[EncodedPrompt | None]:
        """The rows at ``indices``, None where an overlong prompt is dropped."""
        return self.encoder.encode([self.rows[i] for i in indices], [self.rows.place(i) for i in indices])

    def witnesses(self) -> dict[str, list[int]]:
        """Digests of the prompt's token ids and of the answer of some rows, by row (as JSON has it): enough to
        recognise the source, its template and its tokenizer, cheap for one of any size. Of overlong rows none."""
        step = max(1, len(self.rows) // _WITNESSES)
        chosen = list(range(0, len(self.rows), step))[: 2 * _WITNESSES]
        return {
            str(row): [prompt_digest(encoded.token_ids), crc32((encoded.answer or "").encode("utf-8", "replace"))]
            for row, encoded in zip(chosen, self.encode(chosen), strict=True)
            if encoded is not None
        }

    def data_source_of(self, row: int, columns: Row) -> str | None:
        """Which data set a row is from. Raises ``DataError`` naming a row that does not say it."""
        if self.data_source is None:
            return None
        try:
            value = column(columns, self.data_source)
        except KeyError:
            raise lacks_column(self.rows.place(row), columns, self.data_source, SOURCE_COLUMN) from None
        if value is None:
            raise null_column(self.rows.place(row), self.data_source, SOURCE_COLUMN)
        return writable(as_text(value))

    def prompt(self, encoded: EncodedPrompt, row: int, *, ordinal: int, epoch: int) -> Prompt:
        """What the pipeline gets."""
        return Prompt(
            ordinal=ordinal,
            epoch=epoch,
            row=row,
            source=self.name,
            text=encoded.text,
            token_ids=encoded.token_ids,
            answer=encoded.answer,
            columns=encoded.columns,
            messages=encoded.messages,
            reference=encoded.reference,
            conversational=encoded.conversational,
            data_source=self.data_source_of(row, encoded.columns),
        )


class PromptFeed:
    """Prompts in a seeded order. ``next()`` is the only thing that moves it.

    feed = PromptFeed([source], seed=1)
    prompt = feed.next()
    state = feed.state_dict()          # any time; a new feed that loads it goes on with the next prompt
    """

    def __init__(
        self, sources: Sequence[Source], *, seed: int, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        """``epochs`` None: without end.

        Raises ``DataError`` for sources without rows and for rows without a column that the others have,
        ``JobFileError`` for columns that they lack.
        """
        if len({source.name for source in sources}) != len(sources):
            raise DataError("spec.data.train: two sources have the same name; give each its own name")
        for source in sources:
            if len(source.rows) == 0:
                raise DataError(f"data source {source.name!r} has no rows")
            source.check_columns()
            source.check_rows()
        self._sources = tuple(sources)
        self._starts = [0, *accumulate(len(source.rows) for source in sources)]
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._shares = shares([len(source.rows) for source in sources], [source.weight for source in sources])
        for source, share in zip(sources, self._shares or (), strict=False):
            if share == 0:
                raise JobFileError(
                    f"spec.data.train.parts: with a weight of {source.weight:g}, none of the {len(self)} prompts of an "
                    f"epoch come from {source.name!r}; raise the weight, or remove the part"
                )
        self._counted: dict[str, None] = {}
        """Data sources with metrics of their own, in the order in which the feed came upon them."""
        self._ordinal = 0
        self._epoch = 0
        self._position = 0
        self.dropped = 0
        """Rows left out because their prompt is too long, counted once per visit."""
        self.truncated = 0
        self._order_of = lru_cache(maxsize=3)(self._new_order)
        self._kept = KeptPrompts()
        self._ahead = ReadAhead(self._encode, len(self), BLOCK, epochs)
        """Never part of the state."""
        self._first_read: dict[str, dict[str, list[int]]] | None = None

    def __len__(self) -> int:
        """Rows per epoch, overlong ones included. With weights some come several times, and others in another epoch."""
        return self._starts[-1]

    @property
    def ordinal(self) -> int:
        """Prompts handed out so far, over all epochs."""
        return self._ordinal

    @property
    def epoch(self) -> int:
        """The epoch under way (the end of one is noticed when the next prompt is asked for)."""
        return self._epoch

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names by which rewards are routed."""
        return tuple(source.name for source in self._sources)

    @property
    def progress(self) -> float:
        """Passes over the data, the present one in part."""
        return self._epoch + self._position / len(self)

    def begin(self) -> None:
        """Begins to read this epoch's prompts, as many as are kept: for when there is something else to wait for."""
        self._ahead.read_through(self._epoch, self._position, lambda: not self._kept.full)

    def next(self) -> Prompt | None:
        """The next prompt, or None when the last epoch is over.

        Raises ``DataError`` when a row is bad or all rows in succession are beyond the length limit.
        """
        skipped = 0
        while True:
            if self._position == len(self):
                if self._epochs is not None and self._epoch + 1 >= self._epochs:
                    return None
                self._epoch, self._position = self._epoch + 1, 0
            source, row = self._locate(int(self._order_of(self._epoch)[self._position]))
            encoded = self._take()
            self._position += 1
            if encoded is not None:
                break
            self.dropped += 1
            skipped += 1
            if skipped >= len(self):
                raise DataError(
                    f"all {len(self)} prompts are longer than maxPromptTokens = "
                    f"{source.encoder.settings.max_tokens}; raise it"
                )
        self.truncated += encoded.truncated
        skipped = self._epoch * len(self) + self._position - (self._ordinal + 1) - self.dropped
        if skipped:
            raise IntegrityError(
                f"the feed is at row {self._position} of epoch {self._epoch}, but has handed out "
                f"{self._ordinal + 1} prompts and dropped {self.dropped} that are too long: "
                f"{abs(skipped)} prompts were {'skipped' if skipped > 0 else 'handed out twice'}. "
                "Start again: the run continues from its last checkpoint. If it happens again, please report it"
            )
        prompt = source.prompt(encoded, row, ordinal=self._ordinal, epoch=self._epoch)
        self._ordinal += 1
        return self._counted_as(prompt)

    def _counted_as(self, prompt: Prompt) -> Prompt:
        """The prompt with the name of its data source in metrics. The first few that come have one of their own."""
        if prompt.data_source is None:
            return prompt
        name = _UNSAFE.sub("-", prompt.data_source)[:_LONGEST_NAME] or "-"
        if name not in self._counted and len(self._counted) < MOST_COUNTED:
            self._counted[name] = None
        return replace(prompt, counted_as=name if name in self._counted else OTHER)

    def _take(self) -> EncodedPrompt | None:
        try:
            return self._ahead.take(self._epoch, self._position)
        except DataError as error:
            if self._ordinal == 0:
                raise
            # Rows that are witnesses were read when the run began: this one is none.
            raise DataError(
                f"{error}. Correct the row in place and start again to continue from the last checkpoint. Do not "
                f"remove it: checkpoints need all {len(self)} rows that the run started with"
            ) from error

    def prompt_at(self, *, ordinal: int, epoch: int, source: str, row: int) -> Prompt:
        """A prompt that was handed out before, made again. Raises ``CheckpointError`` when there is no such row."""
        owner = next((s for s in self._sources if s.name == source and row < len(s.rows)), None)
        encoded = None if owner is None else owner.encode([row])[0]
        if owner is None or encoded is None:
            raise CheckpointError(
                f"row {row} of data source {source!r}, the source of prompt {ordinal}, no longer exists"
            )
        return self._counted_as(owner.prompt(encoded, row, ordinal=ordinal, epoch=epoch))

    def first_prompts(self, count: int) -> list[Prompt]:
        """Up to ``count`` prompts of the first rows that give one, whatever the order and position of the feed."""
        source = self._sources[0]
        rows = range(min(len(source.rows), 8 * count))
        encoded = zip(rows, source.encode(rows), strict=True)
        return [source.prompt(prompt, row, ordinal=row, epoch=0) for row, prompt in encoded if prompt is not None][
            :count
        ]

    def state_dict(self) -> dict[str, Any]:
        """The position, small and JSON-ready. ``sources`` guards against resuming on other data; with ``date`` a
        resumed run's prompts are rendered as before (``driver/feeding.py``)."""
        return {
            "ordinal": self._ordinal,
            "epoch": self._epoch,
            "position": self._position,
            "dropped": self.dropped,
            "truncated": self.truncated,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": [[source.name, len(source.rows)] for source in self._sources],
            "weights": [source.weight for source in self._sources],
            "makers": self._makers,
            "counted": list(self._counted),
            "witnesses": self._witnesses,
            "date": self._sources[0].encoder.date,
        }

    @property
    def _makers(self) -> dict[str, str]:
        """What makes the rows of those sources that are made by a program of its own."""
        return {source.name: maker for source in self._sources if (maker := made_by(source.rows)) is not None}

    @property
    def _witnesses(self) -> dict[str, dict[str, list[int]]]:
        """The witnesses as they were read first."""
        if self._first_read is None:
            self._first_read = {source.name: source.witnesses() for source in self._sources}
        return self._first_read

    def _check_witnesses(self, known: Mapping[str, Mapping[str, list[int]]]) -> None:
        """Raises ``CheckpointError`` when prompts are not those that they were."""
        for name, rows in self._witnesses.items():
            then = known.get(name, {})
            changed = [row for row, digests in rows.items() if digests != then.get(row, digests)]
            prompts = [row for row in changed if rows[row][0] != then[row][0]]
            if len(prompts) > len(rows) // 8:
                raise CheckpointError(
                    f"prompts of data source {name!r} are tokenized differently than when the checkpoint was written "
                    f"({len(prompts)} of {len(rows)} checked rows): the chat template, the tokenizer or the data has "
                    "changed. Restore it, or start a new run from the checkpoint's model"
                )
            if changed:
                part = "prompt" if changed[0] in prompts else "answer"
                raise CheckpointError(
                    f"the {part} in row {changed[0]} of data source {name!r} has changed since the checkpoint was "
                    f"written ({len(changed)} of {len(rows)} checked rows differ). Restore the data, or start a new "
                    "run from the checkpoint's model"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position. Raises ``CheckpointError`` when the data or its order is not the same."""
        mine = self.state_dict()
        if state["makers"] != mine["makers"]:
            then, now = (", ".join(each["makers"].values()) or "none of these" for each in (state, mine))
            raise CheckpointError(
                f"the problems were generated by {then} when the checkpoint was written, but now by {now}, which "
                "generates different ones from the same seed; install the old version again, or start a new run from "
                "the checkpoint's model"
            )
        for key in ("seed", "shuffle", "sources", "weights"):  # before the rows themselves: fewer of them say more
            if state[key] != mine[key]:
                raise CheckpointError(
                    f"the checkpoint's data position belongs to {key} = {state[key]}, but the job has {mine[key]}; "
                    "use the same data to resume, or start a new run from the checkpoint's model"
                )
        self._check_witnesses(state["witnesses"])
        self._ordinal, self._epoch, self._position = state["ordinal"], state["epoch"], state["position"]
        self.dropped, self.truncated = state["dropped"], state["truncated"]
        self._counted = dict.fromkeys(state["counted"])

    def _new_order(self, epoch: int) -> Int64Array:
        if self._shares is not None:
            return self._mixed_order(epoch, self._shares)
        return permutation(len(self), self._seed, epoch) if self._shuffle else np.arange(len(self))

    def _mixed_order(self, epoch: int, shares: Sequence[int]) -> Int64Array:
        """The rows of an epoch with weights. Each source is gone through pass after pass, whatever the epochs: it goes
        on in each epoch where the one before has stopped."""
        chosen: list[Int64Array] = []
        for number, (source, share) in enumerate(zip(self._sources, shares, strict=True)):
            size, first, behind = len(source.rows), epoch * share, (epoch + 1) * share
            for passed in range(first // size, (behind - 1) // size + 1):
                # A key of three numbers: the order of an epoch has two.
                rows = permutation(size, self._seed, passed, number) if self._shuffle else np.arange(size)
                begun = passed * size
                chosen.append(self._starts[number] + rows[max(0, first - begun) : behind - begun])
        together = np.concatenate(chosen)
        if self._shuffle:
            return together[permutation(len(together), self._seed, epoch)]
        # Evenly: the k-th of n prompts belongs at (k + 1/2) / n of the epoch.
        places = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
        return together[np.argsort(places, kind="stable")]

    def _locate(self, index: int) -> tuple[Source, int]:
        """The source of a row of the pool, and its position there."""
        which = bisect_right(self._starts, index) - 1
        return self._sources[which], index - self._starts[which]

    def _encode(self, epoch: int, position: int) -> list[EncodedPrompt | None]:
        """A block of rows from ``position`` of the epoch's order on, each source's together."""
        block: list[int] = self._order_of(epoch)[position : position + BLOCK].tolist()
        read: dict[int, EncodedPrompt | None] = {}
        unknown = [(index, *self._locate(index)) for index in block if index not in self._kept]
        for source in self._sources:
            rows = {index: row for index, owner, row in unknown if owner is source}
            if rows:
                read.update(zip(rows, source.encode(list(rows.values())), strict=True))
        for index, prompt in read.items():
            self._kept.keep(index, prompt)
        return [read[index] if index in read else self._kept[index] for index in block]


def shares(rows: Sequence[int], weights: Sequence[float | None]) -> list[int] | None:
    """How many of an epoch's ``sum(rows)`` prompts each source gives: its part by weight, rounded so that the sum is
    right (the largest remainders are rounded up, of equal ones the first). None without weights."""
    given = [weight for weight in weights if weight is not None]
    if len(given) < len(weights):
        return None
    total, whole = sum(rows), sum(map(Fraction, given))
    exact = [total * Fraction(weight) / whole for weight in given]
    counts = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def validation_prompts(source: Source, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` rows of a source (all when None), in order, without those that are too long."""
    source.encoder.check_columns(source.rows.columns, f"validation source {source.name!r}")
    count = len(source.rows) if limit is None else min(limit, len(source.rows))
    prompts: list[Prompt] = []
    for start in range(0, count, BLOCK):
        indices = range(start, min(start + BLOCK, count))
        for row, encoded in zip(indices, source.encode(indices), strict=True):
            if encoded is not None:
                prompts.append(source.prompt(encoded, row, ordinal=len(prompts), epoch=0))
    if not prompts:
        raise DataError(
            f"validation source {source.name!r} has no prompt within maxPromptTokens = "
            f"{source.encoder.settings.max_tokens} ({count} rows); raise it"
        )
    return prompts
