"""Whether engines hold the weights that the learner trains: compared by sums around every publication.

A manifest proves that what was sent arrived, canaries that an engine computes about what the trainer computes. Weights
that are one small step old, or of which two rows have changed places in the engine's own hands, pass both. So after a
publication the learner's ranks add up their own shards, each engine adds up all parameters as they lie in its memory,
and before the next one engines do so again: what has changed meanwhile, nobody published. An engine with other weights
gets no requests, receives them once more and is asked again; one that still has others, or whose memory changes, is
taken for lost, and the pool replaces it. When all of them have others in spite of that, what the learner sends is not
what it trains: the run ends.

Engines that fuse or quantise weights (vLLM) tell a fingerprint of their runtime tensors. It has nothing in common with
what the learner has: they are compared with one another, those of a layout that were given the same version, and one
that differs from most is treated as above. Where there are only two and they differ, both get their weights once more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.publish.canaries import Pool, Resend
from rljob_trainer.publish.publication import Ranks
from rljob_trainer.publish.quiet import Publication
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.waits import Waits
from rljob_trainer.weights import learner_side
from rljob_trainer.weights.manifest import added_up
from rljob_trainer.weights.residence import PUBLISHED, Resident, Sums, cause_of, differing, listed

_KEPT = 4
"""Earlier versions that an engine is recognised to have stayed at."""
_REMEDY = "If it happens again, check that machine's memory and what else writes to that process"


class VersionedPool(Pool, Protocol):
    """Engines that serve a version."""

    @property
    def version(self) -> int: ...


class SameWeights:
    """Compares the engines of a pool with the learner's ranks, or with one another."""

    def __init__(
        self,
        ranks: Ranks | None,
        pool: VersionedPool,
        resend: Resend,
        *,
        seconds: float,
        report: Callable[[str], None],
        waits: Waits | None = None,
    ) -> None:
        """``ranks`` None: what the learner trains is out of its ranks' reach when engines are asked; then those that
        keep tensors as they are published are not compared."""
        self._ranks, self._pool, self._resend = ranks, pool, resend
        self._seconds, self._report, self._waits = seconds, report, waits or Waits()
        self._published: dict[int, Sums] = {}
        """The learner's by version, the latest last."""
        self._usual: dict[str, Sums] = {}
        """What engines of each layout of their own have of the present version."""
        self._holds: dict[str, tuple[int, Resident]] = {}
        """What each engine was found to hold, and of which version."""
        self._told = True
        """Whether any engine could be compared with the learner at the last look; where none can, the learner need not
        add up its own."""

    async def before(self) -> None:
        """Looks whether any engine's weights have changed since the last publication."""
        engines = [engine for engine in self._pool.serving if engine.name in self._holds]
        for engine, theirs in zip(engines, await self._all(engines), strict=True):
            version, held = self._holds[engine.name]
            if theirs is not None and (changed := differing(held.sums, theirs.sums)):
                self._pool.report_lost(
                    engine.name,
                    f"engine {engine.name}: {', '.join(changed[:3])} changed in its memory since version {version} was "
                    f"published, so its last samples belong to no version; it is replaced. {_REMEDY}",
                )

    async def after(self, version: int) -> None:
        """Compares, repairs. Raises ``EngineError`` when no engine can be given what the learner has."""
        engines = list(self._pool.serving)
        with self._waits.wait("trainer", "learner and engines to compare their weights", self._seconds):
            if self._told:
                learners, told = await asyncio.gather(self._learners(), self._all(engines))
            else:
                told = await self._all(engines)
                learners = await self._learners() if any(map(_as_published, told)) else None
        self._told = any(map(_as_published, told))
        self._holds = {}
        known = {engine: has for engine, has in zip(engines, told, strict=True) if has is not None}
        await self._compare_replicas(version, {e: has for e, has in known.items() if not _as_published(has)})
        if learners is not None and self._told:
            self._published[version] = learners
            while len(self._published) > _KEPT:
                del self._published[next(iter(self._published))]
            await self._compare_with_learner(version, {e: has for e, has in known.items() if _as_published(has)})

    async def _compare_with_learner(self, version: int, told: Mapping[EngineHandle, Resident]) -> None:
        ours = self._published[version]
        still: list[str] = []
        for engine, theirs in told.items():
            holds = theirs
            if differing(ours, theirs.sums):
                cause = await self._repair(engine, version, theirs.sums)
                if cause:
                    still.append(cause)
                    continue
                holds = Resident(ours)  # by now; before the repair it had others
            self._holds[engine.name] = version, holds
        if still and len(still) == len(told):
            raise EngineError(
                f"no engine has the learner's weights of version {version}, and sending them again did not help "
                f"({still[0]}): what the learner sends is not what it trains. Start again: the run continues from its "
                "last checkpoint; if it happens again, please report it with model family and versions"
            )
        for cause in still:
            name = cause.partition(":")[0].removeprefix("engine ")
            self._pool.report_lost(name, f"{cause}, even after its weights were sent again")

    async def _compare_replicas(self, version: int, told: Mapping[EngineHandle, Resident]) -> None:
        """Compares the engines of each layout with one another."""
        self._usual = {}
        for layout in {has.layout: None for has in told.values()}:
            has = {engine: each.sums for engine, each in told.items() if each.layout == layout}
            usual, most = _usual(list(has.values()))
            # Where nobody is in the majority nobody knows who is right.
            suspects = [engine for engine, sums in has.items() if differing(usual, sums) or not most]
            for engine in suspects:
                del has[engine]
            again = await asyncio.gather(*(self._sent_again(e, version, usual, told[e].sums) for e in suspects))
            has |= {engine: each.sums for engine, each in zip(suspects, again, strict=True) if each is not None}
            if not has:
                continue
            usual, _ = _usual(list(has.values()))
            self._usual[layout] = usual
            for engine, sums in has.items():
                if wrong := differing(usual, sums):
                    self._pool.report_lost(
                        engine.name,
                        f"engine {engine.name}: after the publication of version {version}, {listed(wrong)} differ "
                        "from the other engines, even after its weights were sent again",
                    )
                    continue
                self._holds[engine.name] = version, Resident(sums, layout)
                if engine in suspects:
                    self._pool.activate([engine.name])

    async def _sent_again(self, engine: EngineHandle, version: int, usual: Sums, theirs: Sums) -> Resident | None:
        """What an engine has after a second sending; None: it is lost."""
        others = "the other engines" if (wrong := differing(usual, theirs)) else "another engine"
        wrong = wrong or sorted(theirs)
        self._report(
            f"engine {engine.name}: after the publication of version {version}, {listed(wrong)} differ from {others}; "
            "it gets its weights again"
        )
        return await self._resident(engine) if await self._resend_to(engine) else None

    async def admits(self, engine: EngineHandle) -> bool:
        """Whether an engine that was just given the pool's version holds what was published under that number. Where
        it was not published by this process, nobody knows."""
        version = self._pool.version
        theirs = await self._resident(engine)
        if theirs is None:
            return True
        ours = self._published.get(version) if _as_published(theirs) else self._usual.get(theirs.layout)
        if ours is None or not differing(ours, theirs.sums):
            self._holds[engine.name] = version, theirs
            return True
        if _as_published(theirs):
            cause = await self._cause(engine, version, ours, theirs.sums)
        else:
            wrong = listed(differing(ours, theirs.sums))
            cause = f"engine {engine.name}: with version {version}, {wrong} differ from the other engines"
        self._report(f"{cause}: it does not serve")
        return False

    async def _repair(self, engine: EngineHandle, version: int, theirs: Sums) -> str:
        """Sends the weights once more; what is wrong after it, empty: nothing."""
        ours = self._published[version]
        cause = await self._cause(engine, version, ours, theirs)
        self._report(f"{cause}; it gets its weights again")
        if not await self._resend_to(engine):
            return ""
        again = await self._resident(engine)
        if again is None or not differing(ours, again.sums):
            self._pool.activate([engine.name])
            return ""
        return await self._cause(engine, version, ours, again.sums)

    async def _resend_to(self, engine: EngineHandle) -> bool:
        """Whether the engine, which gets no requests until ``activate``, has its weights once more; else it is lost."""
        await self._pool.hold(engine.name)
        try:
            await self._resend(engine)
        except (EngineError, DeadlineError) as error:
            self._pool.report_lost(engine.name, f"its weights could not be sent again: {error}")
            return False
        return True

    async def _cause(self, engine: EngineHandle, version: int, ours: Sums, theirs: Sums) -> str:
        former = {old: sums for old, sums in self._published.items() if old != version}
        learners, has = await asyncio.gather(self._learners(True), self._resident(engine, True))
        cause = cause_of(ours, theirs, former, (learners or {}, {} if has is None else has.sums))
        return f"engine {engine.name}: after the publication of version {version}, {cause}"

    async def _learners(self, in_any_order: bool = False) -> Sums | None:
        """The sums of the ranks' shards, added up."""
        if self._ranks is None:
            return None
        parts: list[Sums] = await self._ranks.run(learner_side.sums, in_any_order)
        return added_up(parts)

    async def _all(self, engines: list[EngineHandle]) -> list[Resident | None]:
        return list(await asyncio.gather(*(self._resident(engine) for engine in engines)))

    async def _resident(self, engine: EngineHandle, in_any_order: bool = False) -> Resident | None:
        """None also for an engine that is lost, which is the pool's business."""
        try:
            told: Resident | None = await engine.within(self._seconds, EngineLoop.resident, in_any_order)
        except (EngineError, DeadlineError) as error:
            self._pool.report_lost(engine.name, str(error))
            return None
        return told


def _as_published(has: Resident | None) -> bool:
    """Whether an engine can be compared with the learner."""
    return has is not None and has.layout == PUBLISHED


def _usual(told: Sequence[Sums]) -> tuple[Sums, bool]:
    """What most of them have, of several equally frequent ones the first; and whether it is more than half."""
    counted = Counter(tuple(sorted(sums.items())) for sums in told)
    (usual, times), *_ = counted.most_common(1)
    return dict(usual), 2 * times > len(told)


class ComparedPublication:
    """A publication with a look at the engines' weights before and after it."""

    def __init__(self, publication: Publication, weights: SameWeights) -> None:
        self._publication, self._weights = publication, weights

    async def publish(self, version: int) -> dict[str, float]:
        await self._weights.before()
        metrics = await self._publication.publish(version)
        await self._weights.after(version)
        return metrics
