"""`rljob` whose colocated engines take turns with the ranks on a CPU too, and are killed when it is told.

`python killed_in_turns.py run job.yaml ...` with KILLS in the environment: moments with commas between them, of which
each is waited for after the publication that follows the one before. `update` is the beginning of the learner's work,
all others are methods that an engine is asked for (`EngineLoop`): it is killed when it has taken requests (`submit`),
else while it is to do what it is asked. KILLED_LOG is a file that is told of kills, of starts, and of the learner that
comes and goes. A torch engine gets a process of its own, as vLLM has.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any

from rljob_trainer import cli
from rljob_trainer.driver import engines, run
from rljob_trainer.learner.group import LearnerGroup
from rljob_trainer.rollout.handle import RayEngine
from rljob_trainer.training.step import TrainingStep

TOLD = Path(os.environ["KILLED_LOG"])
left = deque(os.environ["KILLS"].split(","))
armed = [True]
alive: dict[str, RayEngine] = {}
"""The last engine of each number."""

start, within = RayEngine.start, RayEngine.within
rest, wake, update, published = LearnerGroup.rest, LearnerGroup.wake, TrainingStep.run, engines.SharedDevices.published


def tell(line: str) -> None:
    with TOLD.open("a") as file:
        file.write(line + "\n")


def is_time(moment: str) -> bool:
    """Says so once."""
    if not (armed[0] and left and left[0] == moment):
        return False
    armed[0] = False
    return True


def kill(engine: RayEngine) -> None:
    assert engine.place is not None
    tell(f"killed {left.popleft()} {engine.name}")
    os.kill(engine.place.process, signal.SIGKILL)


async def starting(name: str, *arguments: Any, **options: Any) -> RayEngine:
    tell(f"start {name}")
    engine = await start(name, *arguments, **options)
    tell(f"started {name}")
    alive[name.partition(".")[0]] = engine
    return engine


async def asked(engine: RayEngine, seconds: float, method: Any, *arguments: Any) -> Any:
    answer = asyncio.ensure_future(within(engine, seconds, method, *arguments))
    if method.__name__ == "submit":
        answer = await answer
        if is_time("submit"):
            kill(engine)
        return answer
    if is_time(method.__name__):
        await asyncio.sleep(0)  # it is asked
        kill(engine)
    return await answer


async def resting(learner: LearnerGroup, *, actor: bool = True) -> None:
    await rest(learner, actor=actor)
    tell("the learner rests" if actor else "the actor stays")


async def waking(learner: LearnerGroup) -> None:
    tell("the learner wakes")
    await wake(learner)


async def updating(step: TrainingStep, *arguments: Any, **options: Any) -> Any:
    if is_time("update"):
        kill(alive["0"])
    return await update(step, *arguments, **options)


async def rearmed(turns: engines.SharedDevices) -> None:
    await published(turns)
    armed[0] = True


RayEngine.start, RayEngine.within = starting, asked  # type: ignore[method-assign,assignment]
LearnerGroup.rest, LearnerGroup.wake = resting, waking  # type: ignore[method-assign]
TrainingStep.run = updating  # type: ignore[method-assign]
engines.SharedDevices.published = rearmed  # type: ignore[method-assign]
engines.takes_turns = lambda spec: spec.placement == "colocated"
engines.inside_ranks = run.inside_ranks = lambda spec: False

if __name__ == "__main__":
    sys.exit(cli.main())
