"""Whether engines hold the weights that the learner trains: compared by digests around every publication.

Checksums of a publication prove that bytes arrived, canaries that an engine computes about what the trainer computes.
Weights that are one small step old, or of which two rows have changed places, pass both. So after a publication the
learner and each engine say the digests of all parameters as they lie in memory, and before the next one engines say
them again: what has changed meanwhile, nobody published. An engine with other weights gets no requests, receives them
once more and is asked again; one that still has others, or whose memory changes, is taken for lost, and the pool
replaces it. When all of them have others in spite of that, what the learner sends is not what it trains: the run ends.

Engines that keep weights in a layout of their own (vLLM) have no digests; for them there are the canaries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.publish.canaries import Pool, Resend
from rljob_trainer.publish.publication import Ranks
from rljob_trainer.publish.quiet import Publication
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.waits import Waits
from rljob_trainer.weights import learner_side
from rljob_trainer.weights.digests import Digests, cause_of, differing

_KEPT = 4
"""Earlier versions that an engine is recognised to have stayed at."""
_REMEDY = "If it happens again, look at the memory of that machine and at what else writes into that process"


class VersionedPool(Pool, Protocol):
    """Engines that serve a version."""

    @property
    def version(self) -> int: ...


class SameWeights:
    """Compares the engines of a pool with the learner's ranks."""

    def __init__(
        self,
        ranks: Ranks,
        pool: VersionedPool,
        resend: Resend,
        *,
        seconds: float,
        report: Callable[[str], None],
        waits: Waits | None = None,
    ) -> None:
        self._ranks, self._pool, self._resend = ranks, pool, resend
        self._seconds, self._report, self._waits = seconds, report, waits or Waits()
        self._published: dict[int, Digests] = {}
        """The learner's by version, the latest last."""
        self._holds: dict[str, tuple[int, Digests]] = {}
        """What each engine was found to hold, and of which version."""
        self._told = True
        """Whether any engine had digests to tell at the last look; where none has, the learner need not add up its
        own."""

    async def before(self) -> None:
        """Looks whether any engine's weights have changed since the last publication."""
        engines = [engine for engine in self._pool.serving if engine.name in self._holds]
        for engine, theirs in zip(engines, await self._all(engines), strict=True):
            version, held = self._holds[engine.name]
            if theirs is not None and (changed := differing(held, theirs)):
                self._pool.report_lost(
                    engine.name,
                    f"engine {engine.name}: {', '.join(changed[:3])} changed in its memory since version {version} was "
                    f"published, so that its last samples are of no version; it is replaced. {_REMEDY}",
                )

    async def after(self, version: int) -> None:
        """Compares, repairs. Raises ``EngineError`` when no engine can be given what the learner has."""
        engines = list(self._pool.serving)
        with self._waits.wait("trainer", "learner and engines to compare their weights", self._seconds):
            if self._told:
                told, theirs = await asyncio.gather(self._learners(), self._all(engines))
            else:
                theirs = await self._all(engines)
                told = await self._learners() if any(digests is not None for digests in theirs) else None
        self._told = any(digests is not None for digests in theirs)
        self._holds = {}
        if told is None or all(digests is None for digests in theirs):
            return
        self._published[version] = told
        while len(self._published) > _KEPT:
            del self._published[next(iter(self._published))]
        still: list[str] = []
        for engine, digests in zip(engines, theirs, strict=True):
            if digests is None:
                continue
            if differing(told, digests):
                cause = await self._repair(engine, version, told, digests)
                if cause:
                    still.append(cause)
                    continue
                digests = told  # which it has by now; before the repair it had others
            self._holds[engine.name] = version, digests
        if still and len(still) == len(engines):
            raise EngineError(
                f"no engine has the weights of version {version} that the learner trains, and sending them once more "
                f"did not help ({still[0]}): what the learner sends is not what it trains. Start again: the run "
                "continues from its last checkpoint; if it comes back, please report it with model family and versions"
            )
        for cause in still:
            name = cause.partition(":")[0].removeprefix("engine ")
            self._pool.report_lost(name, f"{cause}, also after a second sending")

    async def admits(self, engine: EngineHandle) -> bool:
        """Whether an engine that was just given the pool's version holds what was published under that number. Where
        it was not published by this process, nobody knows."""
        ours = self._published.get(self._pool.version)
        theirs = None if ours is None else await self._digests(engine)
        if ours is None or theirs is None or not differing(ours, theirs):
            return True
        cause = await self._cause(engine, self._pool.version, ours, theirs)
        self._report(f"{cause}: it does not serve")
        return False

    async def _repair(self, engine: EngineHandle, version: int, ours: Digests, theirs: Digests) -> str:
        """Sends the weights once more; what is wrong after it, empty: nothing."""
        cause = await self._cause(engine, version, ours, theirs)
        self._report(f"{cause}; it gets its weights once more")
        await self._pool.hold(engine.name)
        try:
            await self._resend(engine)
        except (EngineError, DeadlineError) as error:
            self._pool.report_lost(engine.name, f"it did not get its weights once more: {error}")
            return ""
        again = await self._digests(engine)
        if again is None or not differing(ours, again):
            self._pool.activate([engine.name])
            return ""
        return await self._cause(engine, version, ours, again)

    async def _cause(self, engine: EngineHandle, version: int, ours: Digests, theirs: Digests) -> str:
        former = {old: digests for old, digests in self._published.items() if old != version}
        sums = await asyncio.gather(self._learners(True), self._digests(engine, True))
        cause = cause_of(ours, theirs, former, (sums[0] or {}, sums[1] or {}))
        return f"engine {engine.name}: after the publication of version {version} {cause}"

    async def _learners(self, in_any_order: bool = False) -> Digests | None:
        told: list[Any] = await self._ranks.run(learner_side.digests, in_any_order)
        return next((digests for digests in told if digests is not None), None)

    async def _all(self, engines: list[EngineHandle]) -> list[Mapping[str, int] | None]:
        return list(await asyncio.gather(*(self._digests(engine) for engine in engines)))

    async def _digests(self, engine: EngineHandle, in_any_order: bool = False) -> Mapping[str, int] | None:
        """None also for an engine that is lost, which is the pool's business."""
        try:
            told: Mapping[str, int] | None = await engine.call("digests", in_any_order, seconds=self._seconds)
        except (EngineError, DeadlineError) as error:
            self._pool.report_lost(engine.name, str(error))
            return None
        return told


class ComparedPublication:
    """A publication with a look at the engines' weights before and after it."""

    def __init__(self, publication: Publication, weights: SameWeights) -> None:
        self._publication, self._weights = publication, weights

    async def publish(self, version: int) -> dict[str, float]:
        await self._weights.before()
        metrics = await self._publication.publish(version)
        await self._weights.after(version)
        return metrics
