"""Lists of requests and results that are cheap to send: they cross a process border as columns, not as objects.

    engine.submit(Requests([request, ...]))     # ordinary lists on both sides

A batch of 512 results is 1,536 small arrays, and pickling each costs more than making it. As columns they are three.
Requests of one group share prompt and settings, which the pickle then holds once. What they have begun with travels as
results do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from rljob_trainer.receipts import Receipt
from rljob_trainer.rollout.protocol import Begun, GenerationRequest, GenerationResult
from rljob_trainer.samples import FinishReason, FloatArray, IntArray

_REQUEST: Callable[[GenerationRequest], tuple[Any, ...]] = attrgetter(
    *(f.name for f in fields(GenerationRequest) if f.name != "begun")
)


class Requests(list[GenerationRequest]):
    """A list of requests that is pickled by column."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        begun = _columns([request.begun for request in self]) if any(len(request.begun) for request in self) else None
        return _requests, (begun, *zip(*map(_REQUEST, self), strict=True))


class Results(list[GenerationResult]):
    """A list of results that is pickled by column. What comes out holds views into the columns."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _results, (
            [result.request_id for result in self],
            [result.finish for result in self],
            _columns(self),
            [result.receipt for result in self],
        )


Columns = tuple[npt.NDArray[np.int64], IntArray, FloatArray, IntArray]
"""Offsets ``[count + 1]``, and token ids, log-probs and versions ``[tokens]`` of all, one after the other."""


def _columns(parts: Sequence[GenerationResult | Begun]) -> Columns:
    return (
        np.cumsum([0, *(len(part.token_ids) for part in parts)]),
        _joined([part.token_ids for part in parts], np.int32),
        _joined([part.log_probs for part in parts], np.float32),
        _joined([part.versions for part in parts], np.int32),
    )


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.empty(0, dtype)


def _parts(columns: Columns) -> Iterator[tuple[IntArray, FloatArray, IntArray]]:
    offsets, token_ids, log_probs, versions = columns
    for start, end in pairwise(offsets.tolist()):
        yield token_ids[start:end], log_probs[start:end], versions[start:end]


def _requests(begun: Columns | None, *plain: Sequence[Any]) -> Requests:
    if not plain:
        return Requests()
    if begun is None:
        return Requests(map(GenerationRequest, *plain))
    return Requests(map(GenerationRequest, *plain, (Begun(*arrays) for arrays in _parts(begun))))


def _results(
    names: Sequence[str], finishes: Sequence[FinishReason], columns: Columns, receipts: Sequence[Receipt | None]
) -> Results:
    return Results(
        GenerationResult(name, *arrays, finish, receipt=receipt)
        for name, finish, arrays, receipt in zip(names, finishes, _parts(columns), receipts, strict=True)
    )
