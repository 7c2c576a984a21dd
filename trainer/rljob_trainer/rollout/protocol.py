"""What an inference engine is to the rest of the trainer.

An engine is a plain, single-threaded object that samples tokens and scores them. It knows neither Ray nor
rewards nor prompts as text: token ids in, token ids out. The Ray actor around it is ``rollout/actor.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult
from rljob_trainer.episodes.tokens import FloatArray

if TYPE_CHECKING:
    import torch

    from rljob_trainer.weights.group import WeightLink
    from rljob_trainer.weights.manifest import Manifest
    from rljob_trainer.weights.receiver import ReceiveReport
    from rljob_trainer.weights.residence import Resident


class Engine(Protocol):
    """One rollout replica. Not thread-safe; whoever owns it calls from one thread."""

    @property
    def version(self) -> int:
        """The policy version of the weights now loaded."""
        ...

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the weights that it was given last; None while an update is under way or its weights are
        gone, and before the first update."""
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

    def abort(self, ids: Iterable[EpisodeId] | None = None) -> list[GenerationResult]:
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

    def finish_update(self, version: int, manifest: Manifest) -> None:
        """The update is complete: drops the prefix cache and serves ``version`` from now on, whose ``manifest`` is that
        of what was loaded (or, where weights are shared, of the weights themselves).

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

    def resident(self, in_any_order: bool = False) -> Resident | None:
        """What is in memory of the weights that are sampled with (``weights/residence.py``). None where that is not the
        engine's own, or away while it sleeps. ``in_any_order``: such sums, where tensors are kept as published."""
        ...

    def sleep(self, keep_weights: bool = True) -> None:
        """Frees the KV cache and, where the engine owns them, the weights' device memory.

        Running requests wait and are prefilled again after ``wake``; no ``step`` until then. With ``keep_weights``
        False an update comes before ``wake``: the weights need not be kept anywhere, and the manifest is not.
        """
        ...

    def wake_weights(self) -> None:
        """Takes the weights' memory back, for an update, and sleeps on. Nothing happens to one that is awake."""
        ...

    def wake(self) -> None:
        """Takes back what ``sleep`` freed and has not come back yet. Nothing happens to one that is awake. Raises
        ``EngineError`` when its weights are gone and no update has come."""
        ...

    def close(self) -> None: ...
