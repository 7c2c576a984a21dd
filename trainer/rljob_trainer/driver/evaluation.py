"""A job's validation without training: engines, rewards, statistics."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.driver.assemble import read_inputs, training_sampling, validator_of
from rljob_trainer.driver.engines import start_pool
from rljob_trainer.driver.feeding import date_of_prompts
from rljob_trainer.driver.finished import find_trained, load_actor
from rljob_trainer.driver.judges import judge_count, judges_of
from rljob_trainer.driver.ray_beside import ray_beside
from rljob_trainer.driver.scorers import scorer_count, scorers_of
from rljob_trainer.environments import environment_of
from rljob_trainer.gym.scoring import prepared_gym
from rljob_trainer.pools.size import engine_count
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedJob


async def evaluate(
    job: ResolvedJob, base: Path, *, run: str | None, step: int | None, report: Callable[[str], None]
) -> dict[str, float]:
    """The metrics of the job's validation sets on its model, or on the policy that ``run`` trained.

    Raises ``RLJobError`` with a message for the user.
    """
    spec = job.spec
    checkpoint = None
    with tempfile.TemporaryDirectory(prefix="rljob-eval-") as scratch:
        if run is not None:
            found = find_trained(run, step, Path(scratch) / "trained", report)
            checkpoint = found.checkpoint
            exported = Path(scratch) / "exported"
            load_actor(found).export(exported)
            report(f"evaluating the model of step {checkpoint.step}")
            model = spec.model.model_copy(update={"source": str(exported), "random": None, "revision": None})
            job = job.model_copy(update={"spec": spec.model_copy(update={"model": model})})
        now = date_of_prompts(checkpoint)
        inputs = read_inputs(job, base, Path(scratch) / "model", now)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(ray_beside(engine_count(spec) + scorer_count(spec) + judge_count(spec)))
            scorers, judge = scorers_of(spec, Waits()), judges_of(spec, base, Waits(), now)
            for scoring in (scorers, judge):
                if scoring is not None:
                    stack.push_async_callback(scoring.close)
            rewards = await stack.enter_async_context(
                RewardPool(
                    spec.reward,
                    longest_response=spec.rollout.max_response_tokens,
                    paths=[base],
                    scorers=scorers,
                    judge=judge,
                    gym=prepared_gym(spec.data, base),
                )
            )
            engines = await start_pool(job, inputs.model, None, holds=lambda: ())
            stack.push_async_callback(engines.close)
            log = Path(scratch) / "episodes"
            environment = await environment_of(spec, inputs.chat, log, base, stack, report)
            stack.callback(environment.close)
            validator = validator_of(
                job.spec, inputs, environment, engines, rewards, training_sampling(job.spec, inputs)
            )
            assert validator is not None
            return (await validator.run()).metrics
