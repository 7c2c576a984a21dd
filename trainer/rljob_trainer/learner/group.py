"""The driver's handle of all ranks: one Ray actor each, shares out, results back in the order of the batch.

Nothing here waits without a deadline. When a rank dies or fails, the others may hang in a collective that it will never
join: the error names the one that failed first, and the whole group is ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.exceptions import OutOfMemoryError, RayTaskError

from rljob_trainer.actor_deaths import DEATHS, KILLED, cause_of_death
from rljob_trainer.aside import aside
from rljob_trainer.errors import LearnerError, RLJobError
from rljob_trainer.learner.actor import RankHandle
from rljob_trainer.learner.backend import BackendRank
from rljob_trainer.learner.backends import backend_of
from rljob_trainer.learner.bundles import Bundles, reserve
from rljob_trainer.learner.fabric import missing_fabric
from rljob_trainer.learner.metrics import update_result, usage_metrics
from rljob_trainer.learner.options import RUN_SLACK_SECONDS, GroupOptions
from rljob_trainer.learner.protocol import (
    ACTOR_ALONE,
    LearnerFacts,
    LossSettings,
    ScoreRequest,
    ScoreResult,
    SequenceBatch,
    UpdateRequest,
    UpdateResult,
)
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.work import Cut, cut, data_indices_of

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

_GRACE_SECONDS = 3.0
"""After a first failure: how long to wait for news of a rank that died, which is then the one to blame."""


_QUICK_SEQUENCES = 1024
"""Of all mini-batches together. So many are cut in a millisecond, which the event loop can spare; a thread takes as
long, since the loop computes the batch's metrics meanwhile and Python lets one thread run at a time."""
_QUICK_TOKENS = 2**17
"""So many are copied in a part of that."""


class LearnerGroup:
    """A ``RankedLearner`` over Ray actors, for any backend: ``settings.backend`` says where ranks stand and what rows
    are like.

    Usage::

        learner = await LearnerGroup.start(LearnerSettings.from_job(job, model_path))
        result = await learner.update(batch, loss, mini_batches)
        await learner.close()
    """

    def __init__(self, settings: LearnerSettings, options: GroupOptions) -> None:
        """Raises ``JobFileError`` when there is no such backend, or it cannot do this job."""
        backend = backend_of(settings.backend, settings.code_paths)
        self.settings = settings
        self.placement, self.rules = backend.placement(settings), backend.rules(settings)
        self.has_live_model = backend.has_live_model(settings)
        self.call_seconds, self.dtype = options.call_seconds, str(settings.dtype)
        self.handles: list[RankHandle] = []
        self.bundles: Bundles | None = None
        self.facts: LearnerFacts | None = None
        self._options = options
        self._failed: str | None = None
        data_indices_of(self.placement)

    @property
    def ranks(self) -> int:
        return len(self.placement)

    @classmethod
    async def start(cls, settings: LearnerSettings, options: GroupOptions | None = None) -> LearnerGroup:
        """Starts the ranks and waits until their models are ready. Ray must be initialised.

        Raises ``LearnerError`` when that takes longer than ``start_seconds`` or a rank fails.
        """
        group = cls(settings, options or GroupOptions())
        try:
            await group._start()
        except BaseException:
            group._kill()
            raise
        return group

    async def _start(self) -> None:
        options, settings = self._options, self.settings
        deadline = time.monotonic() + options.start_seconds
        asked = options.resources
        what = f"start ({options.bundle or asked} each; check that the cluster has that)"
        if options.bundle:
            self.bundles = await reserve(
                settings.ranks, options.bundle, options.start_seconds, options.nodes, together=options.together
            )
            if self.bundles is None:
                raise LearnerError(
                    f"the cluster had no resources for {settings.ranks} learner ranks within "
                    f"{options.start_seconds:.0f} s (deadlines.startSeconds): {what}"
                )
        places = [self.bundles.options(rank) if self.bundles else {} for rank in range(settings.ranks)]
        # Ray asks its head, which may be gone, to register class and actors, and answers when that has answered.
        self.handles = await aside(
            lambda: [RankHandle(number, {**asked, **place}) for number, place in enumerate(places)]
        )
        (address,) = await self._gather(what, [self.handles[0].address()], deadline - time.monotonic(), names=[0])
        left = deadline - time.monotonic()
        if self.bundles is not None:
            devices = await self._gather(what, [handle.device() for handle in self.handles], left)
            self.bundles = replace(self.bundles, devices=tuple(devices))
        if settings.device == "cuda" and settings.ranks > 1:
            seen = await self._gather(what, [handle.fabric() for handle in self.handles], left)
            if (missing := missing_fabric(seen)) is not None:
                log.warning("%s", missing)
        starts = [handle.start(settings, address, options.collective_seconds) for handle in self.handles]
        self.facts = (await self._gather(what, starts, left))[0]

    # --- the Learner protocol -----------------------------------------------------------------------------------------

    async def score(self, batch: SequenceBatch, request: ScoreRequest) -> ScoreResult:
        if request.empty or not len(batch):
            return ScoreResult()
        work = await self._cut(batch, [range(len(batch))])
        told = await self._all(
            "score", [handle.score(share, request) for handle, share in zip(self._alive(), work.sent(), strict=True)]
        )
        parts = work.returned(told)
        streams = {
            name: work.merge(batch, [part.streams[name] for part in parts], per_sequence=name == "final_values")
            for name in parts[0].streams
        }
        return ScoreResult(**streams, metrics=usage_metrics([rank.usage for rank in told]))

    async def update(
        self,
        batch: SequenceBatch,
        loss: LossSettings,
        mini_batches: Sequence[Sequence[int]],
        request: UpdateRequest = ACTOR_ALONE,
    ) -> UpdateResult:
        work = await self._cut(batch, mini_batches)
        reports = await self._all(
            "update",
            [handle.update(share, loss, request) for handle, share in zip(self._alive(), work.sent(), strict=True)],
        )
        return update_result(reports, work, batch)

    async def give_up(self) -> None:
        asked = [_coroutine(handle.give_up()) for handle in self._alive()]
        await asyncio.gather(*asked, return_exceptions=True)  # who has died is told of by the call under way

    async def save(self, place: str | Path, belongs_to: str = "") -> None:
        await self._all("save", [handle.save(place, belongs_to) for handle in self._alive()])

    async def load(self, place: str | Path, belongs_to: str = "") -> None:
        await self._all("load", [handle.load(place, belongs_to) for handle in self._alive()])

    async def export(self, folder: Path) -> None:
        await self._all("export", [handle.export(folder) for handle in self._alive()])

    async def close(self) -> None:
        self._kill()

    # --- the RankedLearner protocol -----------------------------------------------------------------------------------

    async def rest(self, *, actor: bool = True) -> None:
        await self._all("rest", [handle.rest(actor=actor) for handle in self._alive()])

    async def wake(self) -> None:
        await self._all("wake", [handle.wake() for handle in self._alive()])

    async def run(
        self, function: Callable[Concatenate[BackendRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        calls = [handle.run(function, *args, **kwargs) for handle in self._alive()]
        return await self._gather(function.__name__, calls, self.call_seconds + RUN_SLACK_SECONDS)

    def run_at(
        self, rank: int, function: Callable[Concatenate[BackendRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        return self._alive()[rank].run(function, *args, **kwargs)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _cut(self, batch: SequenceBatch, mini_batches: Sequence[Sequence[int]]) -> Cut:
        planned = partial(cut, batch, mini_batches, self.placement, self.rules)
        quick = sum(map(len, mini_batches)) <= _QUICK_SEQUENCES and batch.token_ids.size <= _QUICK_TOKENS
        return planned() if quick else await asyncio.to_thread(planned)

    async def _all(self, what: str, calls: Sequence[Awaitable[T]]) -> list[T]:
        """One call of every rank, by rank."""
        return await self._gather(what, calls, self.call_seconds)

    def _alive(self) -> list[RankHandle]:
        if self._failed is not None:
            raise LearnerError(f"the learner has already failed: {self._failed}")
        return self.handles

    async def _gather(
        self, what: str, calls: Sequence[Awaitable[T]], seconds: float, names: Sequence[int] | None = None
    ) -> list[T]:
        """All results in order. On the first failure, or when time is up, ends the group and says who and why."""
        ranks = list(names or range(len(calls)))
        tasks = [asyncio.ensure_future(_coroutine(call)) for call in calls]
        try:
            done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            failed = any(task.exception() is not None for task in done)
            if not failed and not pending:
                return [task.result() for task in tasks]
            if failed and pending and not any(_died(task) for task in done):
                # A collective fails on the survivors first: give the news of a death time to arrive.
                await asyncio.wait(pending, timeout=_GRACE_SECONDS)
            raise self._failure(what, ranks, tasks, seconds)
        finally:
            for task in tasks:
                task.cancel()

    def _failure(self, what: str, ranks: list[int], tasks: Sequence[asyncio.Future[Any]], seconds: float) -> Exception:
        errors = {
            rank: task.exception()
            for rank, task in zip(ranks, tasks, strict=True)
            if task.done() and task.exception() is not None
        }
        waiting = [rank for rank, task in zip(ranks, tasks, strict=True) if not task.done()]
        dead = {rank: error for rank, error in errors.items() if isinstance(error, DEATHS)}
        starved = next((error for error in dead.values() if isinstance(error, OutOfMemoryError)), None)
        listed = ", ".join(map(str, dead))
        cause: BaseException | None = None
        if starved is not None:
            message = f"learner rank {listed} died during {what}: {cause_of_death(starved)}"
        elif dead:
            message = f"learner rank {listed} died during {what}: {KILLED}; start again from the last checkpoint"
        elif errors:
            rank, error = next(iter(errors.items()))
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, RLJobError):
                if not waiting:
                    return cause  # all ranks are through: the group can go on
                message = f"learner rank {rank} failed in {what}: {cause}"
            else:
                message = f"learner rank {rank} failed in {what}: {error}"
        else:
            listed = ", ".join(map(str, waiting))
            setting = "start" if what.startswith("start") else "progress"
            message = (
                f"learner rank {listed} did not finish {what} within {seconds:.0f} s (deadlines.{setting}Seconds): "
                "raise that if the rank is only slow; if it hangs, see its log (all others wait for it in a "
                "collective)"
            )
        self._failed = message
        self._kill()
        failure = LearnerError(message)
        failure.__cause__ = cause
        return failure

    def _kill(self) -> None:
        handles, self.handles = self.handles, []
        for handle in handles:
            handle.kill()
        if self.bundles is not None:
            self.bundles.free()
            self.bundles = None
        self._failed = self._failed or "it was closed"


async def _coroutine(call: Awaitable[T]) -> T:
    return await call


def _died(task: asyncio.Future[Any]) -> bool:
    return isinstance(task.exception(), DEATHS)
