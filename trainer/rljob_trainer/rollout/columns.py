"""Lists of requests and results that are cheap to send: they cross a process border as columns, not as objects.

    engine.submit(Requests([request, ...]))     # ordinary lists on both sides

A batch of 512 results is 1,536 small arrays, and pickling each costs more than making it. As columns they are three.
Requests of one group share prompt and settings, which the pickle then holds once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from rljob_trainer.rollout.protocol import GenerationRequest, GenerationResult
from rljob_trainer.samples import FinishReason, FloatArray, IntArray

_REQUEST: Callable[[GenerationRequest], tuple[Any, ...]] = attrgetter(*(f.name for f in fields(GenerationRequest)))


class Requests(list[GenerationRequest]):
    """A list of requests that is pickled by column."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _requests, tuple(zip(*map(_REQUEST, self), strict=True))


class Results(list[GenerationResult]):
    """A list of results that is pickled by column. What comes out holds views into the columns."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _results, (
            [result.request_id for result in self],
            [result.finish for result in self],
            np.cumsum([0, *(len(result.token_ids) for result in self)]),
            _joined([result.token_ids for result in self], np.int32),
            _joined([result.log_probs for result in self], np.float32),
            _joined([result.versions for result in self], np.int32),
        )


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.empty(0, dtype)


def _requests(*columns: Sequence[Any]) -> Requests:
    return Requests(map(GenerationRequest, *columns)) if columns else Requests()


def _results(
    names: Sequence[str],
    finishes: Sequence[FinishReason],
    offsets: npt.NDArray[np.int64],
    token_ids: IntArray,
    log_probs: FloatArray,
    versions: IntArray,
) -> Results:
    ends = offsets.tolist()
    return Results(
        GenerationResult(name, token_ids[start:end], log_probs[start:end], versions[start:end], finish)
        for name, finish, start, end in zip(names, finishes, ends[:-1], ends[1:], strict=True)
    )
