"""Lists of requests and results that are cheap to send: they cross a process border as columns, not as objects.

    engine.submit(Requests([request, ...]))     # ordinary lists on both sides

A batch of 512 results is two thousand small arrays, and pickling each costs more than making it. As columns they are
one array a stream. Requests of one group share prompt and settings, which the pickle then holds once. What they have
begun with travels as results do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from rljob_trainer.episodes.episode import FinishReason
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.receipts import Receipt
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult
from rljob_trainer.episodes.tokens import NOTHING, Stream, Tokens, is_of_prompt, stream_types

_REQUEST: Callable[[GenerationRequest], tuple[Any, ...]] = attrgetter(
    *(f.name for f in fields(GenerationRequest) if f.name != "begun")
)


class Requests(list[GenerationRequest]):
    """A list of requests that is pickled by column."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        begun = _columns([request.begun for request in self]) if any(len(request.begun) for request in self) else None
        if not self:
            return Requests, ()
        ids, *plain = zip(*map(_REQUEST, self), strict=True)
        return _requests, (begun, _table(ids), *plain)


class Results(list[GenerationResult]):
    """A list of results that is pickled by column. What comes out holds views into the columns."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        if not self:
            return Results, ()
        receipts = [result.receipt for result in self]
        # Nearly always each has its own one: then a receipt's id is the result's.
        said = [
            receipt[1:] for receipt, result in zip(receipts, self, strict=True) if receipt and receipt.id == result.id
        ]
        return _results, (
            _table([result.id for result in self]),
            [result.finish for result in self],
            _columns([result.tokens for result in self]),
            _table(said) if len(said) == len(self) else receipts,
            [result.prefilled for result in self],
        )


def _table(rows: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """Tuples of one kind by place: an object for each would have to be named, made and remembered."""
    return tuple(zip(*rows, strict=True))


OfPrompts = Mapping[str, Sequence[Stream | None]]
"""By stream, for each part."""
Columns = tuple[npt.NDArray[np.int64], Tokens, OfPrompts]
"""Offsets ``[count + 1]``, the tokens of all, one after the other, and what is known of each one's prompt."""


def _columns(parts: Sequence[Tokens]) -> Columns:
    of_prompts = {name: [getattr(part, name) for part in parts] for name in stream_types() if is_of_prompt(name)}
    of_prompts = {name: streams for name, streams in of_prompts.items() if any(s is not None for s in streams)}
    bare = [part.having(dict.fromkeys(of_prompts)) for part in parts] if of_prompts else parts
    return np.cumsum([0, *map(len, parts)]), Tokens.joined(bare), of_prompts


def _parts(columns: Columns) -> Iterator[Tokens]:
    offsets, tokens, of_prompts = columns
    for number, part in enumerate(tokens.split(offsets.tolist())):
        yield part.having({name: streams[number] for name, streams in of_prompts.items()}) if of_prompts else part


def _requests(begun: Columns | None, ids: Sequence[Sequence[Any]], *plain: Sequence[Any]) -> Requests:
    columns = (map(EpisodeId, *ids), *plain)
    if begun is None:
        return Requests(map(GenerationRequest, *columns))
    return Requests(map(GenerationRequest, *columns, (tokens if len(tokens) else NOTHING for tokens in _parts(begun))))


def _results(
    ids: Sequence[Sequence[Any]],
    finishes: Sequence[FinishReason],
    columns: Columns,
    receipts: tuple[Sequence[Any], ...] | list[Receipt | None],
    prefilled: Sequence[int],
) -> Results:
    named = list(map(EpisodeId, *ids))
    own = receipts if isinstance(receipts, list) else map(Receipt, named, *receipts)
    told = zip(named, finishes, _parts(columns), own, prefilled, strict=True)
    return Results(
        GenerationResult(id, tokens, finish, receipt=receipt, prefilled=computed)
        for id, finish, tokens, receipt, computed in told
    )
