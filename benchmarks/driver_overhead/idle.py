"""An engine and a learner rank that do no work: they run in the real processes and answer at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult
from rljob_trainer.episodes.tokens import FloatArray, Tokens
from rljob_trainer.learner.protocol import ScoreRequest, UpdateRequest
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.usage import Usage
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.manifest import Manifest
from rljob_trainer.weights.receiver import ReceiveReport
from rljob_trainer.weights.residence import Resident


class IdleEngine:
    """An ``Engine`` whose every request is done after one step, at its full length."""

    weight_ranks = 0
    running = 0

    def __init__(self, vocabulary: int) -> None:
        self.version = 0
        self.tokens_made = 0
        self._requests: list[GenerationRequest] = []
        self._random = np.random.default_rng(0)
        self._vocabulary = vocabulary

    def add(self, request: GenerationRequest) -> None:
        self._requests.append(request)

    @property
    def waiting(self) -> int:
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[GenerationResult]:
        requests, self._requests = self._requests, []
        longest = max(request.sampling.max_tokens for request in requests)
        # Above the special tokens.
        token_ids = self._random.integers(3, self._vocabulary, (len(requests), longest), dtype=np.int32)
        log_probs = np.full(longest, -np.log(self._vocabulary), np.float32)
        versions = np.full(longest, self.version, np.int32)
        lengths = [request.sampling.max_tokens for request in requests]
        self.tokens_made += sum(lengths)
        return [
            GenerationResult(request.id, Tokens.sampled(ids, log_probs, versions)[:length], "length")
            for request, ids, length in zip(requests, token_ids, lengths, strict=True)
        ]

    def abort(self, ids: Iterable[EpisodeId] | None = None) -> list[GenerationResult]:
        self._requests = []
        return []

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[FloatArray]:
        return [np.zeros(len(response), np.float32) for _, response in sequences]

    def begin_update(self) -> None: ...

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None: ...

    def resident(self, in_any_order: bool = False) -> Resident | None:
        return None

    def finish_update(self, version: int, manifest: Manifest) -> None:
        self.version, self.manifest = version, manifest

    def join_weights(self, link: WeightLink, first_rank: int, timeout: float) -> None: ...

    def receive_weights(self, version: int, timeout: float) -> ReceiveReport:
        self.finish_update(version, Manifest([]))
        return ReceiveReport(Manifest([]).version(version), 0, 0.0, 0.0, 0)

    def sleep(self, keep_weights: bool = True) -> None: ...

    def wake_weights(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def make_idle(rank: LearnerRank, vocabulary: int) -> None:
    """Runs in the rank's process: replaces the engine beside it, and lets each of its methods work once only.

    Later calls answer with the first result: shapes are the same in every step, since responses have full length.
    """
    rank.attachments.get(EngineLoop).close()
    rank.attachments.put(EngineLoop(lambda: IdleEngine(vocabulary), "idle"))
    for name in ("update", "score"):
        setattr(rank, name, _once(getattr(rank, name)))


def _once(method: Any) -> Any:
    answers: dict[tuple[ScoreRequest | UpdateRequest, ...], Any] = {}

    def answer(*args: Any) -> Any:
        key = tuple(arg for arg in args if isinstance(arg, ScoreRequest | UpdateRequest))
        if key not in answers:
            first = answers[key] = method(*args)
            first.usage = Usage()  # its seconds are not those of the steps that get it again
        return answers[key]

    return answer
