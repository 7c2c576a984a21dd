"""What a model is asked for and what it answers: token ids in, tokens out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from rljob_trainer.episodes.episode import FinishReason
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.receipts import Receipt, prompt_digest
from rljob_trainer.episodes.tokens import NOTHING, Tokens


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


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to be generated. ``seed`` fixes its random numbers whatever else runs beside it.

    A request that was interrupted elsewhere carries what it has so far, which ``sampling.max_tokens`` counts too.
    """

    id: EpisodeId
    prompt_ids: tuple[int, ...]
    sampling: SamplingSettings
    seed: int
    begun: Tokens = NOTHING

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that the next one follows."""
        return (*self.prompt_ids, *self.begun.ids.tolist()) if len(self.begun) else self.prompt_ids


class BegunTurn(NamedTuple):
    """What there is of a turn that was not finished, or not trained."""

    context: int
    """The digest of what the model saw (``receipts.prompt_digest``): for anything else the tokens are of no use."""
    tokens: Tokens

    def after(self, context: Sequence[int]) -> Tokens:
        """The tokens, if the model sees ``context``; else none."""
        return self.tokens if len(self.tokens) and prompt_digest(context) == self.context else NOTHING


NOT_BEGUN = BegunTurn(0, NOTHING)


@dataclass(slots=True)
class GenerationResult:
    """A finished (or aborted, hence partial) response.

    The log-probs of its tokens are those of the distribution that was sampled from: log-softmax of
    logits / temperature, over the tokens that top-k and top-p keep. Greedy requests report them at temperature 1.
    """

    id: EpisodeId
    tokens: Tokens
    finish: FinishReason
    seconds: float = 0.0
    """From the first request to the response, waiting and interruptions included; the pool measures it."""
    receipt: Receipt | None = None
    """What whoever drives the engine says of the response."""
    prefilled: int = 0
    """Tokens of what the request came with whose keys and values the engine computed; the others it had."""


Finished = Callable[[int, GenerationResult], None]
"""Called with an answer and its position among the requests, before all answers are there."""


def continued(request: GenerationRequest, partial: GenerationResult) -> GenerationRequest:
    """The request that goes on where ``partial`` stopped."""
    return replace(request, begun=partial.tokens)


def already_finished(request: GenerationRequest) -> FinishReason | None:
    """Why nothing is left to generate for a request that came with tokens; ``None`` when something is."""
    if len(request.begun) >= request.sampling.max_tokens:
        return "length"
    if len(request.begun) and int(request.begun.ids[-1]) in request.sampling.stop_token_ids:
        return "stop"
    return None


def brought_along(request: GenerationRequest, finish: FinishReason) -> GenerationResult:
    """A result that holds just what came with the request."""
    return GenerationResult(request.id, request.begun, finish)


def withdrawn(waiting: deque[GenerationRequest], wanted: Set[EpisodeId] | None) -> list[GenerationResult]:
    """Takes the named (or all) requests out of a queue, and returns what they had brought along."""
    results: list[GenerationResult] = []
    for _ in range(len(waiting)):
        request = waiting.popleft()
        if wanted is None or request.id in wanted:
            results.append(brought_along(request, "aborted"))
        else:
            waiting.append(request)
    return results


def check_request(request: GenerationRequest, context: int) -> None:
    """Raises ``ValueError`` for a request that no engine with this context can run."""
    name, sampling = request.id, request.sampling
    if not request.prompt_ids:
        raise ValueError(f"{name}: the prompt is empty")
    if len(request.prompt_ids) + sampling.max_tokens > context:
        raise ValueError(
            f"{name}: {len(request.prompt_ids)} prompt tokens and up to {sampling.max_tokens} response tokens "
            f"do not fit the context of {context}"
        )
