"""What an engine says of a response beside the response: which request it answers, and digests of what it made.

A response goes from the engine's memory through a message, the shelf and the driver's batch to a rank. That nothing is
exchanged, cut or doubled on this way is compared with the receipt twice: when the response arrives, and when the batch
is laid out. A digest is a CRC-32 of an array's bytes: a microsecond for a response, and it sees every change of a few
neighbouring bytes and any other with a chance of four billion to one.
"""

from __future__ import annotations

import functools
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.tokens import Tokens, is_constant, is_of_prompt, stream_types, words
from rljob_trainer.errors import EngineError

if TYPE_CHECKING:
    from rljob_trainer.episodes.episode import Episode


class Sampling(Protocol):
    """How a response is drawn."""

    @property
    def temperature(self) -> float: ...


class ReceiptedRequest(Protocol):
    """What an engine is asked for."""

    @property
    def id(self) -> EpisodeId: ...

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def seed(self) -> int: ...


class ReceiptedAnswer(Protocol):
    """A response."""

    id: EpisodeId
    tokens: Tokens
    receipt: Receipt | None


class Receipt(NamedTuple):
    """What the engine that finished a response says of it."""

    id: EpisodeId
    prompt: int
    """Digest of the prompt's token ids."""
    temperature: float
    seed: int
    streams: bytes
    """Digests of what is known of the tokens (``stream_digests``)."""

    def to_json(self) -> list[Any]:
        """What ``from_json`` takes."""
        return [*self[:-1], self.streams.hex()]

    @classmethod
    def from_json(cls, written: Sequence[Any]) -> Receipt:
        """The receipt that ``to_json`` wrote."""
        id, prompt, temperature, seed, streams = written
        return cls(EpisodeId(*id), prompt, temperature, seed, bytes.fromhex(streams))


_DIGEST = struct.Struct("<?I")
_streams, _TYPES = attrgetter(*stream_types()), tuple(stream_types().values())
_DIGESTS = struct.Struct("<" + "?I" * len(stream_types()))


class ReceiptError(EngineError):
    """What arrived is not what an engine sent, or not what it was asked for (exit code 75: start again)."""


def digest(stream: npt.NDArray[Any]) -> int:
    """32 bits of an array's bytes."""
    if stream.flags.c_contiguous:
        return zlib.crc32(stream)  # type: ignore[arg-type]  # an array is a buffer, and its ``data`` another object
    if is_constant(stream):
        return _digest_of_constant(stream[:1].tobytes(), len(stream))
    return zlib.crc32(stream.tobytes())


def digests(stream: npt.NDArray[Any], offsets: Sequence[int]) -> list[int]:
    """Those of the parts between each offset and the next."""
    data = memoryview(np.ascontiguousarray(stream).reshape(-1).view(np.uint8).data)
    row = data.nbytes // max(len(stream), 1)
    return [zlib.crc32(data[start * row : end * row]) for start, end in pairwise(offsets)]


@functools.lru_cache(maxsize=16384)
def _digest_of_constant(value: bytes, count: int) -> int:
    return zlib.crc32(value * count)


def prompt_digest(token_ids: Sequence[int]) -> int:
    """The digest of token ids that are no array."""
    return _prompt_digest(tuple(token_ids))


@functools.lru_cache(maxsize=16)
def _prompt_digest(token_ids: tuple[int, ...]) -> int:
    """Siblings, which share a prompt, come one after the other; looking it up reads every token id all the same."""
    return zlib.crc32(array("i", token_ids))


def stream_digests(tokens: Tokens) -> bytes:
    """Digests of every stream in the type that it travels in: five bytes for each that there can be, whether it is
    there and its digest. A driver that waits for many groups has a receipt for each response, so it is one small
    object."""
    told: list[int] = []
    for stream, dtype in zip(_streams(tokens), _TYPES, strict=False):
        if stream is None:
            told += (False, 0)
        else:
            told += (True, digest(stream if stream.dtype is dtype else np.asarray(stream, dtype)))
    return _DIGESTS.pack(*told)


def with_digest(streams: bytes, name: str, array: npt.NDArray[Any]) -> bytes:
    """``stream_digests`` with another ``array`` in the stream ``name``."""
    at = list(stream_types()).index(name) * _DIGEST.size
    return streams[:at] + _DIGEST.pack(True, digest(array)) + streams[at + _DIGEST.size :]


def digest_of(episode: Episode) -> int:
    """A digest of the token ids of all leaves: what was scored."""
    so_far = 0
    for leaf in episode.leaves:
        so_far = zlib.crc32(leaf.tokens.ids.tobytes(), so_far)
    return so_far


class Receipts:
    """Written by whoever drives an engine, between the requests that come in and the results that leave."""

    def __init__(self) -> None:
        self._asked: dict[EpisodeId, tuple[int, float, int]] = {}

    def take(self, request: ReceiptedRequest) -> None:
        """The engine has been given a request."""
        self._asked[request.id] = prompt_digest(request.prompt_ids), request.sampling.temperature, request.seed

    def write(self, results: Sequence[ReceiptedAnswer]) -> None:
        """The engine has ended requests."""
        for result in results:
            asked = self._asked.pop(result.id, None)
            if asked is not None:
                result.receipt = Receipt(result.id, *asked, stream_digests(result.tokens))


def receipt_of(request: ReceiptedRequest, tokens: Tokens) -> Receipt:
    """The receipt for ``tokens`` as the answer to ``request``."""
    return Receipt(
        request.id,
        prompt_digest(request.prompt_ids),
        request.sampling.temperature,
        request.seed,
        stream_digests(tokens),
    )


def check_answer(request: ReceiptedRequest, result: ReceiptedAnswer) -> None:
    """A response has arrived. Raises ``ReceiptError`` saying what is wrong with it; one without receipt is not
    looked at."""
    receipt = result.receipt
    if receipt is None:
        return
    now = receipt_of(request, result.tokens)
    if receipt == now:
        return
    name = str(request.id)
    wrong = list(_of_another(name, request.id, receipt))
    if receipt.temperature != now.temperature:
        wrong.append(f"{name} was sampled at temperature {receipt.temperature:g}, not at {now.temperature:g}")
    if receipt.seed != now.seed:
        wrong.append(f"{name} was sampled with the wrong seed")
    if receipt.prompt != now.prompt:
        wrong.append(f"{name} was generated for another prompt")
    _raise(wrong or list(_changed(name, receipt, now.streams)), "between driver and engine")


def check_episode(episode: Episode) -> None:
    """An episode is about to be trained on. Raises ``ReceiptError``."""
    for leaf in episode.leaves:
        for number, turn in enumerate(leaf.turns):
            receipt = turn.receipt
            if receipt is None:
                continue
            context = prompt_digest(leaf.prompt_ids)
            if turn.start:
                context = zlib.crc32(np.ascontiguousarray(leaf.tokens.ids[: turn.start], np.int32).data, context)
            whole = turn.start == 0 and turn.stop == len(leaf.tokens)
            streams = stream_digests(leaf.tokens if whole else leaf.tokens[turn.start : turn.stop])
            if receipt.id[:-1] == episode.id[:-1] and receipt.prompt == context and receipt.streams == streams:
                continue
            name = str(episode.id._replace(turn=number))
            wrong = list(_of_another(name, episode.id._replace(turn=receipt.id.turn), receipt))
            if receipt.prompt != context:
                wrong.append(f"{name} was generated for a different context")
            wrong = wrong or list(_changed(name, receipt, streams, with_prompt=not turn.start))
            _raise(wrong, "between its arrival and the batch")


def _of_another(name: str, id: EpisodeId, receipt: Receipt) -> Iterator[str]:
    if receipt.id != id:
        yield f"{name} holds the response of {receipt.id}"


def _changed(name: str, receipt: Receipt, now: bytes, *, with_prompt: bool = True) -> Iterator[str]:
    for number, stream in enumerate(stream_types()):
        if is_of_prompt(stream) and not with_prompt:
            continue  # what was known of what stands before the tokens went to that
        here = slice(number * _DIGEST.size, (number + 1) * _DIGEST.size)
        if receipt.streams[here] != now[here]:
            yield f"the {words(stream)} of {name} differ from those that its engine generated"


def _raise(wrong: Sequence[str], where: str) -> None:
    if wrong:
        raise ReceiptError(
            f"{'; '.join(wrong)}: it was changed {where} and is not trained on. If it happens again after a restart, "
            "check memory and network of the machines involved; if they are sound, please report it"
        )
