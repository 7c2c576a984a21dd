"""Reward models on as many replicas as are wanted: rows wait for a free one, which takes its share of them.

Level-based: ``want`` may be called at any time. A replica that is lost (out of memory, with its node) is replaced, and
its rows are scored by others; one that is not wanted any more finishes what it has in hand. A row whose replica was
lost three times has no score, and neither row nor model need be at fault (``RewardFailure.lost``). When a replica
raises, each of its rows is asked again alone, and one that raises then has no score.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rljob_trainer.errors import JobFileError, RewardWorkerError
from rljob_trainer.rewards.reward_model.replica import ScorerLostError, ScorerReplica
from rljob_trainer.rewards.reward_model.rows import RowBatch, RowCounts, RowQueue, Said
from rljob_trainer.rewards.standing import GoneScorer, ReplicaState, ScorerStanding
from rljob_trainer.rewards.verdicts import described_error
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from rljob_trainer.rewards.reward_model.scorer import Row
    from rljob_trainer.rewards.reward_model.served import ServedModel

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_PAUSE_SECONDS = 5.0
"""After a replica that did not come up, before the next one is tried."""
_MOST_STARTS = 16
"""Replicas that come up at once: each takes a thread that asks Ray, and reads a whole model."""


@dataclass(frozen=True, slots=True)
class ReplicaSupply:
    """How replicas are had, and what is said of them."""

    start: Callable[[str], Awaitable[ScorerReplica]]
    """Starts one of a name. Raises ``RewardWorkerError``."""
    title: str
    """What waits are called after: who waits."""
    remedy: str
    """What to do about processes that die."""
    patience_seconds: float = 0.0
    """How long rows wait while no replica comes up."""


@dataclass(slots=True, eq=False)
class _Life:
    """One replica, from its start to its end."""

    name: str
    state: ReplicaState = "starting"
    replica: ScorerReplica | None = None
    batch: RowBatch | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def came_up(self, replica: ScorerReplica) -> None:
        self.replica = replica

    def serves(self) -> None:
        """It takes rows from now on."""
        self.state = "serving"

    def leaves(self) -> None:
        """It takes no rows any more."""
        self.state = "leaving"
        self.wake.set()

    def has(self, batch: RowBatch | None) -> None:
        """What it has in hand."""
        self.batch = batch

    def lived_by(self, task: asyncio.Task[None]) -> None:
        self.task = task


class Scorers:
    """Keeps ``wanted`` replicas, which compute the models that ``serve`` names; open from then to ``close``."""

    def __init__(self, count: int, settings: ReplicaSupply, waits: Waits | None = None) -> None:
        self.wanted = count
        self.drained: list[GoneScorer] = []
        """Replicas that left, and whose pods no other one uses."""
        self._settings = settings
        self._waits = waits or Waits()
        self._telling = ExitStack()
        self._open_rows = 0
        self._models: dict[str, ServedModel] = {}
        self._lives: dict[str, _Life] = {}
        self._queue = RowQueue(self._wake_all)
        self._next_name = 0
        self._changed = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._nobody_since = 0.0
        """When the last replica that served was lost."""
        self._not_before = 0.0
        self._problem: Exception | None = None
        """Why the last one did not come up."""

    # --- what is asked

    async def serve(self, model: ServedModel) -> None:
        """Has ``model`` computed; returns when a replica has it. Raises ``JobFileError`` for what is no reward model,
        and ``RewardWorkerError`` when no replica comes up."""
        self._models[model.name] = model
        if self._keeping is None:
            self._nobody_since = time.monotonic()
            self._keeping = asyncio.create_task(self._keep(), name="reward model pool")
        while True:
            if any(await asyncio.gather(*(self._load(life, model) for life in self._serving()))):
                return
            self._check_problem()
            with self._waits.wait(self._settings.title, self._reason, until=self._until):
                await self._change()

    async def score(self, model: str, row: Row) -> Said:
        """A score, or why there is none. Raises ``RewardWorkerError`` when no replica comes up any more, and
        ``JobFileError`` when what comes up is no reward model."""
        self._open_rows += 1
        if self._open_rows == 1:
            self._telling.enter_context(self._waits.wait(self._settings.title, self._reason, until=self._until))
        try:
            return await self._queue.put(model, row)
        finally:
            self._open_rows -= 1
            if not self._open_rows:
                self._telling.close()

    def want(self, count: int) -> None:
        """Changes ``wanted``, at least 1."""
        self.wanted = count
        self._changed.set()

    def take_counts(self, model: str) -> RowCounts:
        """What was done for a model since the last call."""
        return self._queue.take_counts(model)

    @property
    def waiting(self) -> int:
        """Rows that no replica has taken yet."""
        return len(self._queue)

    def standings(self) -> list[ScorerStanding]:
        """What is known of each replica."""
        now = time.monotonic()
        return [
            ScorerStanding(
                life.name,
                None if life.replica is None else life.replica.pod,
                life.state,
                0 if life.batch is None else len(life.batch.rows),
                0.0 if life.batch is None else now - life.batch.since,
            )
            for life in self._lives.values()
        ]

    async def close(self) -> None:
        """Ends all replicas. May be called twice."""
        tasks = [self._keeping, *(life.task for life in self._lives.values())]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        self._queue.cancel()

    # --- how many there are

    async def _keep(self) -> None:
        """Never returns."""
        while True:
            self._approach()
            await self._change()
            self._give_up()

    async def _change(self) -> None:
        """Until something has come or gone, or it is time to look anyway."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._changed.wait()

    def _approach(self) -> None:
        """Starts what is missing, some at a time, and has leave what is too much: first what is not there yet."""
        here = [life for life in self._lives.values() if life.state != "leaving"]
        missing = self.wanted - len(here)
        if time.monotonic() >= self._not_before:
            starting = sum(life.state == "starting" for life in here)
            for _ in range(min(missing, _MOST_STARTS - starting)):
                self._begin()
        serving = self._serving()
        # A replica is never taken away before as many as are wanted serve.
        surplus = [life for life in here if life.state == "starting"] + serving[self.wanted :]
        for life in surplus[: max(0, -missing)]:
            if life.state == "serving":
                life.leaves()
            elif life.task is not None:
                life.task.cancel()

    def _begin(self) -> None:
        life = _Life(str(self._next_name))
        self._next_name += 1
        self._lives[life.name] = life
        life.lived_by(asyncio.create_task(self._live(life), name=f"reward model {life.name}"))

    def _give_up(self) -> None:
        """Rows do not wait for ever when no replica comes up."""
        problem = self._problem
        if problem is not None and self._is_over(problem):
            self._queue.refuse_all(self._told(problem))

    def _check_problem(self) -> None:
        """Raises what has kept all replicas from coming up."""
        problem = self._problem
        if problem is not None and self._is_over(problem):
            raise self._told(problem)

    def _is_over(self, problem: Exception) -> bool:
        """Whether nobody is waited for any more after ``problem``."""
        too_late = time.monotonic() >= self._nobody_since + self._settings.patience_seconds
        return not self._serving() and (too_late or isinstance(problem, JobFileError))

    def _told(self, problem: Exception) -> Exception:
        if isinstance(problem, JobFileError):
            return problem
        return RewardWorkerError(f"no replica of the reward models starts: {problem}; {self._settings.remedy}")

    # --- one replica

    async def _live(self, life: _Life) -> None:
        """The whole life of a replica."""
        try:
            replica = await self._settings.start(life.name)
            life.came_up(replica)
            pod = replica.pod
            self.drained = [gone for gone in self.drained if gone.pod != pod]
            for model in list(self._models.values()):
                await replica.scores(model, ())
        except ScorerLostError as lost:
            await self._failed(life, RewardWorkerError(f"its process was lost during start: {lost}"))
            return
        except (JobFileError, RewardWorkerError) as error:
            await self._failed(life, error)
            return
        except Exception as error:  # Ray, or a model's own code: it is tried again after a pause all the same
            log.warning("%s raised an error during start", self._called(life), exc_info=error)
            await self._failed(life, RewardWorkerError(described_error(error)))
            return
        except BaseException:
            await self._end(life)
            raise
        self._problem = None
        life.serves()
        self._changed.set()
        log.info("%s has joined: %d replicas serving", self._called(life), len(self._serving()))
        try:
            await self._serve(life, replica)
            self._gone(life)
            log.info("%s has left: %d replicas serving", self._called(life), len(self._serving()))
        except ScorerLostError as lost:
            log.warning("%s was lost: %s", self._called(life), lost)
        finally:
            await self._end(life)

    async def _serve(self, life: _Life, replica: ScorerReplica) -> None:
        """Takes rows until it shall leave. Raises ``ScorerLostError``."""
        ended = asyncio.create_task(replica.ended())
        try:
            while life.state == "serving":
                batch = self._queue.take(len(self._serving()))
                if batch is not None:
                    await self._score(life, replica, batch)
                    continue
                life.wake.clear()
                woken = asyncio.create_task(life.wake.wait())
                try:
                    await asyncio.wait({ended, woken}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    woken.cancel()
                if ended.done():
                    raise ScorerLostError(ended.result())
        finally:
            ended.cancel()

    async def _score(self, life: _Life, replica: ScorerReplica, batch: RowBatch) -> None:
        life.has(batch)
        try:
            answer = await replica.scores(self._models[batch.model], [waiting.row for waiting in batch.rows])
        except ScorerLostError as lost:
            self._queue.ask_again(batch, str(lost), self._settings.remedy)
            raise
        except JobFileError as error:
            self._queue.refuse(batch, error)
        except Exception as error:  # the model's code may raise anything, and rows wait for an answer
            log.warning("%s failed on %d samples", self._called(life), len(batch.rows), exc_info=error)
            self._queue.blame(batch, described_error(error))
        else:
            self._queue.answer(batch, answer)
        finally:
            life.has(None)

    async def _load(self, life: _Life, model: ServedModel) -> bool:
        """Whether the replica has the model now. Raises ``JobFileError``."""
        assert life.replica is not None
        try:
            await life.replica.scores(model, ())
        except ScorerLostError:
            return False  # its own task sees that too
        return True

    async def _failed(self, life: _Life, error: Exception) -> None:
        self._problem = error
        log.warning("%s does not start: %s", self._called(life), error)
        self._not_before = time.monotonic() + _PAUSE_SECONDS
        await self._end(life)

    async def _end(self, life: _Life) -> None:
        try:
            if life.replica is not None:
                await life.replica.kill()
        finally:
            self._lives.pop(life.name, None)
            if life.state == "serving" and not self._serving():
                self._nobody_since = time.monotonic()
            self._changed.set()

    def _gone(self, life: _Life) -> None:
        """Remembers where a replica was, unless another one is there too."""
        pod = None if life.replica is None else life.replica.pod
        others = {other.replica.pod for other in self._lives.values() if other is not life and other.replica}
        if pod is not None and pod not in others:
            self.drained.append(GoneScorer(life.name, pod))

    def _called(self, life: _Life) -> str:
        pod = None if life.replica is None else life.replica.pod
        return f"replica {life.name} of {self._settings.title}" + ("" if pod is None else f" on {pod}")

    def _serving(self) -> list[_Life]:
        return [life for life in self._lives.values() if life.state == "serving"]

    def _wake_all(self) -> None:
        for life in self._lives.values():
            life.wake.set()

    # --- what is said

    def _reason(self) -> str:
        serving = self._serving()
        busy = [life.batch for life in serving if life.batch is not None]
        said = [f"{len(serving)} of {self.wanted} replicas" if serving else f"replicas: 0 of {self.wanted} are up"]
        if rows := sum(len(batch.rows) for batch in busy):
            oldest = time.monotonic() - min(batch.since for batch in busy)
            said[0] += f" to score {rows} samples, oldest {oldest:.1f} s"
        if self.waiting:
            said.append(f"{self.waiting} more in the queue")
        if not serving and self._problem is not None:
            said.append(f"the last one failed to start: {self._problem}")
        return "; ".join(said)

    def _until(self) -> float | None:
        """When the wait becomes an error: as long as nobody scores."""
        return None if self._serving() else self._nobody_since + self._settings.patience_seconds
