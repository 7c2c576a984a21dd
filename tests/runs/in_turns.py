"""`rljob` whose colocated engines and ranks take turns on a CPU too, as they do on a GPU.

`python in_turns.py run job.yaml ...` with IN_TURNS in the environment: a file that is told what engines are asked, and
how many bytes of keys and values they hold just before and just after.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rljob_trainer import cli
from rljob_trainer.driver import engines
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineHandle

TOLD = Path(os.environ["IN_TURNS"])
moved = engines.SharedDevices._engines


def cache_bytes(rank: LearnerRank) -> int:
    """Memory behind the cache of the engine beside a rank."""
    cache: Any = rank.attachments.get(EngineLoop).call(lambda engine: engine._cache)
    return 0 if cache is None else int(cache._keys.nbytes + cache._values.nbytes)


def tell(line: str) -> None:
    with TOLD.open("a") as file:
        file.write(line)


class Watched:
    """An engine whose cache is looked at before and after it is asked something."""

    def __init__(self, engine: EngineHandle, learner: Any) -> None:
        self._engine, self._learner = engine, learner

    async def within(self, seconds: float, method: Any, *args: Any) -> Any:
        [before] = await self._learner.run(cache_bytes)
        answer = await self._engine.within(seconds, method, *args)
        [after] = await self._learner.run(cache_bytes)
        tell(f"{method.__name__} {before} {after}\n")
        return answer


async def told(turns: engines.SharedDevices, move: Any, what: str) -> None:
    await moved(turns, lambda engine: move(Watched(engine, turns._learner)), what)


engines.SharedDevices._engines = told  # type: ignore[method-assign]
engines.takes_turns = lambda spec: spec.placement == "colocated"

if __name__ == "__main__":
    sys.exit(cli.main())
