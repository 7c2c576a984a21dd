"""The learner and the engines of a run come up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.driver.engines import (
    NOBODY_TOLD,
    Engines,
    PoolTold,
    learner_lanes,
    learner_options,
    start_actors,
    start_engines,
)
from rljob_trainer.driver.together import together
from rljob_trainer.learner import starting
from rljob_trainer.learner.protocol import RankedLearner
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.models.fixed import FixedModel
from rljob_trainer.models.folder import ModelFolder
from rljob_trainer.pools.size import engine_count
from rljob_trainer.publish.publication import Holds
from rljob_trainer.rollout.handle import RayEngine
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedJob


def _to_start(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'} to start"


async def start_learner_and_engines(
    job: ResolvedJob,
    model: ModelFolder,
    *,
    critic_model: FixedModel | None = None,
    base: Path,
    holds: Holds,
    shelf: Shelf,
    waits: Waits,
    stack: AsyncExitStack,
    told: PoolTold = NOBODY_TOLD,
    by_role: bool,
    report: Callable[[str], None],
) -> tuple[RankedLearner, Engines]:
    """Both at once where they have devices of their own, which loading a large model keeps busy for minutes; colocated
    engines come after the learner, which makes room for them. ``base``: where the user's modules are looked for;
    ``critic_model``: what the critic starts from, if not the policy. What
    was started is closed with ``stack``."""
    spec = job.spec
    begun = time.monotonic()
    learner_after = engines_after = 0.0

    async def start_learner() -> RankedLearner:
        nonlocal learner_after
        options = learner_options(spec, by_role)
        lanes = learner_lanes(spec, None if by_role else len(os.sched_getaffinity(0)))
        settings = LearnerSettings.from_job(
            job,
            model.path,
            lanes=lanes,
            model_address=model.address,
            code_paths=[str(base)],
            critic_model=critic_model,
        )
        with waits.wait("driver", _to_start(spec.trainer.ranks, "learner rank"), options.start_seconds):
            learner = await starting.start_learner(settings, options)
        stack.push_async_callback(learner.close)
        learner_after = time.monotonic() - begun
        return learner

    def engines_wait() -> AbstractContextManager[object]:
        return waits.wait("driver", _to_start(engine_count(spec), "engine"), float(spec.deadlines.start_seconds))

    async def start_beside() -> list[RayEngine]:
        nonlocal engines_after
        with engines_wait():
            actors = await start_actors(job, model, waits=waits, by_role=by_role)
        for actor in actors:
            stack.callback(actor.kill)
        engines_after = time.monotonic() - begun
        return actors

    actors: list[RayEngine] = []
    if spec.placement == "separate":
        learner, actors = await together(start_learner(), start_beside())
    else:
        learner = await start_learner()
    with engines_wait():
        engines = await start_engines(
            job, model, learner, holds, shelf=shelf, waits=waits, told=told, by_role=by_role, actors=actors
        )
    stack.push_async_callback(engines.close)
    engines_after = engines_after or time.monotonic() - begun
    report(f"the learner was ready after {learner_after:.1f} s, the engines after {engines_after:.1f} s")
    return learner, engines
