"""A whole `rljob run` in this process: the real driver, rank, engines, publication and checkpoints, without Ray.

Only Ray's part is replaced: a rank and each engine are called in threads, and what crosses to them and back is pickled
as it would be between processes. So a fault can be put anywhere with a few lines, and a run takes two seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rljob_api import RLJob, resolve
from rljob_api.resolved import ResolvedJob
from rljob_trainer.driver import assemble as assembling
from rljob_trainer.driver import engines as engine_places
from rljob_trainer.driver import run as running
from rljob_trainer.driver.engines import engine_spec, start_pool
from rljob_trainer.driver.parts import Parts
from rljob_trainer.driver.training import PipelineTrainer
from rljob_trainer.errors import DeadlineError
from rljob_trainer.learner.actor import RankHandle
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.group import LearnerGroup
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, UpdateRequest
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.work import RankReport, RankScores, Share
from rljob_trainer.pipeline.parts import TrainedBatch
from rljob_trainer.pools.size import engine_count
from rljob_trainer.rollout.actor import EngineSpec, build_engine
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineHandle, EngineLostError
from rljob_trainer.telemetry.view import JobSummary, Present, ShownStep


def job(**spec: Any) -> dict[str, Any]:
    """Copy two digits: a tiny model, two engines beside one rank, a reference, a temperature that is not 1."""
    characters = {"characters": "0123456789="}
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "silent-faults"},
        "spec": {
            "model": {
                "random": {"hiddenSize": 64, "layers": 2, "heads": 2, "contextLength": 16, "tokenizer": characters}
            },
            "data": {
                "train": {"task": {"type": "copy", "digits": 2, "size": 80}},
                "prompt": "question",
                "answer": "answer",
                "maxPromptTokens": 6,
            },
            "reward": {"functions": [{"type": "exactMatch", "params": {"partial": True}}]},
            "algorithm": {"preset": "grpo", "kl": {"inLoss": {"coefficient": 0.001}}},
            "batch": {"groups": 8, "samplesPerPrompt": 4, "miniBatchGroups": 4},
            "placement": "separate",
            "pipeline": {"mode": "sync"},
            "rollout": {
                "engine": "torch",
                "maxResponseTokens": 4,
                "replicas": 2,
                "sampling": {"temperature": 0.8},
            },
            "trainer": {"optimizer": {"learningRate": 1e-3}},
            "checkpoint": {"everySteps": 1, "keep": 8},
            "logging": {"tensorboard": False, "samplesEvery": 0},
            "stop": {"steps": 4},
            **spec,
        },
    }


@dataclass
class Watched:
    """What a run did and said, for whoever puts a fault in and for whoever looks whether it was named."""

    step: int = 0
    """The step under way."""
    struck: int | None = None
    """The step in which the fault was put in; 0: before the first of this attempt."""
    said: list[tuple[int, str]] = field(default_factory=list)
    """Every sentence with the step in which it came, from the fault on."""
    ended: str = ""
    parts: Parts | None = None
    ranks: list[LearnerRank] = field(default_factory=list)
    engines: dict[str, EngineLoop] = field(default_factory=dict)
    handles: dict[str, LocalEngine] = field(default_factory=dict)

    def strike(self) -> None:
        """The fault is put in now."""
        if self.struck is None:
            self.struck = self.step
            self.said.clear()

    def hear(self, text: str) -> None:
        self.said.append((self.step, text))


class _Listener(logging.Handler):
    """Takes what is logged as a warning for a sentence of the run, which `rljob run` shows."""

    def __init__(self, watched: Watched) -> None:
        super().__init__(logging.WARNING)
        self._watched = watched

    def emit(self, record: logging.LogRecord) -> None:
        self._watched.hear(record.getMessage())


class _Ears:
    """A view that keeps the run's sentences."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def start(self, job: JobSummary) -> None:
        """Nothing to see."""

    def step(self, record: ShownStep) -> None:
        """Nothing to see."""

    def message(self, text: str) -> None:
        self._watched.hear(text)

    def show(self, now: Present) -> None:
        """Nothing to see."""

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> _Ears:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _over(thing: Any) -> Any:
    """What arrives in another process."""
    return pickle.loads(pickle.dumps(thing))


class LocalHandle(RankHandle):
    """A rank in a thread of this process. What goes there and comes back is pickled, as between processes."""

    def __init__(self, rank: LearnerRank, thread: ThreadPoolExecutor) -> None:
        self._rank, self._thread = rank, thread

    async def _do(self, function: Callable[..., Any], *args: Any) -> Any:
        return _over(await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*_over(args))))

    def score(self, share: Share, request: ScoreRequest) -> Awaitable[RankScores]:
        return self._do(self._rank.score, share, request)

    def update(self, share: Share, loss: LossSettings, request: UpdateRequest) -> Awaitable[RankReport]:
        return self._do(self._rank.update, share, loss, request)

    def save(self, place: str | Path, belongs_to: str) -> Awaitable[None]:
        return self._do(self._rank.save, place, belongs_to)

    def load(self, place: str | Path, belongs_to: str) -> Awaitable[None]:
        return self._do(self._rank.load, place, belongs_to)

    def export(self, folder: Path) -> Awaitable[None]:
        return self._do(self._rank.export, folder)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(self._rank, *args, **kwargs))

    async def give_up(self) -> None:
        self._rank.giving_up.ask()

    def kill(self) -> None:
        self._thread.shutdown(wait=False)


async def local_learner(settings: LearnerSettings, watched: Watched) -> LearnerGroup:
    """A learner of one rank in a thread of this process."""
    learner = LearnerGroup(settings, learner_options_none())
    thread = ThreadPoolExecutor(1)
    rank = await asyncio.get_running_loop().run_in_executor(thread, lambda: Fsdp2().start(settings))
    learner.handles, learner.facts = [LocalHandle(rank, thread)], rank.facts()
    watched.ranks.append(rank)
    return learner


def learner_options_none() -> Any:
    """A group's options where nothing is placed."""
    from rljob_trainer.learner.options import GroupOptions

    return GroupOptions(call_seconds=60.0)


class LocalEngine(EngineHandle):
    """An engine in threads of this process."""

    def __init__(self, name: str, spec: EngineSpec, watched: Watched) -> None:
        self.name, self.place = name, None
        self.loop = EngineLoop(lambda: build_engine(spec), name)
        self._dead = False
        watched.engines[name] = self.loop
        watched.handles[name] = self

    async def within(self, seconds: float, method: Any, *args: Any) -> Any:
        if self._dead:
            raise EngineLostError(f"engine {self.name} is gone")
        try:
            async with asyncio.timeout(None if seconds == float("inf") else seconds):
                return _over(await asyncio.to_thread(method, self.loop, *_over(args)))
        except TimeoutError:
            raise DeadlineError(f"engine {self.name} did not do {method.__name__} within {seconds:g} s") from None

    def kill(self) -> None:
        if not self._dead:
            self._dead = True
            with contextlib.suppress(Exception):
                self.loop.close()


@contextmanager
def without_ray(watched: Watched) -> Iterator[None]:
    """Inside, ``run_job`` starts its rank and engines here."""

    async def start(
        job: ResolvedJob, model: Any, *, holds: Any, shelf: Any, waits: Any, stack: AsyncExitStack, **_: Any
    ) -> Any:
        learner = await local_learner(LearnerSettings.from_job(job, model.path, lanes=1), watched)
        stack.push_async_callback(learner.close)
        spec = engine_spec(job, model)
        actors: Any = [LocalEngine(str(number), spec, watched) for number in range(engine_count(job.spec))]
        for actor in actors:
            stack.callback(actor.kill)
        engines = await start_pool(job, model, learner, holds, shelf=shelf, waits=waits, actors=actors)
        stack.push_async_callback(engines.close)
        return learner, engines

    async def another(name: str, spec: EngineSpec, **_: Any) -> Any:
        return LocalEngine(name, spec, watched)

    real_assemble, real_train = assembling.assemble, PipelineTrainer.train

    async def assemble(*args: Any, **kwargs: Any) -> Parts:
        watched.parts = await real_assemble(*args, **kwargs)
        return watched.parts

    async def train(self: PipelineTrainer, groups: Any, *, step: int, version: int) -> TrainedBatch:
        watched.step = step
        return await real_train(self, groups, step=step, version=version)

    with ExitStack() as stack:
        for where, name, instead in (
            (assembling, "start_learner_and_engines", start),
            (running, "assemble", assemble),
            (running, "ray_beside", lambda *_: contextlib.nullcontext()),
            (engine_places.RayEngine, "start", another),
            (PipelineTrainer, "train", train),
        ):
            stack.enter_context(patch.object(where, name, instead))
        yield


Injection = Callable[[Watched], Any]
"""A context manager around one attempt."""
Between = Callable[[Path, Watched], None]
"""What happens to the output folder between two attempts."""


def attempt(document: dict[str, Any], folder: Path, watched: Watched, inject: Injection | None = None) -> None:
    """One call of `rljob run` in ``folder``; how it ended is in ``watched``."""
    resolved = resolve(RLJob.model_validate(document))
    options = running.RunOptions(folder / "output", folder)
    listener, package = _Listener(watched), logging.getLogger("rljob_trainer")
    package.addHandler(listener)
    propagated, package.propagate = package.propagate, False
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with without_ray(watched), inject(watched) if inject is not None else contextlib.nullcontext():
            ending = asyncio.run(_bounded(running.run_job(resolved, options, _Ears(watched))))
            watched.ended = f"{ending.status}: {ending.reason}"
    except Exception as error:  # noqa: BLE001 -- whatever ends the run is what it says
        watched.ended = f"{type(error).__name__}: {error}"
        watched.hear(f"{error} (exit code {getattr(error, 'exit_code', 'none: a traceback')})")
    finally:
        package.removeHandler(listener)
        package.propagate = propagated


async def _bounded(run: Awaitable[Any]) -> Any:
    async with asyncio.timeout(120):
        return await run
