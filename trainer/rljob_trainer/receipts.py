"""What an engine says of a response beside the response: which request it answers, and digests of what it made.

A response goes from the engine's memory through a message, the shelf and the driver's batch to a rank. That nothing is
exchanged, cut or doubled on this way is compared with the receipt twice: when the response arrives, and when the batch
is laid out. A digest is a CRC-32 of an array's bytes: a microsecond for a response, and it sees every change of a few
neighbouring bytes and any other with a chance of four billion to one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rljob_trainer.errors import EngineError

if TYPE_CHECKING:
    from rljob_trainer.samples import FloatArray, IntArray, Prompt, Sample

_SAMPLE = re.compile(r"(\d+)/(\d+)")


class Sampling(Protocol):
    """How a response is drawn."""

    @property
    def temperature(self) -> float: ...


class Request(Protocol):
    """What an engine is asked for."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def seed(self) -> int: ...


class Answer(Protocol):
    """A response, all arrays ``[T]``."""

    request_id: str
    token_ids: IntArray
    log_probs: FloatArray
    versions: IntArray
    receipt: Receipt | None


class Receipt(NamedTuple):
    """Of one response, by the engine that finished it."""

    request_id: str
    prompt: int
    """Digest of the prompt's token ids, as those that follow."""
    temperature: float
    seed: int
    token_ids: int
    log_probs: int
    versions: int


class ReceiptError(EngineError):
    """What arrived is not what an engine sent, or not what it was asked for (exit code 75: start again)."""


def digest(array: npt.NDArray[Any]) -> int:
    """32 bits of an array's bytes."""
    return zlib.crc32(array.data if array.flags.c_contiguous else array.tobytes())


def prompt_digest(token_ids: Sequence[int]) -> int:
    """The same of a prompt, which is a tuple."""
    return digest(np.asarray(token_ids, np.int32))


class Receipts:
    """Written by whoever drives an engine, between the requests that come in and the results that leave."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, float, int]] = {}
        self._last: tuple[Sequence[int], int] = ((), 0)

    def take(self, request: Request) -> None:
        """The engine has been given a request."""
        if request.prompt_ids is not self._last[0]:  # siblings share it
            self._last = request.prompt_ids, prompt_digest(request.prompt_ids)
        self._asked[request.request_id] = self._last[1], request.sampling.temperature, request.seed

    def write(self, results: Sequence[Answer]) -> None:
        """The engine has ended requests."""
        for result in results:
            asked = self._asked.pop(result.request_id, None)
            if asked is not None:
                result.receipt = Receipt(
                    result.request_id,
                    *asked,
                    # In the types that they travel in (``columns.py``).
                    digest(np.asarray(result.token_ids, np.int32)),
                    digest(np.asarray(result.log_probs, np.float32)),
                    digest(np.asarray(result.versions, np.int32)),
                )


def check_answer(request: Request, result: Answer) -> None:
    """A response has arrived. Raises ``ReceiptError`` saying what is wrong with it; one without receipt is not
    looked at."""
    receipt = result.receipt
    if receipt is None:
        return
    name = named(request.request_id)
    asked = request.sampling.temperature
    wrong = list(_of_another(name, request.request_id, receipt))
    if receipt.temperature != asked:
        wrong.append(f"{name} was drawn at temperature {receipt.temperature:g}, not at {asked:g}")
    if receipt.seed != request.seed:
        wrong.append(f"{name} was drawn with another seed than its own")
    if receipt.prompt != prompt_digest(request.prompt_ids):
        wrong.append(f"{name} was made for another prompt than its own")
    _raise(wrong or list(_changed(name, receipt, result)), "between driver and engine")


def check_sample(prompt: Prompt, sample: Sample) -> None:
    """A sample is about to be trained on. Raises ``ReceiptError``."""
    receipt = sample.receipt
    if receipt is None:
        return
    name = f"sample {sample.index} of prompt {prompt.ordinal}"
    wrong = list(_of_another(name, f"{prompt.ordinal}/{sample.index}", receipt))
    if receipt.prompt != prompt_digest(prompt.token_ids):
        wrong.append(f"{name} was made for other tokens than its prompt has now")
    _raise(wrong or list(_changed(name, receipt, sample)), "between its arrival and the batch")


def named(request_id: str) -> str:
    """A request in a message."""
    match = _SAMPLE.fullmatch(request_id)
    return f"request {request_id}" if match is None else f"sample {match[2]} of prompt {match[1]}"


def _of_another(name: str, request_id: str, receipt: Receipt) -> Iterator[str]:
    if receipt.request_id != request_id:
        yield f"{name} holds the response of {named(receipt.request_id)}"


def _changed(name: str, receipt: Receipt, holder: Answer | Sample) -> Iterator[str]:
    for words, kept, now in (
        ("token ids", receipt.token_ids, holder.token_ids),
        ("log-probs", receipt.log_probs, holder.log_probs),
        ("versions", receipt.versions, holder.versions),
    ):
        if digest(now) != kept:
            yield f"the {words} of {name} are not those that its engine made"


def _raise(wrong: Sequence[str], where: str) -> None:
    if wrong:
        raise ReceiptError(
            f"{'; '.join(wrong)}: it was changed {where}, and is not trained on. If this comes back after a new start, "
            "look at the memory and the network of the machines involved; if those are sound, please report it"
        )
