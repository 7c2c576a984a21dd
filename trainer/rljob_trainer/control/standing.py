"""Where the run stands: what ``GET /v1/status``, ``GET /metrics``, ``status.json`` and `rljob status` say.

Watches the run as one more view, so that the loop knows nothing of it, and looks at the parts when somebody asks.
Nothing here waits for another process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rljob_api.status import (
    Ages,
    CurrentWait,
    DriverStatus,
    End,
    EndKind,
    EngineState,
    LastCheckpoint,
    Pools,
    ReplicaStatus,
    RolloutStatus,
    Scores,
    ScoringPoolStatus,
    Throughput,
    TrainerStatus,
    with_free_texts,
)
from rljob_trainer.checkpoints.checkpoint import Checkpoint
from rljob_trainer.control.scorer_standing import JUDGES, REWARD_MODELS, ScoringWords, exposition, scoring_pool_status
from rljob_trainer.control.steering import Steering
from rljob_trainer.control.stop_conditions import RunEnd
from rljob_trainer.pools.engine_count import EngineCount
from rljob_trainer.pools.members import Standing
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.pools.size import engine_count
from rljob_trainer.record.ledger import Ledger
from rljob_trainer.rewards.standing import NO_POOLS, ScoringPool, ScoringPools
from rljob_trainer.secret_values import masked
from rljob_trainer.telemetry import prometheus, run_folder
from rljob_trainer.telemetry.advice import Waiting as Shares
from rljob_trainer.telemetry.advice import advice
from rljob_trainer.telemetry.figures import duration
from rljob_trainer.telemetry.names import metric
from rljob_trainer.telemetry.summary import AgeCounts
from rljob_trainer.telemetry.timing import StageTimes
from rljob_trainer.telemetry.view import JobSummary, Pace, Present, ShownStep
from rljob_trainer.texts import writable
from rljob_trainer.waits import Wait, Waits

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedJob
    from rljob_api.spec.pools import JudgePool, RewardModelPool

_WINDOW_SECONDS = 600.0
_LONGEST_TEXT = 1000
_ENGINE = "engine "
_WORKS = "works"
_MOST_WAITS = 64
_MOST_LINES, _MOST_NAMES = 3, 8
"""Of the live view: lines about engines, and names in one of them."""
_MANY_ENGINES = 128
"""From here on engines are listed without a sentence each: the operator reads 64 KiB."""


def shown(status: DriverStatus, indent: int | None = None) -> str:
    """A status in JSON, without secret values in its sentences."""
    plain = json.loads(status.model_dump_json(by_alias=True, exclude_none=True))
    return json.dumps(with_free_texts(plain, masked), indent=indent, ensure_ascii=False)


class RunStanding:
    """A ``View`` that shows nothing and remembers what is asked for."""

    def __init__(
        self,
        job: ResolvedJob,
        end: RunEnd,
        folder: Path,
        steering: Steering,
        times: StageTimes,
        waits: Waits,
        shown: Callable[[str], str] = str,
    ) -> None:
        """``shown``: the place of a checkpoint as users know it."""
        self._pool: RolloutPool | None = None
        """None while there are no engines: before the parts are built, and between a roll-back and the next ones."""
        self._count: EngineCount | None = None
        self._scoring = NO_POOLS
        self._ledger: Ledger | None = None
        self._ranks_ready = 0
        self._mismatch = ""
        self._unsaved = ""
        self._job, self._total_steps, self._folder = job, end.total_steps, folder
        self._steering, self._times, self._waits, self._shown = steering, times, waits, shown
        self._pace = Pace(end.total_steps)
        self._metrics: dict[str, float] = {}
        self._version = 0
        self._step = 0
        self._best: float | None = None
        self._validation: dict[str, float] = {}
        self._checkpoint: tuple[Checkpoint, datetime] | None = None
        self._idle: deque[tuple[float, float]] = deque()
        self._end: End | None = None
        self._told_end = ""
        self._numbers = itertools.count(1)
        self._stored = 0
        self._storing = threading.Lock()

    # --- what happens (View)

    def start(self, job: JobSummary) -> None:
        self._step = job.first_step - 1
        self._pace = Pace(job.total_steps, job.first_step)

    def step(self, record: ShownStep) -> None:
        self._pace.step(record.step, record.metrics.get("timing/step_seconds"))
        self._step = record.step
        self._metrics.update(record.metrics)
        self._version = int(record.metrics.get("progress/version", self._version))
        reward = record.metrics.get("reward/mean")
        if reward is not None and math.isfinite(reward):
            self._best = reward if self._best is None else max(self._best, reward)
        for held in self._job.spec.data.validation:
            score = record.metrics.get(
                metric("validation/<source>/mean@<n>", source=held.name, n=held.samples_per_prompt)
            )
            if score is not None and math.isfinite(score):
                self._validation[held.name] = score

    def message(self, text: str) -> None:
        """Somebody else shows it."""

    def show(self, now: Present) -> None:
        """Called every second: the moment to see which engines have nothing to do."""
        if self._pool is None:
            return
        seconds, engines = time.monotonic(), self._pool.standings()
        if engines:
            self._idle.append((seconds, sum(engine.running == 0 for engine in engines) / len(engines)))
        while self._idle and self._idle[0][0] < seconds - _WINDOW_SECONDS:
            self._idle.popleft()

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what else happens

    def counted_by(self, ledger: Ledger) -> None:
        """From now on ``ledger`` says how old was what was trained."""
        self._ledger = ledger

    def built(self, pool: RolloutPool, count: EngineCount | None, ranks: int, scoring: ScoringPools = NO_POOLS) -> None:
        """The run's ``ranks`` and the engines of ``pool`` work. ``count``: changes their number; None: it is fixed."""
        self._pool, self._count, self._ranks_ready, self._scoring = pool, count, ranks, scoring

    def taken_down(self) -> None:
        """Ranks and engines are gone; others may come."""
        self._pool, self._count, self._ranks_ready, self._scoring = None, None, 0, NO_POOLS

    def apart(self, sentence: str) -> None:
        """What the limits of the mismatch say after a step; empty: nothing."""
        self._mismatch = sentence

    def not_saved(self, why: str) -> None:
        """The newest checkpoint could not be written."""
        self._unsaved = why

    def checkpointed(self, checkpoint: Checkpoint, version: int) -> None:
        """A checkpoint is whole; also the one that the run starts from."""
        self._version = max(self._version, version)
        self._checkpoint = (checkpoint, datetime.now(UTC))
        self._unsaved = ""

    def ended(self, kind: EndKind, reason: str, exit_code: int, *, told: str = "", onwards: str = "") -> None:
        """The attempt is over. ``told``: what people call ``kind``, if that is another word; ``onwards``: how the run
        is continued."""
        self._told_end = f"{told or kind}, {reason}" + (f"; {onwards}" if onwards else "")
        self._end = End(kind=kind, reason=_short(reason), exit_code=exit_code, time=datetime.now(UTC))

    def write(self) -> None:
        """``status.json`` as things stand. Raises ``OutputError``."""
        self._store(next(self._numbers), self._text())

    async def write_aside(self) -> None:
        """Writes ``status.json`` like ``write``, in a thread. A later status is never replaced by an earlier one."""
        await asyncio.to_thread(self._store, next(self._numbers), self._text())

    def _text(self) -> str:
        return shown(self.status(), indent=1)

    def _store(self, number: int, text: str) -> None:
        with self._storing:
            if number > self._stored:
                run_folder.write_whole(self._folder / run_folder.STATUS, text)
                self._stored = number

    # --- what is asked

    def status(self) -> DriverStatus:
        now = datetime.now(UTC)
        remaining = self._pace.remaining
        checkpoint = self._checkpoint
        return DriverStatus(
            generation=self._steering.generation,
            attempt=self._steering.attempt,
            time=now,
            step=self._step,
            version=self._version,
            total_steps=self._total_steps,
            waiting=self._waiting(now),
            doing=self._doing(),
            beside=() if self._end is not None else self._beside(now),
            shares=self._shares(),
            advice=self.advice() or "",
            mismatch=_short(self._mismatch),
            unsaved=_short(self._unsaved),
            pools=Pools(
                rollout=self._rollout(),
                trainer=TrainerStatus(desired=self._job.spec.trainer.ranks, ready=self._ranks_ready),
                reward_model=_scoring_pool(self._scoring.reward_model, self._job.spec.reward_model, REWARD_MODELS),
                judge=_scoring_pool(self._scoring.judge, self._job.spec.judge, JUDGES),
            ),
            ages=self._ages(),
            throughput=self._throughput(),
            rewards=Scores(
                mean=_finite(self._metrics.get("reward/mean")), best=self._best, validation=self._validation
            ),
            checkpoint=None
            if checkpoint is None
            else LastCheckpoint(uri=self._shown(checkpoint[0].place), step=checkpoint[0].step, time=checkpoint[1]),
            eta=None if remaining is None else now + timedelta(seconds=remaining),
            end=self._end,
        )

    def present(self) -> Present:
        """What the views show of this moment."""
        return Present(self._doing(), self._engines_in_short(), self._shares())

    def metrics(self) -> str:
        """``GET /metrics``."""
        metadata = self._job.metadata
        labels = {"job": metadata.name} | ({"namespace": metadata.namespace} if metadata.namespace else {})
        states: dict[str, float] = {}
        for engine in self._rollout().engines:
            states[engine.state] = states.get(engine.state, 0) + 1
        return (
            prometheus.exposition(self._metrics, labels)
            + prometheus.gauge("rljob_engines", "rollout engines by state", states, "state", labels)
            + prometheus.gauge(
                "rljob_time_share", "share of the last ten minutes by stage", self._shares(), "stage", labels
            )
            + "".join(
                line
                for pool, words in ((self._scoring.reward_model, REWARD_MODELS), (self._scoring.judge, JUDGES))
                if pool is not None
                for line in exposition(pool, words, labels)
            )
        )

    def advice(self) -> str | None:
        """What would make the run faster, as its waits of the last minutes say."""
        speed, spec = self._throughput(), self._job.spec
        if speed is None:
            return None
        waiting = Shares(speed.trainer_idle, speed.rollout_idle, self._rollout().desired, spec.trainer.ranks)
        return advice(spec.pipeline.mode, waiting, colocated=spec.placement == "colocated")

    # --- parts of the answer

    def _waiting(self, now: datetime) -> CurrentWait | None:
        wait = self._waits.latest
        return None if wait is None or self._end is not None else self._told(wait, now)

    def _beside(self, now: datetime) -> tuple[CurrentWait, ...]:
        others = [wait for who, wait in self._waits.beside.items() if not who.startswith(_ENGINE)]
        return tuple(self._told(wait, now) for wait in others[:_MOST_WAITS])

    def _told(self, wait: Wait, now: datetime) -> CurrentWait:
        left = self._waits.left(wait)
        return CurrentWait(
            who=wait.who,
            reason=_short(wait.reason()),
            since=now - timedelta(seconds=self._waits.seconds(wait)),
            until=None if left is None else now + timedelta(seconds=left),
        )

    def _doing(self) -> str:
        """The trainer's present in one sentence."""
        if self._end is not None:
            return _short(f"the run has ended: {self._told_end}")
        wait = self._waits.latest
        if wait is not None:
            return self._said(wait.sentence, wait)
        stage = self._times.current
        if self._pool is None and (stage is None or stage[0] == "start"):
            return "the run is starting: it reads its inputs, then starts its processes"
        if stage is None:
            return "the trainer is between steps"
        return f"the trainer is working: {stage[0].replace('_', ' ')} for {duration(stage[1])}"

    def _said(self, sentence: str, wait: Wait) -> str:
        left = self._waits.left(wait)
        limit = "" if left is None else f", times out in {duration(left)}"
        return _short(f"{sentence} ({duration(self._waits.seconds(wait))} so far{limit})")

    def _shares(self) -> dict[str, float]:
        return {name: min(1.0, share) for name, share in self._times.shares().items()}

    def _rollout(self) -> RolloutStatus:
        count = self._count
        wanted = engine_count(self._job.spec) if count is None else count.wanted
        if self._pool is None:
            return RolloutStatus(desired=wanted, ready=0)
        standings = self._pool.standings()
        brief = len(standings) > _MANY_ENGINES
        engines = [self._engine(standing, brief) for standing in standings]
        if count is not None:
            here = {standing.name for standing in standings}
            engines += [
                ReplicaStatus(name=name, state="starting", doing=self._engine_waits(name, "is starting"))
                for name in count.starting
                if name not in here
            ]
            engines += [
                ReplicaStatus(
                    name=gone.name, pod=gone.place.pod if gone.place else None, state="drained", safe_to_delete=True
                )
                for gone in count.drained
            ]
        return RolloutStatus(
            desired=wanted,
            ready=sum(standing.state in ("serving", "lent") for standing in standings),
            engines=tuple(engines),
        )

    def _engines_in_short(self) -> list[str]:
        """What the engines do, those that do the same in one line."""
        if self._pool is None or self._end is not None:
            return []
        alike: dict[str, list[Standing]] = {}
        for standing in self._pool.standings():
            doing = _WORKS if standing.running else self._engine(standing, brief=False).doing
            alike.setdefault(doing, []).append(standing)
        lines = [_line(doing, engines) for doing, engines in alike.items()]
        return lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES - 1], "other engines: see rljob status"]

    def _engine(self, standing: Standing, brief: bool) -> ReplicaStatus:
        assert self._pool is not None
        pool = self._pool
        states: dict[str, EngineState] = {"joining": "loading", "leaving": "draining", "lent": "validating"}
        state: EngineState = states.get(standing.state, "paused" if pool.paused else "serving")
        if standing.running:
            doing = f"works on {standing.running} requests, the oldest for {duration(standing.oldest_seconds)}"
        elif state == "loading":
            doing = self._engine_waits(standing.name, "waits for weights")
        elif state == "validating":
            doing = "waits for the rewards of its validation samples"
        elif state == "paused":
            doing = "waits for new weights to be published"
        elif pool.queued:
            doing = "waits for requests from the queue"
        else:
            doing = "waits for prompts: the trainer already has as many groups ahead as the schedule allows"
        return ReplicaStatus(
            name=standing.name,
            pod=standing.place.pod if standing.place is not None else None,
            state=state,
            version=pool.version if standing.state == "serving" else standing.kept_version,
            running=standing.running,
            doing="" if brief else doing,
        )

    def _engine_waits(self, name: str, otherwise: str) -> str:
        """What the engine itself waits for, if anybody has said so."""
        wait = self._waits.beside.get(f"{_ENGINE}{name}")
        return otherwise if wait is None else self._said(f"waits for {wait.reason()}", wait)

    def _ages(self) -> Ages | None:
        mean, largest = self._metrics.get("age/mean"), self._metrics.get("age/max")
        if mean is None or largest is None:
            return None
        schedule = self._steering.schedule
        bound = self._job.spec.pipeline.staleness.max_age if schedule is None else schedule.settings.max_age
        trained = AgeCounts() if self._ledger is None else self._ledger.account.ages
        return Ages(
            mean=max(0.0, mean),
            max=max(0, int(largest)),
            bound=bound,
            oldest={str(age): count for age, count in trained.oldest.items()},
            tokens={str(age): count for age, count in trained.tokens.items()},
        )

    def _throughput(self) -> Throughput | None:
        metrics: Mapping[str, float] = self._metrics
        seconds = self._pace.step_seconds
        if seconds is None or "throughput/tokens_per_second" not in metrics:
            return None
        shares = self._shares()
        return Throughput(
            step_seconds=seconds,
            generated_tokens_per_second=max(0.0, metrics.get("throughput/generated_tokens_per_second", 0.0)),
            trained_tokens_per_second=max(0.0, metrics["throughput/tokens_per_second"]),
            trainer_idle=min(1.0, sum(shares.get(stage, 0.0) for stage in ("generate", "wait_prev_gen", "idle"))),
            rollout_idle=sum(idle for _, idle in self._idle) / len(self._idle) if self._idle else 0.0,
        )


def _scoring_pool(
    pool: ScoringPool | None, spec: RewardModelPool | JudgePool | None, words: ScoringWords
) -> ScoringPoolStatus | None:
    """A pool that scores, which may be on its way; None: the job has none."""
    if pool is not None:
        return scoring_pool_status(pool, words)
    return None if spec is None else ScoringPoolStatus(desired=spec.replicas, ready=0)


def _line(doing: str, engines: Sequence[Standing]) -> str:
    """One line of the live view."""
    several = len(engines) > 1
    names = ", ".join(engine.name for engine in engines)
    who = f"engine{'s' if several else ''} {names}" if len(engines) <= _MOST_NAMES else f"{len(engines)} engines"
    if doing == _WORKS:
        oldest = max(engines, key=lambda engine: engine.oldest_seconds)
        where = f" on engine {oldest.name}" if several else ""
        requests = sum(engine.running for engine in engines)
        doing = f"works on {requests} requests, the oldest for {duration(oldest.oldest_seconds)}{where}"
    verb, _, rest = doing.partition(" ")
    return f"{who} {verb.removesuffix('s') if several else verb} {rest}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _short(text: str) -> str:
    text = writable(text)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
