"""The mismatch guard: after a publication the trainer and every engine score the same sequences, and must agree.

Checksums prove that the bytes arrived; canaries prove that the engine computes with them. The sequences are the first
prompts of the data, whose tokens are scored as if a model had written them: the same in every attempt of a run. An
engine that is further from the trainer than the tolerance gets no requests, receives its weights once more and is asked
again; one that still deviates is taken for lost, and the pool replaces it. One that joins between two publications is
asked before it serves.

When all engines deviate, the fault is in none of them. If they did so from the start it is another kernel, another
precision: they go on, and the run says so; whether the difference matters to training is for ``mismatch/...`` and
rollout correction. If they agreed before, new weights do not take effect as they should, every further sample would
come from another policy than the one that is trained, and the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from rljob_trainer.episodes.tokens import FloatArray
from rljob_trainer.errors import CHANGED_JOB, DeadlineError, EngineError
from rljob_trainer.learner.protocol import Learner, ScoreRequest, SequenceBatch
from rljob_trainer.publish.quiet import Publication
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.waits import Waits

_LONGEST = 256
"""Tokens of a canary: enough to tell, cheap to score."""
_REMINDER = 100
"""Checks between two sentences about a mismatch that all engines share."""


class Pool(Protocol):
    """The engines of a run, as the guard needs them."""

    @property
    def serving(self) -> Sequence[EngineHandle]: ...

    async def hold(self, name: str) -> None:
        """No more requests for an engine until ``activate``; what it made of its version is made again elsewhere."""
        ...

    def activate(self, names: Sequence[str]) -> None: ...

    def report_lost(self, name: str, reason: str) -> None: ...


Resend = Callable[[EngineHandle], Awaitable[None]]
"""Publishes the present version to one engine once more."""


class Canaries:
    """Compares engines with the learner on ``prompts`` (token ids).

    ``tolerance``: largest mean |log pi_trainer - log pi_engine| per token, in nats, that is accepted of an engine.
    """

    def __init__(
        self,
        learner: Learner,
        pool: Pool,
        resend: Resend,
        prompts: Sequence[Sequence[int]],
        *,
        tolerance: float,
        seconds: float,
        report: Callable[[str], None],
        waits: Waits | None = None,
    ) -> None:
        self._waits = waits or Waits()
        self._learner, self._pool, self._resend = learner, pool, resend
        self._tolerance, self._seconds, self._report = tolerance, seconds, report
        # Nothing comes before the first token, so it can only be read.
        cut = [tuple(prompt[: _LONGEST + 1]) for prompt in prompts if len(prompt) > 1]
        self._pairs = [(tokens[:1], tokens[1:]) for tokens in cut]
        self._checks_since_told: int | None = None
        self._agreed = False
        """Whether all engines were within the tolerance once."""
        self._trainer: FloatArray | None = None
        """What the trainer says under the present weights; None while it has yet to say."""
        self._asked = False
        """Whether it has said so for the next check."""

    def forget(self) -> None:
        """New weights are about to be published: an engine that joins with them, before the trainer has scored the
        canaries under them, must not be held against what it said of the former ones."""
        self._trainer, self._asked = None, False

    async def ask(self) -> None:
        """The trainer's part of the next check, for a time at which engines cannot do theirs."""
        if not self._pairs:
            return
        self.forget()
        with self._waits.wait("trainer", "the learner to score the canaries", self._seconds):
            scored = await self._learner.score(self._batch(), ScoreRequest(log_probs=True))
        self._trainer, self._asked = scored.log_probs, True

    async def check(self) -> dict[str, float]:
        """Compares, repairs, and returns metrics. Raises ``EngineError`` when no engine agrees any more."""
        if not self._pairs:
            return {}
        if not self._asked:
            await self.ask()
        trainer, self._asked = self._trainer, False
        assert trainer is not None
        # At temperature 1 an engine can score while its requests run on.
        asked = list(self._pool.serving)
        distances = await asyncio.gather(*(self._distance(engine, trainer) for engine in asked))
        known = {e.name: distance for e, distance in zip(asked, distances, strict=True) if distance is not None}
        # One that is lost says nothing of the others.
        engines = [engine for engine in asked if engine.name in known]
        deviating = [engine for engine in engines if not known[engine.name] <= self._tolerance]
        metrics = {"mismatch/canary/max": max(known.values(), default=0.0), "mismatch/canary/reloaded": 0.0}
        all_alike = len(deviating) == len(engines)
        if not deviating:
            self._checks_since_told = None
            self._agreed = self._agreed or bool(engines)
        elif all_alike and len(engines) > 1 and not self._agreed:
            self._tell_of_all(min(known.values()))
        else:
            metrics["mismatch/canary/reloaded"] = float(len(deviating))
            after = [await self._repair(e, trainer, known[e.name], replaceable=not all_alike) for e in deviating]
            still = [distance for distance in after if distance is not None and not distance <= self._tolerance]
            if len(still) == len(engines):
                self._all_still_deviate(min(still))
        return metrics

    async def admits(self, engine: EngineHandle) -> bool:
        """Whether an engine that was just given the present weights agrees with the trainer, and so may serve. Where no
        engine ever did, the next check decides."""
        if not self._agreed or self._trainer is None:
            return True
        distance = await self._distance(engine, self._trainer)
        if distance is None or distance <= self._tolerance:
            return True
        self._report(
            f"engine {engine.name} joins, but deviates from the trainer by {distance:.3g} nats per token under the "
            f"same weights (weights.canaryTolerance {self._tolerance:g}): it does not serve"
        )
        return False

    def _batch(self) -> SequenceBatch:
        prompts = np.array([len(prompt) for prompt, _ in self._pairs])
        responses = np.array([len(response) for _, response in self._pairs])
        ids = np.array([token for prompt, response in self._pairs for token in (*prompt, *response)], dtype=np.int32)
        return SequenceBatch(ids, prompts, responses, np.ones(int(responses.sum()), dtype=np.bool_))

    async def _distance(self, engine: EngineHandle, trainer: FloatArray) -> float | None:
        """Mean |difference| per token; infinite for one that is no number. None: the engine is lost, which is the
        pool's business."""
        try:
            with self._waits.wait("trainer", f"engine {engine.name} to score the canaries", self._seconds):
                scores = await engine.within(self._seconds, EngineLoop.score, self._pairs, 1.0)
        except (EngineError, DeadlineError) as error:
            self._pool.report_lost(engine.name, str(error))
            return None
        distance = float(np.abs(np.concatenate(scores) - trainer).mean())
        return distance if np.isfinite(distance) else float("inf")

    async def _repair(
        self, engine: EngineHandle, trainer: FloatArray, distance: float, *, replaceable: bool
    ) -> float | None:
        """Sends the weights once more; the distance after it, None for an engine that is lost meanwhile. One that still
        deviates is given up if it is ``replaceable``."""
        self._report(
            f"engine {engine.name} deviates from the trainer by {distance:.3g} nats per token under the same weights "
            f"(weights.canaryTolerance {self._tolerance:g}): it gets its weights again"
        )
        await self._pool.hold(engine.name)
        try:
            await self._resend(engine)
        except (EngineError, DeadlineError) as error:
            # The others hold the version: losing this one is no reason to end the run.
            self._pool.report_lost(engine.name, f"its weights could not be sent again: {error}")
            return None
        again = await self._distance(engine, trainer)
        if again is None:
            return None
        if again <= self._tolerance or not replaceable:
            self._pool.activate([engine.name])
        else:
            self._pool.report_lost(engine.name, f"it still deviates from the trainer by {again:.3g} nats per token")
        return again

    def _all_still_deviate(self, least: float) -> None:
        if not self._agreed:
            self._tell_of_all(least)
            return
        raise EngineError(
            f"every engine deviates from the trainer by at least {least:.3g} nats per token, and sending the weights "
            "again did not help, although they agreed before: new weights have no effect in the engines, and training "
            "would continue with samples of another policy. If the difference grew slowly and comes from precision, "
            f"raise weights.canaryTolerance ({self._tolerance:g}) {CHANGED_JOB}; otherwise please report it with "
            "engine, model family and versions"
        )

    def _tell_of_all(self, least: float) -> None:
        """A mismatch that no reload mends: said at once, and then now and again."""
        if self._checks_since_told is None or self._checks_since_told >= _REMINDER:
            self._report(
                f"every engine deviates from the trainer by at least {least:.3g} nats per token under the same "
                "weights: the cause is precision or kernels, not a single engine; correct for it "
                "(algorithm.rolloutCorrection) or set the same model.dtype for both"
            )
            self._checks_since_told = 0
        self._checks_since_told += 1


class GuardedPublication:
    """A publication that ends with a look at the canaries."""

    def __init__(self, publication: Publication, canaries: Canaries) -> None:
        self._publication, self._canaries = publication, canaries

    async def publish(self, version: int) -> dict[str, float]:
        self._canaries.forget()
        metrics = await self._publication.publish(version)
        return metrics | await self._canaries.check()
