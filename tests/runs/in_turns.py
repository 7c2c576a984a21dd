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
moved = engines.SharedDevices._call


def cache_bytes(rank: LearnerRank) -> int:
    """Memory behind the cache of the engine beside a rank."""
    cache: Any = rank.attachments.get(EngineLoop).call(lambda engine: engine._cache)
    return 0 if cache is None else int(cache._keys.nbytes + cache._values.nbytes)


def tell(line: str) -> None:
    with TOLD.open("a") as file:
        file.write(line)


async def told(turns: engines.SharedDevices, engine: EngineHandle, method: str, what: str, *args: Any) -> None:
    learner: Any = turns._learner
    [before] = await learner.run(cache_bytes)
    await moved(turns, engine, method, what, *args)
    [after] = await learner.run(cache_bytes)
    tell(f"{method} {before} {after}\n")


engines.SharedDevices._call = told  # type: ignore[method-assign]
engines.takes_turns = lambda spec: spec.placement == "colocated"

if __name__ == "__main__":
    sys.exit(cli.main())
