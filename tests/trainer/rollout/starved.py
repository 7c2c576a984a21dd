"""A node whose memory Ray finds full: its memory monitor ends the process of an actor that is called as an engine is.

python starved.py FOLDER        # a short path, for Ray's sockets
"""

from __future__ import annotations

import asyncio
import sys
import time

import ray

from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineLostError, RayEngine


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class Hungry:
    def step(self) -> None:
        time.sleep(600)


async def main() -> None:
    actor = Hungry.remote()
    engine = RayEngine("0", lambda _: actor.step.remote(), kill=lambda: None)
    for _call in ("the one that is under way", "a later one"):
        try:
            await engine.within(300, EngineLoop.status)
        except EngineLostError as error:
            print(f"lost: {error}", flush=True)


if __name__ == "__main__":
    # Every machine uses more than a thousandth of its memory.
    limits = {"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 200}
    ray.init(num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[1], _system_config=limits)
    asyncio.run(main())
