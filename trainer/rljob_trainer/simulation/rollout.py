"""The rollout and the trainer of a simulated run: what the pipeline's loop calls, in virtual time.

Engines decode (``engine.py``), the trainer sleeps for as long as its batch has tokens. Dispatch follows the real pool:
a group goes whole to the engine with the least in hand, a publication interrupts, waits for, or freezes what runs.
Left out: prefill (also that of interrupted requests), rewards, validation, checkpoints.
"""

from __future__ import annotations

import asyncio
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rljob_api.spec.pipeline import PartialRollout
from rljob_trainer.episodes.episode import Episode, Group, Prompt, single_turn
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.pipeline.parts import TrainedBatch
from rljob_trainer.simulation.engine import DecodeSpeed, SimulatedEngine, Work
from rljob_trainer.simulation.lengths import LengthDistribution, ToolLatency
from rljob_trainer.waits import NEVER

_IN_HAND = operator.attrgetter("engine.pending")
_BLOCK = 512
"""Groups whose lengths are drawn at once."""


class EndlessFeed:
    """Prompts without end: a simulation is stopped by its number of steps."""

    def __init__(self) -> None:
        self.ordinal = 0

    async def prepare(self, prompts: int) -> bool:
        return True

    def next(self) -> Prompt:
        prompt = Prompt(self.ordinal, 0, self.ordinal, "simulated", "", (), None)
        self.ordinal += 1
        return prompt

    def state_dict(self) -> dict[str, object]:
        return {"ordinal": self.ordinal}


class _Member:
    """An engine, its place in time, and the timer of its next finished group."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.frozen_seconds = 0.0
        self.timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class TrainerSpeed:
    """``token_seconds``: of all ranks together, for one response token and all passes over it. ``step_seconds``: what
    each step takes whatever its size. ``publication_seconds``: how long engines stand still for new weights."""

    token_seconds: float
    step_seconds: float = 0.0
    publication_seconds: float = 0.0


class SimulatedRollout:
    """Engines that decode in virtual time: ``Rollout`` to the loop, ``publish`` to the trainer."""

    def __init__(
        self,
        speeds: Sequence[DecodeSpeed],
        lengths: LengthDistribution,
        samples_per_prompt: int,
        *,
        max_concurrent: int,
        partial_rollout: PartialRollout,
        seed: int = 0,
        tools: ToolLatency | None = None,
    ) -> None:
        """One engine a speed; ``max_concurrent`` sequences run at once in each. ``tools``: what a group waits for after
        its last token."""
        self._tools = tools
        self._in_tools: dict[int, asyncio.Event] = {}
        self._rng = np.random.default_rng((seed, 1))
        self.serving_version = 0
        self.finished_at = NEVER
        self.work: dict[int, Work] = {}
        """Finished groups that have not been trained."""
        self.interrupted_sequences = 0
        self._members = [_Member(SimulatedEngine(speed, max_concurrent)) for speed in speeds]
        self._outstanding = 2 * max_concurrent
        self._interrupts = partial_rollout != "none"
        self._lengths = self._drawn(lengths, samples_per_prompt, np.random.default_rng(seed))
        self._queue: deque[Work] = deque()
        self._waiters: dict[int, asyncio.Future[Work]] = {}
        self._loop = asyncio.get_running_loop()
        self._dirty: dict[_Member, None] = {}
        self._woken = False
        self._paused = False
        self._idle = asyncio.Event()

    @property
    def engines(self) -> list[SimulatedEngine]:
        return [member.engine for member in self._members]

    async def run(self, prompt: Prompt) -> Group:
        work = Work(prompt.ordinal, next(self._lengths))
        waiter = self._waiters[prompt.ordinal] = self._loop.create_future()
        self._queue.append(work)
        self._wake()
        await waiter
        if self._tools is not None:
            await self._call_tools(prompt.ordinal, self._tools.draw(self._rng))
        self.work[prompt.ordinal] = work
        return Group(prompt, [_episode(work)])

    async def _call_tools(self, ordinal: int, seconds: float) -> None:
        ended = self._in_tools[ordinal] = asyncio.Event()
        try:
            async with asyncio.timeout(seconds):
                await ended.wait()
        except TimeoutError:
            pass
        finally:
            del self._in_tools[ordinal]
        self.finished_at = self._loop.time()

    async def end(self, ordinals: Sequence[int]) -> list[int]:
        """Ends groups as the real rollout does. For the trainer a group that was cut in an engine is as long as it
        would have been."""
        return [ordinal for ordinal in ordinals if not self._end(ordinal)]

    def _end(self, ordinal: int) -> bool:
        if ordinal in self._in_tools:
            self._in_tools[ordinal].set()
            return True
        for member in self._members:
            self._settle(member)
            self._dirty[member] = None
        self._wake()
        return ordinal not in self._waiters or any(
            member.engine.cut(ordinal, self._local(member)) for member in self._members
        )

    def waiting_for(self, finished: int, wanted: int) -> str:
        return f"{sum(member.engine.pending for member in self._members)} simulated sequences"

    async def publish(self, version: int, seconds: float) -> None:
        """New weights: engines stand still for ``seconds``, before which running requests finish or are interrupted."""
        self._paused = True
        if not self._interrupts:
            while any(member.engine.pending for member in self._members):
                self._idle.clear()
                await self._idle.wait()
        for member in self._members:
            self._settle(member)
            self.interrupted_sequences += member.engine.running
            if member.timer is not None:
                member.timer.cancel()
                member.timer = None
        await asyncio.sleep(seconds)
        self.serving_version = version
        self._paused = False
        for member in self._members:
            member.frozen_seconds += seconds
            member.engine.serve(version, self._local(member))
            self._dirty[member] = None
        self._wake()

    # --- dispatch and time

    @staticmethod
    def _drawn(lengths: LengthDistribution, n: int, rng: np.random.Generator) -> Iterator[list[int]]:
        while True:
            yield from lengths.draw(rng, _BLOCK, n).tolist()

    def _local(self, member: _Member) -> float:
        return self._loop.time() - member.frozen_seconds

    def _wake(self) -> None:
        """Dispatches at the end of this turn of the event loop, once for all that comes in during it."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._woken = False
        if self._paused:
            return
        while self._queue:
            member = min(self._members, key=_IN_HAND)
            if member.engine.pending >= self._outstanding:
                break
            self._settle(member)
            self._dirty[member] = None
            member.engine.add(self._queue.popleft(), self._local(member))
        for member in self._dirty:
            self._arm(member)
        self._dirty.clear()

    def _arm(self, member: _Member) -> None:
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None
        at = member.engine.next_finish()
        if at is not None:
            member.timer = self._loop.call_at(at + member.frozen_seconds, self._finish, member, at)

    def _finish(self, member: _Member, at: float) -> None:
        member.timer = None
        self._settle(member, at)
        self._dirty[member] = None
        self._wake()
        if self._paused and not self._interrupts:
            # What is in hand is finished before the publication: the timer has to go on without dispatch.
            self._arm(member)

    def _settle(self, member: _Member, at: float | None = None) -> None:
        """Brings an engine to the present (or to ``at``, which rounding may put a hair after it)."""
        for work in member.engine.advance(self._local(member) if at is None else at):
            self.finished_at = self._loop.time()
            waiter = self._waiters.pop(work.ordinal)
            if not waiter.cancelled():  # it was dropped
                waiter.set_result(work)
        if not member.engine.pending:
            self._idle.set()


def _episode(work: Work) -> Episode:
    """The versions of a group's first and last token, as the loop and its records expect them."""
    versions = np.array([work.first_version, work.last_version], np.int32)
    id = EpisodeId(TRAINING, work.ordinal, 0)
    return single_turn(id, (), Tokens.sampled(versions, _LOG_PROBS, versions), "stop")


_LOG_PROBS = np.zeros(2, np.float32)


class SimulatedTrainer:
    """Trains by sleeping; remembers what it was busy with."""

    def __init__(self, rollout: SimulatedRollout, speed: TrainerSpeed, pulls_per_step: int) -> None:
        self._rollout = rollout
        self._speed = speed
        self._pulls = pulls_per_step
        self.busy_seconds = 0.0
        self.ages: dict[int, int] = {}
        """Age of the oldest token -> groups trained."""
        self.partial_groups = 0
        """Groups that more than one version has made."""
        self.tokens = 0

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> TrainedBatch:
        tokens = 0
        for group in groups:
            work = self._rollout.work.pop(group.prompt.ordinal)
            tokens += work.tokens
            age = version - work.first_version
            self.ages[age] = self.ages.get(age, 0) + 1
            self.partial_groups += work.last_version > work.first_version
        seconds = tokens * self._speed.token_seconds + self._speed.step_seconds / self._pulls
        self.busy_seconds += seconds
        self.tokens += tokens
        await asyncio.sleep(seconds)
        return TrainedBatch()

    async def publish(self, version: int) -> dict[str, float]:
        await self._rollout.publish(version, self._speed.publication_seconds)
        return {}
