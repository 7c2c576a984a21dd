"""An environment whose tool takes its time: log-normal, the same for all samples of a prompt."""

from __future__ import annotations

import asyncio
import random

from rljob_trainer.episodes import Task, Voice, World


async def episode(task: Task, model: Voice, world: World, mean: float, sigma: float) -> float:
    """One answer before the tool and one after it. ``mean``: seconds; ``sigma``: of the logarithm."""
    first = await model.chat(task.messages, max_tokens=8)
    # The mean of a log-normal is exp(mu + sigma^2 / 2).
    seconds = mean * random.Random(world.seed).lognormvariate(-(sigma**2) / 2, sigma)
    await world.call("slow", slow, seconds)
    told = [*task.messages, first.message, {"role": "tool", "content": "="}]
    last = await model.chat(told, max_tokens=8)
    return float(last.text.startswith(task.prompt.answer or ""))


async def slow(seconds: float) -> None:
    """A service that takes so long."""
    await asyncio.sleep(seconds)
