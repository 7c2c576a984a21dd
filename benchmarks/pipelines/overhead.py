"""What the pipeline itself costs per prompt group: loop, schedule and buffer, without Ray, engines or learner.

    .venv/bin/python -m benchmarks.pipelines.overhead

Rollout and trainer answer at once, so all that is measured is Python: the schedule's questions, one asyncio task a
group, and the step's boundary. Then: how much memory the driver needs for what is in flight.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.machine import Machine
from benchmarks.measuring import Spread, table, write_results
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.parts import StepRecord
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings
from rljob_trainer.samples import Group, Prompt, Sample

HERE = Path(__file__).parent
GOAL_MILLISECONDS = 20.0
GOAL_MEGABYTES = 200.0
SHAPES = {
    "sync, 512 groups": ScheduleSettings(512, 512, 0),
    "oneStepOff, 512 groups": ScheduleSettings(512, 512, 1),
    "fullyAsync, 4 x 128 groups, age 4": ScheduleSettings(512, 128, 4, None, ordered=False),
    "fullyAsync, 4 x 128 groups, age 4, budget 0.5": ScheduleSettings(512, 128, 4, 0.5, ordered=False),
    "fullyAsync, 4 x 8 groups, age 8": ScheduleSettings(32, 8, 8, None, ordered=False),
}


class Nothing:
    """Rollout and trainer that take no time."""

    def __init__(self) -> None:
        self.serving_version = 0

    async def run(self, prompt: Prompt) -> Group:
        await asyncio.sleep(0)
        versions = np.array([self.serving_version], np.int32)
        return Group(prompt, [Sample(0, versions, _FLOAT, versions, _TRUE, "stop")])

    def waiting_for(self) -> str:
        return "nothing"

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> dict[str, float]:
        await asyncio.sleep(0)
        return {}

    async def publish(self, version: int) -> dict[str, float]:
        self.serving_version = version
        return {}


_FLOAT, _TRUE = np.zeros(1, np.float32), np.ones(1, np.bool_)


class Feed:
    """So many prompts."""

    def __init__(self, prompts: int) -> None:
        self.left = prompts
        self.ordinal = 0

    def next(self) -> Prompt | None:
        if self.ordinal == self.left:
            return None
        self.ordinal += 1
        return Prompt(self.ordinal - 1, 0, self.ordinal - 1, "none", "", (), None)

    def state_dict(self) -> dict[str, object]:
        return {}


async def _go_on(record: StepRecord) -> bool:
    return True


def milliseconds_per_thousand(shape: ScheduleSettings, groups: int) -> float:
    """Of the whole loop, per 1,000 groups."""
    parts = Nothing()
    pipeline = Pipeline(Feed(groups), parts, parts, Schedule(shape), after_step=_go_on)
    began = time.process_time()
    asyncio.run(pipeline.run())
    return (time.process_time() - began) / groups * 1e6


def megabytes_in_flight(groups: int, samples: int, tokens: int) -> float:
    """What this process grows by when that many finished groups lie in the driver's buffer, as they do today."""

    def resident() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6

    before = resident()
    held = []
    for ordinal in range(groups):
        prompt = Prompt(ordinal, 0, ordinal, "none", "x" * 1000, tuple(range(256)), None)
        held.append(Group(prompt, [_sample(index, tokens) for index in range(samples)]))
    return resident() - before


def _sample(index: int, tokens: int) -> Sample:
    ids = np.ones(tokens, np.int32)
    mask = np.ones(tokens, np.bool_)
    return Sample(index, ids, np.ones(tokens, np.float32), np.ones(tokens, np.int32), mask, "stop", "x" * 4 * tokens)


def main() -> None:
    machine = Machine.here()
    rows = {}
    for name, shape in SHAPES.items():
        rows[name] = Spread.of([milliseconds_per_thousand(shape, 10_240) for _ in range(5)])
    # A hundredth of the goal's 10,000 groups, in a process of its own: memory grows in proportion.
    code = "from benchmarks.pipelines.overhead import megabytes_in_flight as m; print(m(100, 16, 8192))"
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=HERE.parents[1]
    )
    megabytes = 100 * json.loads(printed.stdout)
    text = "\n".join(
        [
            "# What the pipeline costs",
            "",
            f"Processor milliseconds per 1,000 groups, median (smallest – largest) of five; goal: under "
            f"{GOAL_MILLISECONDS:.0f}.",
            "",
            table(["schedule", "ms per 1,000 groups"], [[name, spread.show(".1f")] for name, spread in rows.items()]),
            f"10,000 finished groups of 16 x 8,192 tokens in the driver's buffer: {megabytes / 1000:.1f} GB (from 100 "
            f"of them; goal: under {GOAL_MEGABYTES:.0f} MB).",
        ]
    )
    write_results(HERE / "results", "overhead", machine, {"milliseconds": rows, "megabytes": megabytes}, text)


if __name__ == "__main__":
    main()
