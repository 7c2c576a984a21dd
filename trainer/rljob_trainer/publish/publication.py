"""The driver's side of a publication: learner and engines are told to meet, send and receive; failures get names.

The set of engines may have changed since the last time: then a new weight group is opened first. An engine that is lost
or fails on the way is taken out of the pool, and the others get their weights in a new group.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.learner.backend import BackendRank
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.publish.delivery import check_unchanged, one_of
from rljob_trainer.publish.engines_turn import EnginesTurn
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.waits import Turn, Waits
from rljob_trainer.weights import ipc, learner_side
from rljob_trainer.weights.group import WeightLink, call_off
from rljob_trainer.weights.learner_side import Failure
from rljob_trainer.weights.manifest import Version
from rljob_trainer.weights.receiver import ReceiveReport
from rljob_trainer.weights.sender import SENDER, SendReport

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

Admits = Callable[[EngineHandle], Awaitable[bool]]
"""Whether an engine that was given the present weights may serve."""

Beside = Callable[[str, int], Sequence[int]]
"""Which learner ranks have the devices of an engine's workers: from its name and their number, in their order."""

Holds = Callable[[], Collection[int]]
"""The policy versions whose weights the learner can send just now: none while it updates."""

_SLACK_SECONDS = 10.0
"""Beyond the deadline of those who do the work: for their answers to arrive."""
_ATTEMPTS = 3


class Ranks(Protocol):
    """All learner ranks (``RankedLearner``)."""

    def run(
        self, function: Callable[Concatenate[BackendRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, list[T]]:
        """``function(rank, *args)`` in every rank's process; results by rank."""
        ...


class WeightPublication:
    """Brings the learner's weights into the engines of a pool.

    A publication gives the learner's present weights their number. Whatever an engine is sent besides, it gets by that
    number: the ranks send the copy that has it, or nothing. Where none has it (``holds``), a new engine has to wait.
    """

    def __init__(
        self,
        ranks: Ranks,
        pool: RolloutPool,
        *,
        bucket_bytes: int,
        seconds: float = 300.0,
        host: str | None = None,
        backend: str = "gloo",
        beside: Beside | None = None,
        holds: Holds | None = None,
        replacement: Callable[[], Awaitable[None]] | None = None,
        engines_turn: EnginesTurn | None = None,
        waits: Waits | None = None,
    ) -> None:
        """``seconds``: deadline of each part, and of an engine's wait for its first weights. ``host``: where the
        learner listens, by default its address in Ray. ``holds``: by default always the pool's version.

        ``replacement``: waits, while no engine is left, for the successor of one; by default the pool's own.
        ``engines_turn``: in which engines may be given their first weights; by default always.

        ``backend``: what rank 0 broadcasts by. Engines that are ``beside`` ranks get their weights on the device, from
        the rank that they share it with; by broadcast where a machine does not allow that."""
        self._ranks, self._pool = ranks, pool
        self._bucket_bytes, self._seconds, self._host, self._backend = bucket_bytes, seconds, host, backend
        self._holds: Holds = holds or (lambda: (pool.version,))
        self._replacement = replacement or pool.wait_for_replacement
        self._engines_turn = engines_turn or EnginesTurn()
        self._beside = beside
        self._shares_devices = False
        """Whether weights were handed over on a device before: then it is no matter of the machine when it fails."""
        self._addresses: list[str] = []
        """Of those who can send."""
        self._generations = itertools.count(1)
        self._connected: tuple[EngineHandle, ...] = ()
        self._waits = waits or Waits()
        self._turn = Turn(self._waits)
        self._link: WeightLink
        self._delivered: Version
        """By the last publication."""
        self._admits: list[Admits] = []
        self.report: SendReport | None = None
        """What the last publication cost the sender."""
        self._received: list[ReceiveReport] = []
        """And each engine."""

    async def publish(self, version: int) -> dict[str, float]:
        """Returns once every engine of the pool serves ``version``.

        Engines that are gone are dropped from the pool with a warning. Raises ``EngineError``, naming the engine, when
        none is left or one keeps failing.
        """
        async with self.between("trainer", f"version {version} is being published", self._seconds):
            for attempt in range(1, _ATTEMPTS + 1):
                with self._waits.wait("trainer", f"an engine to take version {version}: all engines are lost"):
                    await self._replacement()
                try:
                    await self._send_to(lambda: self._pool.engines, version, "trainer", is_new=True)
                    break
                except EngineError:
                    # The last engine's successor gets its chance, and so does that one's; not one after the other for
                    # ever.
                    if self._pool.engines or not self._pool.replacing or attempt == _ATTEMPTS:
                        raise
            self._pool.present(self._delivered)
            self._pool.activate([engine.name for engine in self._connected])
            return self._costs()

    def _costs(self) -> dict[str, float]:
        """Metrics of the last publication."""
        if self.report is None:
            return {}
        sent, received = self.report, self._received
        buffers = max(sent.peak_buffer_bytes, *(report.peak_buffer_bytes for report in received))
        return {
            "timing/publish_seconds/transfer": sent.seconds,
            "timing/publish_seconds/engine_pause": max(report.pause_seconds for report in received),
            "throughput/publication_megabytes_per_second": sent.nbytes / 1e6 / sent.seconds,
            "memory/publication_buffers_megabytes": buffers / 1e6,
        }

    def between(self, who: str, what: str, seconds: float) -> AbstractAsyncContextManager[object]:
        """A time for ``who`` in which no publication is under way. For engines that leave; see ``Turn.taken``."""
        return self._turn.taken(who, what, seconds)

    async def resend(self, engine: EngineHandle) -> None:
        """Gives one engine the pool's version once more, from a learner that still holds it."""
        async with self.between("trainer", f"engine {engine.name} gets its weights again", self._seconds):
            await self._send_to(self._only(engine), self._pool.version, "trainer")

    def admit_by(self, look: Admits) -> None:
        """From now on an engine that is brought up serves only if ``look``, asked after the looks before, says that it
        computes what it should."""
        self._admits.append(look)

    async def _admitted(self, engine: EngineHandle) -> bool:
        for look in self._admits:
            if not await look(engine):
                return False
        return True

    async def bring_up(self, engine: EngineHandle) -> None:
        """Gives a new engine the pool's version as soon as the learner holds it, unless a publication comes first.

        Raises ``DeadlineError`` when the learner is never free to send, what ``publish`` raises, and ``EngineError``
        for an engine that is not admitted after a second sending either; it has left the pool then.
        """
        who = f"engine {engine.name}"
        began = asyncio.get_running_loop().time()
        with self._waits.wait(who, "weights: the learner is busy with an update or a publication", self._seconds):
            while engine in self._pool.engines and engine not in self._pool.serving:
                if self._can_send and not self._turn.is_taken:
                    async with self.between(who, f"{who} gets its first weights", self._seconds):
                        if self._can_send:
                            with self._engines_turn.at_work(who, self._seconds):
                                await self._bring_in(engine, self._pool.version)
                elif not self._engines_turn.is_on:  # the publication at its end serves the engine
                    began = asyncio.get_running_loop().time()
                    await asyncio.sleep(0.05)
                elif asyncio.get_running_loop().time() > began + self._seconds:
                    raise DeadlineError(
                        f"engine {engine.name} got no weights within {self._seconds:.0f} s: the learner was busy with "
                        "one update or another publication all that time. If a step takes that long, raise "
                        "deadlines.progressSeconds"
                    )
                else:
                    await asyncio.sleep(0.05)

    @property
    def _can_send(self) -> bool:
        """Whether the learner has the weights that the pool's engines serve, and the engines their devices. When a
        publication has just ended both have gone on to the next version, and what the learner kept of the former one
        is not asked for any more."""
        return self._engines_turn.is_on and self._pool.version in self._holds()

    async def _bring_in(self, engine: EngineHandle, version: int) -> None:
        for _ in range(2):
            await self._send_to(self._only(engine), version, f"engine {engine.name}")
            if await self._admitted(engine):
                self._pool.activate([engine.name])
                return
        reason = "it deviates from the trainer, even after its weights were sent again"
        self._pool.report_lost(engine.name, reason)
        raise EngineError(f"engine {engine.name} cannot join: {reason}")

    def _only(self, engine: EngineHandle) -> Callable[[], Sequence[EngineHandle]]:
        """That engine, for as long as it is in the pool."""
        return lambda: [other for other in self._pool.engines if other is engine]

    async def _send_to(
        self, engines: Callable[[], Sequence[EngineHandle]], version: int, who: str, *, is_new: bool = False
    ) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            wanted = tuple(engines())
            if not wanted:
                why = self._pool.why_none_is_left
                raise EngineError(f"no engine is left to take version {version}" + (f": {why}" if why else ""))
            names = f"engine{'s' if len(wanted) > 1 else ''} {', '.join(engine.name for engine in wanted)}"
            failure = None
            if wanted != self._connected:
                with self._waits.wait(who, f"{names} and the learner to connect", self._seconds + _SLACK_SECONDS):
                    failure = await self._connect(wanted)
            if failure is None:
                what = f"{names} to load version {version} from the learner"
                with self._waits.wait(who, what, self._seconds + _SLACK_SECONDS):
                    failure = await self._publish(wanted, version, is_new)
            if failure is None:
                if not is_new:
                    check_unchanged(self._delivered, self._pool.published)
                self._pool.delivered([engine.name for engine in wanted], self._delivered)
                return
            self._connected = ()
            await self._find_the_lost(wanted)
            log.warning("publication of version %d failed (attempt %d of %d): %s", version, attempt, _ATTEMPTS, failure)
        raise EngineError(f"version {version} could not be published: {failure}")

    async def _connect(self, engines: tuple[EngineHandle, ...]) -> str | None:
        """Opens a group of the learner and these engines; returns what went wrong."""
        if not self._addresses:
            every_rank = self._beside is not None
            opened = await self._ranks.run(learner_side.open_publisher, self._bucket_bytes, self._host, every_rank)
            self._addresses = [address for address in opened if address is not None]
        try:
            workers = [await engine.within(self._seconds, EngineLoop.weight_ranks) for engine in engines]
        except (EngineError, DeadlineError) as error:
            return str(error)
        names, first_ranks, senders = [SENDER], [], []
        for engine, count in zip(engines, workers, strict=True):
            first_ranks.append(len(names))
            names += [f"engine {engine.name}" + (f" worker {w}" if count > 1 else "") for w in range(count)]
            if self._beside is not None:
                senders += [self._addresses[rank] for rank in self._beside(engine.name, count)]
        backend = self._backend if self._beside is None else ipc.BACKEND
        self._link = WeightLink(
            self._addresses[0], next(self._generations), tuple(names), backend, senders=tuple(senders)
        )
        joins = [
            engine.within(self._seconds + _SLACK_SECONDS, EngineLoop.join_weights, self._link, first, self._seconds)
            for engine, first in zip(engines, first_ranks, strict=True)
        ]
        failure, *_ = await self._together(
            self._ranks.run(learner_side.connect, self._link, self._seconds), joins, self._link
        )
        if failure is None:
            self._connected = engines
            self._shares_devices = self._beside is not None
        elif self._beside is not None and not self._shares_devices:
            log.warning(
                "weights cannot be handed over on the devices that engines and learner share (%s): they are sent "
                "by %s through host memory, which is many times slower",
                failure,
                self._backend,
            )
            self._beside = None
        return failure

    async def _publish(self, engines: tuple[EngineHandle, ...], version: int, is_new: bool) -> str | None:
        """One broadcast to the connected engines; returns what went wrong."""
        receives = [
            engine.within(self._seconds + _SLACK_SECONDS, EngineLoop.receive_weights, version, self._seconds)
            for engine in engines
        ]
        failure, sent, received = await self._together(
            self._ranks.run(learner_side.publish, version, self._seconds, is_new), receives, self._link
        )
        if failure is None:
            self._delivered = one_of(report.version for report in (*sent, *received))
            self.report, self._received = max(sent, key=lambda report: report.seconds), received
        return failure

    async def _together(
        self, sending: Coroutine[Any, Any, list[Any]], receiving: Sequence[Coroutine[Any, Any, Any]], link: WeightLink
    ) -> tuple[str | None, list[SendReport], list[Any]]:
        """Both sides of a meeting: what went wrong in words (the learner's if it has any), the results of the ranks
        that sent, and those of the engines.

        Raises only what the learner raises.
        """
        sender = asyncio.create_task(sending)
        receivers = [asyncio.create_task(work) for work in receiving]
        try:
            pending: set[asyncio.Task[Any]] = {sender, *receivers}
            called_off = False
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if sender in done and sender.exception() is not None:
                    # The store is gone with the learner: engines that look for it would do so until the deadline.
                    break
                failed = next((problem for task in done if (problem := _problem(task)) is not None), None)
                if failed is not None and not called_off:
                    called_off = True
                    # Whoever waits for the failed one would wait until the deadline.
                    await asyncio.to_thread(call_off, link, failed)
        finally:
            for task in (sender, *receivers):
                task.cancel()
        results = sender.result()
        for task in (sender, *receivers):
            if (problem := _problem(task)) is not None:
                return problem, [], []
        reports = [result for result in results if isinstance(result, SendReport)]
        return None, reports, [task.result() for task in receivers]

    async def _find_the_lost(self, engines: Sequence[EngineHandle]) -> None:
        """Takes engines that no longer answer out of the pool."""
        for engine in engines:
            try:
                await engine.within(_SLACK_SECONDS, EngineLoop.status)
            except (EngineError, DeadlineError) as error:
                self._pool.report_lost(engine.name, str(error))


def _problem(task: asyncio.Task[Any]) -> str | None:
    """What went wrong on one side of a meeting, which is through."""
    if (error := task.exception()) is not None:
        return str(error)
    results = task.result() if isinstance(task.result(), list) else []
    return next((result.message for result in results if isinstance(result, Failure)), None)
