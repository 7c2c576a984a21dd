"""What an inference engine is to the rest of the trainer.

An engine is a plain, single-threaded object that samples tokens and scores them. It knows neither Ray nor
rewards nor prompts as text: token ids in, token ids out. The Ray actor around it is ``rollout/actor.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rljob_trainer.receipts import Receipt
from rljob_trainer.samples import FinishReason, FloatArray, IntArray

if TYPE_CHECKING:
    import torch

    from rljob_trainer.weights.group import WeightLink
    from rljob_trainer.weights.receiver import ReceiveReport


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are drawn. ``temperature`` 0 means greedy. ``top_k`` 0 and ``top_p`` 1 mean off.

    A response ends with the first of ``stop_token_ids`` (which is part of it) or after ``max_tokens``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """What a sample has so far; all arrays ``[T]``. Many may wait, and as tuples they would weigh eight times more."""

    token_ids: IntArray
    log_probs: FloatArray
    versions: IntArray

    def __len__(self) -> int:
        return len(self.token_ids)


NOTHING = Begun(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to be generated. ``seed`` fixes its random numbers whatever else runs beside it.

    A request that was interrupted elsewhere carries what it has so far, which ``sampling.max_tokens`` counts too.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingSettings
    seed: int
    begun: Begun = NOTHING

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that the next one follows."""
        return (*self.prompt_ids, *self.begun.token_ids.tolist()) if len(self.begun) else self.prompt_ids


@dataclass(slots=True)
class GenerationResult:
    """A finished (or aborted, hence partial) response; all arrays ``[T]``.

    ``log_probs`` are those of the distribution that was sampled from: log-softmax of logits / temperature, over the
    tokens that top-k and top-p keep. Greedy requests report them at temperature 1.
    """

    request_id: str
    token_ids: IntArray
    log_probs: FloatArray
    versions: IntArray
    finish: FinishReason
    seconds: float = 0.0
    """From the first request to the response, waiting and interruptions included; the pool measures it."""
    receipt: Receipt | None = None
    """What whoever drives the engine says of the response."""


def continued(request: GenerationRequest, partial: GenerationResult) -> GenerationRequest:
    """The request that goes on where ``partial`` stopped."""
    return replace(request, begun=Begun(partial.token_ids, partial.log_probs, partial.versions))


def cut(partial: GenerationResult, version: int) -> None:
    """Takes away the tokens from the first one on that ``version`` made, or a later one."""
    wrong = np.flatnonzero(partial.versions >= version)
    kept = int(wrong[0]) if len(wrong) else len(partial.versions)
    partial.token_ids, partial.log_probs = partial.token_ids[:kept], partial.log_probs[:kept]
    partial.versions = partial.versions[:kept]


def already_finished(request: GenerationRequest) -> FinishReason | None:
    """Why nothing is left to generate for a request that came with tokens; ``None`` when something is."""
    if len(request.begun) >= request.sampling.max_tokens:
        return "length"
    if len(request.begun) and int(request.begun.token_ids[-1]) in request.sampling.stop_token_ids:
        return "stop"
    return None


def brought_along(request: GenerationRequest, finish: FinishReason) -> GenerationResult:
    """A result that holds just what came with the request."""
    begun = request.begun
    return GenerationResult(request.request_id, begun.token_ids, begun.log_probs, begun.versions, finish)


def withdrawn(waiting: deque[GenerationRequest], wanted: Set[str] | None) -> list[GenerationResult]:
    """Takes the named (or all) requests out of a queue, and returns what they had brought along."""
    results: list[GenerationResult] = []
    for _ in range(len(waiting)):
        request = waiting.popleft()
        if wanted is None or request.request_id in wanted:
            results.append(brought_along(request, "aborted"))
        else:
            waiting.append(request)
    return results


def check_request(request: GenerationRequest, context: int) -> None:
    """Raises ``ValueError`` for a request that no engine with this context can run."""
    name, sampling = request.request_id, request.sampling
    if not request.prompt_ids:
        raise ValueError(f"request {name}: the prompt is empty")
    if len(request.prompt_ids) + sampling.max_tokens > context:
        raise ValueError(
            f"request {name}: {len(request.prompt_ids)} prompt tokens and up to {sampling.max_tokens} response tokens "
            f"do not fit the context of {context}"
        )
    begun = request.begun
    if not len(begun.token_ids) == len(begun.log_probs) == len(begun.versions):
        raise ValueError(f"request {name}: its partial ids, log-probs and versions differ in length")


class Engine(Protocol):
    """One rollout replica. Not thread-safe; whoever owns it calls from one thread."""

    @property
    def version(self) -> int:
        """The policy version of the weights now loaded."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Queues a request. Raises ``ValueError`` if it can never run (too long for the context)."""
        ...

    def step(self) -> list[GenerationResult]:
        """Advances the running requests by at least one token; returns those that have finished."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        ...

    @property
    def running(self) -> int:
        """Requests that are being sampled."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        ...

    @property
    def tokens_made(self) -> int:
        """Tokens sampled since the engine was built."""
        ...

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationResult]:
        """Ends the named (or all) requests now and returns their partial results, ``finish="aborted"``."""
        ...

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[FloatArray]:
        """Log-probs of given responses, one ``[T]`` per ``(prompt_ids, response_ids)``.

        While requests are running, which may go on, only at temperature 1.
        """
        ...

    def begin_update(self) -> None:
        """Weights will arrive. No ``step`` until ``finish_update``."""
        ...

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes full tensors under their Hugging Face names. May be called many times per update.

        They must not change afterwards; engines may hold on to them until a layer is complete.
        """
        ...

    def finish_update(self, version: int) -> None:
        """The update is complete: drops the prefix cache and serves ``version`` from now on.

        Requests that run across an update go on: in the torch engine, and in vLLM with ``keep_cache``, with the keys
        and values they have, otherwise prefilled anew under the new weights. Every token carries the version that
        sampled it, and a request that starts later never meets keys and values of other weights.
        """
        ...

    @property
    def weight_ranks(self) -> int:
        """How many members of a weight group this engine is (its worker processes)."""
        ...

    def join_weights(self, link: WeightLink, first_rank: int, timeout: float) -> None:
        """Joins a weight group as ranks ``first_rank`` and following; leaves the one before."""
        ...

    def receive_weights(self, version: int, timeout: float) -> ReceiveReport:
        """One whole update from the weight group: begin, receive and load, finish."""
        ...

    def digests(self, in_any_order: bool = False) -> dict[str, int] | None:
        """Of the parameters that are sampled with, by Hugging Face name (``weights/digests.py``); None where an engine
        keeps them in a layout of its own."""
        ...

    def sleep(self, keep_weights: bool = True) -> None:
        """Frees the KV cache and, where the engine owns them, the weights' device memory.

        Running requests wait and are prefilled again after ``wake``; no ``step`` until then. With ``keep_weights``
        False an update comes before ``wake``: the weights need not be kept anywhere.
        """
        ...

    def wake_weights(self) -> None:
        """Takes the weights' memory back, for an update, and sleeps on. Nothing happens to one that is awake."""
        ...

    def wake(self) -> None:
        """Takes back what ``sleep`` freed and has not come back yet. Nothing happens to one that is awake."""
        ...

    def close(self) -> None: ...
