"""What the pipeline itself costs per prompt group: loop, schedule, buffer and ledger, without Ray, engines or learner.

    .venv/bin/python -m benchmarks.pipelines.overhead

Rollout and trainer answer at once, so nearly all that is measured is ours: the schedule's questions, the step's
boundary, and the ledger, whose thread writes a step's rows in one transaction. What stand-ins and asyncio's task for
each group take is measured in turn with it. Then: by how much the driver grows for what waits for the trainer, whose
tokens lie in files (`rollout/shelf.py`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.machine import Machine
from benchmarks.measuring import Spread, table, write_results
from rljob_trainer.driver.generation import GenerationSettings, GroupRollout
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.garbage import settle
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.parts import StepRecord
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings
from rljob_trainer.rollout.protocol import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.samples import Group, IntArray, Prompt, RewardResult, Sample

HERE = Path(__file__).parent
GROUPS = 10_240
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
        self.finished_at = 0.0

    async def run(self, prompt: Prompt) -> Group:
        return Group(prompt, [Sample(0, _ANY, _FLOAT, _version(self.serving_version), _TRUE, "stop")])

    def waiting_for(self, finished: int, wanted: int) -> str:
        return "nothing"

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> dict[str, float]:
        return {}

    async def publish(self, version: int) -> dict[str, float]:
        self.serving_version = version
        return {}


_ANY, _FLOAT, _TRUE = np.zeros(1, np.int32), np.zeros(1, np.float32), np.ones(1, np.bool_)


@functools.cache
def _version(number: int) -> IntArray:
    return np.array([number], np.int32)


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


def bare_milliseconds_per_thousand(shape: ScheduleSettings, groups: int) -> float:
    """Of what the stand-ins and asyncio take by themselves: the same prompts, groups and tasks, a batch at a time."""

    async def run() -> None:
        feed, parts = Feed(groups), Nothing()
        for _ in range(groups // shape.groups_per_version):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(shape.groups_per_version):
                    prompt = feed.next()
                    assert prompt is not None
                    tasks.create_task(parts.run(prompt))

    settle()
    began = time.process_time()
    asyncio.run(run())
    return (time.process_time() - began) / groups * 1e6


def milliseconds_per_thousand(shape: ScheduleSettings, groups: int) -> float:
    """Of the whole loop with its ledger, all threads, per 1,000 groups."""

    async def run(ledger: Ledger) -> None:
        async def after_step(record: StepRecord) -> bool:
            ledger.write()
            return True

        parts = Nothing()
        await Pipeline(Feed(groups), parts, parts, Schedule(shape), after_step=after_step, journal=ledger).run()
        await ledger.close()

    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder, "ledger.sqlite"), attempt=1)
        settle()  # as a run does
        began = time.process_time()
        asyncio.run(run(ledger))
        return (time.process_time() - began) / groups * 1e6


class AtOnce:
    """Engines that answer every request with a response of full length, and rewards that cost nothing."""

    version = 0
    finished_at = 0.0

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Callable[[int, GenerationResult], None] | None = None
    ) -> list[GenerationResult]:
        results = []
        for request in requests:
            tokens = request.sampling.max_tokens
            ids = np.arange(tokens, dtype=np.int32)
            result = GenerationResult(request.request_id, ids, np.ones(tokens, np.float32), ids // tokens, "length")
            self._shelf.keep(result)  # as ``RolloutPool`` does with what arrives
            results.append(result)
        return results

    async def begun(self) -> list[GenerationRequest]:
        return []

    def progress(self) -> list[int]:
        return []

    def waiting_for(self) -> str:
        return "nothing"

    def in_processes(self, source: str) -> bool:
        return False

    async def score(self, group: Group) -> list[RewardResult]:
        return [RewardResult(1.0, {"exactMatch": 1.0}, "42", True) for _ in group.samples]


def megabytes_in_flight(groups: int, samples: int, tokens: int) -> float:
    """What this process grows by, at its peak, when that many finished groups wait for the trainer."""

    def resident() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6

    def texts(responses: list[list[int]]) -> list[str]:
        return ["x" * 4 * len(response) for response in responses]

    async def hold() -> list[Group]:
        settings = GenerationSettings(samples, SamplingSettings(max_tokens=tokens), seed=0)
        with tempfile.TemporaryDirectory() as folder:
            parts = AtOnce(Shelf(Path(folder)))
            rollout = GroupRollout(parts, parts, texts, settings)
            prompts = (Prompt(n, 0, n, "none", "x" * 1000, tuple(range(256)), "42") for n in range(groups))
            return [await rollout.run(prompt) for prompt in prompts]

    before = resident()
    held = asyncio.run(hold())
    grown = resident() - before
    assert len(held) == groups
    return grown


def main() -> None:
    machine = Machine.here()
    rows: dict[str, tuple[Spread, Spread, Spread]] = {}
    for name, shape in SHAPES.items():
        pairs = [
            (milliseconds_per_thousand(shape, GROUPS), bare_milliseconds_per_thousand(shape, GROUPS)) for _ in range(7)
        ]
        whole, bare = zip(*pairs, strict=True)
        rows[name] = Spread.of([a - b for a, b in pairs]), Spread.of(whole), Spread.of(bare)
    # In a process of its own. The responses take 16 GB on the disk of the folder for temporary files.
    code = "from benchmarks.pipelines.overhead import megabytes_in_flight as m; print(m(10_000, 16, 8192))"
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=HERE.parents[1]
    )
    megabytes = json.loads(printed.stdout)
    text = "\n".join(
        [
            "# What the pipeline costs",
            "",
            "Processor milliseconds per 1,000 groups, all threads: median (smallest – largest) of seven. Bare: the "
            f"same prompts, groups and asyncio tasks with nothing around them. Ours is the rest; goal: under "
            f"{GOAL_MILLISECONDS:.0f}.",
            "",
            table(
                ["schedule", "ours", "whole", "bare"],
                [[name, *(spread.show(".1f") for spread in spreads)] for name, spreads in rows.items()],
            ),
            f"10,000 finished groups of 16 x 8,192 tokens that wait for the trainer: the driver grows by "
            f"{megabytes:.0f} MB (goal: under {GOAL_MEGABYTES:.0f} MB).",
        ]
    )
    write_results(HERE / "results", "overhead", machine, {"milliseconds": rows, "megabytes": megabytes}, text)


if __name__ == "__main__":
    main()
