"""The tokens of a response and what is known of each: one type from the engine to the batch.

Everything that carries tokens across a border (messages, the shelf, checkpoints, receipts) goes over the streams of
this type and names none of them. So a new stream is one field here, and crosses every border. What makes it (an
engine), and what uses it (``SequenceBatch`` and the losses' inputs, which name their streams), change besides.
One stream may say something of the prompt in front of the tokens: it has that prompt's length, and belongs to whatever
begins with the first token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, Self

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]
Stream = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The T tokens that follow a prompt. Streams are ``[T]``, or ``[T, ...]`` where one says so; they are read, not
    written. An optional one that nobody makes is None for all responses of a job.

    Raises ``ValueError`` when the streams differ in length.
    """

    ids: IntArray = field(metadata={"dtype": np.int32, "words": "token ids"})
    log_probs: FloatArray = field(metadata={"dtype": np.float32, "words": "log-probs"})
    """Rollout log-probs: of the distribution that was sampled from, at the sampling temperature."""
    versions: IntArray = field(metadata={"dtype": np.int32, "words": "versions"})
    """The policy version that made each token; it never falls along a response."""
    mask: BoolArray = field(metadata={"dtype": np.bool_, "words": "mask"})
    """True where the model made the token; False where it was given one, of which no log-prob is known."""
    routed_experts: ByteArray | None = field(default=None, metadata={"dtype": np.uint8, "words": "routed experts"})
    """``[T, layers, k]``: the k experts that each layer with experts chose in the pass that predicted the token, which
    is the pass over the token before it. Where nothing is known of a token, one expert stands there k times."""
    prompt_experts: ByteArray | None = field(
        default=None, metadata={"dtype": np.uint8, "words": "experts of the prompt", "of_prompt": True}
    )
    """``[P - 1, layers, k]``: the experts that were chosen in the passes over the P tokens of the prompt but the last,
    whose choices are the first of ``routed_experts``. None: nothing is known of them."""

    def __post_init__(self) -> None:
        count = len(self.ids)
        for stream in _of_tokens(self):
            if stream is not None and len(stream) != count:
                lengths = {name: len(stream) for name, stream in self.streams().items() if name not in _OF_PROMPT}
                raise ValueError("; ".join(f"{length} {words(name)}" for name, length in lengths.items()))

    @classmethod
    def sampled(cls, ids: IntArray, log_probs: FloatArray, versions: IntArray, **streams: Stream) -> Self:
        """Tokens that the model made, every one."""
        return cls(ids, log_probs, versions, all_true(len(ids)), **streams)

    @classmethod
    def given(cls, ids: Sequence[int], version: int, like: Self) -> Self:
        """Tokens that the model was given, masked: nothing is known of them. They have the streams that ``like`` has,
        of zeros, and a ``version`` that says nothing."""
        count = len(ids)
        streams = {
            name: np.zeros((count, *stream.shape[1:]), stream.dtype)
            for name, stream in like.streams().items()
            if name not in _OF_PROMPT
        }
        known = {"ids": np.array(ids, np.int32), "versions": np.full(count, version, np.int32)}
        return cls(**streams | known)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """One after the other; the prompt is that of the first ones. Raises ``ValueError`` when a stream is known of
        some of the tokens only."""
        if not parts:
            return cls(**{name: np.empty(0, _DTYPES[name]) for name in _REQUIRED})
        first = next((part for part in parts if len(part)), parts[0])
        whole = {name: stream for name in _OF_PROMPT if (stream := getattr(first, name)) is not None}
        for name, column in zip(_OF_TOKENS, zip(*map(_of_tokens, parts), strict=True), strict=True):
            pieces = [piece for piece in column if piece is not None]
            if len(pieces) < len(parts):
                missing = sum(len(part) for part in parts if getattr(part, name) is None)
                if pieces and missing:
                    raise ValueError(f"{missing} of {sum(map(len, parts))} tokens have no {words(name)}")
                pieces = [piece for piece in pieces if len(piece)]
            if pieces:
                whole[name] = _joined(pieces, _DTYPES[name])
        return cls(**whole)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Self:
        """Views of a part of every stream; what is known of the prompt belongs to parts that begin with the first
        token."""
        streams: list[Any] = [None if stream is None else stream[part] for stream in _of_tokens(self)]
        streams += [None if part.start else getattr(self, name) for name in _OF_PROMPT]
        return type(self)(*streams)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, ({name: _packed(stream) for name, stream in self.streams().items()},)

    def streams(self) -> dict[str, Stream]:
        """The streams that are there, by name."""
        return {name: stream for name in _DTYPES if (stream := getattr(self, name)) is not None}

    def having(self, streams: Mapping[str, Stream | None]) -> Self:
        """These tokens with ``streams`` in place of their own of those names; None takes one away."""
        there = {**self.streams(), **streams}
        return type(self)(**{name: stream for name, stream in there.items() if stream is not None})

    def split(self, offsets: Sequence[int]) -> Iterator[Self]:
        """The parts between each offset and the next: views, or constants (``as_constant``)."""
        parts = list(pairwise(offsets))
        of_tokens = [_split(stream, parts) for stream in _of_tokens(self)]
        of_prompt = [[None if start else getattr(self, name) for start, _ in parts] for name in _OF_PROMPT]
        return map(type(self), *of_tokens, *of_prompt)

    def later(self, versions: int) -> Self:
        """These tokens, made by versions whose numbers are so much higher: their weights were published again."""
        return replace(self, versions=self.versions + np.int32(versions))

    def before(self, version: int) -> Self:
        """The tokens in front of the first one that ``version``, or a later one, made."""
        newer = np.flatnonzero(self.versions >= version)
        return self[: int(newer[0])] if len(newer) else self


_DTYPES: Mapping[str, np.dtype[Any]] = {s.name: np.dtype(s.metadata["dtype"]) for s in fields(Tokens)}
_OF_PROMPT = tuple(s.name for s in fields(Tokens) if s.metadata.get("of_prompt"))
_OF_TOKENS = tuple(name for name in _DTYPES if name not in _OF_PROMPT)
"""They come first among the fields."""
_of_tokens: Callable[[Tokens], tuple[Stream | None, ...]] = attrgetter(*_OF_TOKENS)
_REQUIRED = [s.name for s in fields(Tokens) if s.default is MISSING]
_WHOLE_NUMBERS = "biu"
"""Kinds of types in which equal numbers have the same bytes."""
_WORDS: Mapping[str, str] = {s.name: s.metadata["words"] for s in fields(Tokens)}


def stream_types() -> Mapping[str, np.dtype[Any]]:
    """The type in which each stream travels and is kept, by name."""
    return _DTYPES


def is_of_prompt(stream: str) -> bool:
    """Whether a stream says something of the prompt, and has its length."""
    return stream in _OF_PROMPT


def says_of_prompt(tokens: Tokens) -> bool:
    """Whether there is a stream that says something of the prompt."""
    return any(getattr(tokens, name) is not None for name in _OF_PROMPT)


def words(stream: str) -> str:
    """What a stream is called in messages."""
    return _WORDS[stream]


def all_true(count: int) -> BoolArray:
    """``[count]``, of one byte in memory; the same array for all of this length, which nobody can write."""
    return constant(True, count, np.dtype(np.bool_))


@functools.lru_cache(maxsize=16384)
def constant(value: int, count: int, dtype: np.dtype[Any]) -> Stream:
    """``[count]`` of one ``value``, which is all there is in memory; the same array for all that are equal."""
    return np.broadcast_to(np.asarray(value, dtype), count)


def as_constant(stream: Stream) -> Stream:
    """A stream of whole numbers as ``constant`` has them where they are all equal: a response of one policy has one
    version. Other streams stay as they are, since numbers that are equal need not have the same bytes (0.0 and -0.0).
    """
    if stream.dtype.kind not in _WHOLE_NUMBERS or stream.ndim != 1 or not len(stream) or stream[0] != stream[-1]:
        return stream
    same = is_constant(stream) or bool((stream == stream[0]).all())
    return constant(stream[0].item(), len(stream), stream.dtype) if same else stream


def is_constant(stream: Stream) -> bool:
    """Whether it is one value in memory, however long: there is nothing to move or to keep."""
    return stream.ndim == 1 and stream.strides == (0,) and len(stream) > 0


def _split(stream: Stream | None, parts: Sequence[tuple[int, int]]) -> Sequence[Any]:
    if stream is None:
        return [None] * len(parts)
    if stream.dtype.kind not in _WHOLE_NUMBERS or stream.ndim != 1:
        return [stream[start:end] for start, end in parts]
    if is_constant(stream):
        return [constant(stream.item(0), end - start, stream.dtype) for start, end in parts]
    return [as_constant(stream[start:end]) for start, end in parts]


def _joined(pieces: Sequence[Stream], dtype: np.dtype[Any]) -> Stream:
    first = pieces[0]
    if is_constant(first) and all(p is first or (is_constant(p) and p.item(0) == first.item(0)) for p in pieces):
        return np.broadcast_to(first[:1].reshape(()), sum(map(len, pieces)))
    return as_constant(np.concatenate(pieces, dtype=dtype))


def _packed(stream: Stream) -> Stream | tuple[Stream, int]:
    """Pickle writes every element of an array, of a constant too."""
    return (stream[:1].copy(), len(stream)) if is_constant(stream) else stream


def _unpacked(streams: Mapping[str, Stream | tuple[Stream, int]]) -> Tokens:
    return Tokens(
        **{
            name: np.broadcast_to(stream[0].reshape(()), stream[1]) if isinstance(stream, tuple) else stream
            for name, stream in streams.items()
        }
    )


NOTHING = Tokens.joined([])
