"""What the pipeline itself costs per prompt group: loop, schedule, buffer and ledger, without Ray, engines or learner.

    .venv/bin/python -m benchmarks.pipelines.overhead

Schedule, buffer and ledger (whose thread writes a step's rows in one transaction) are called as the loop calls them;
then, in turn with that, the whole loop runs, with a rollout and a trainer that answer at once: it adds a task for each
group, what waits, and what wakes. Last: by how much the driver grows for what waits for the trainer, whose tokens lie
in files (`rollout/shelf.py`).
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, table, write_results
from rljob_trainer.episodes.episode import Episode, Group, Prompt, RewardResult, single_turn
from rljob_trainer.episodes.group import GenerationSettings, GroupRollout
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.receipts import Receipts
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.episodes.single_turn import SingleTurn
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.garbage import settle
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.parts import StepRecord, TrainedBatch
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings
from rljob_trainer.record.ledger import Ledger
from rljob_trainer.rollout.shelf import Shelf

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
        return Group(prompt, [_episode(prompt, self.serving_version)])

    def waiting_for(self, finished: int, wanted: int) -> str:
        return "nothing"

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> TrainedBatch:
        return TrainedBatch()

    async def publish(self, version: int) -> dict[str, float]:
        self.serving_version = version
        return {}


@functools.cache
def _tokens(version: int) -> Tokens:
    return Tokens.sampled(np.zeros(1, np.int32), np.zeros(1, np.float32), np.array([version], np.int32))


def _episode(prompt: Prompt, version: int) -> Episode:
    return single_turn(EpisodeId(TRAINING, prompt.ordinal, 0), prompt.token_ids, _tokens(version), "stop")


class CountedFeed:
    """So many prompts."""

    def __init__(self, prompts: int) -> None:
        self.left = prompts
        self.ordinal = 0

    async def prepare(self, prompts: int) -> bool:
        return True

    def next(self) -> Prompt | None:
        if self.ordinal == self.left:
            return None
        self.ordinal += 1
        return Prompt(self.ordinal - 1, 0, self.ordinal - 1, "none", "", (), None)

    def state_dict(self) -> dict[str, object]:
        return {}


@contextmanager
def measured_ledger(groups: int) -> Iterator[tuple[Ledger, list[float]]]:
    """A ledger, and where the processor milliseconds of all threads per 1,000 groups will be when it is closed."""
    measured: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder, "ledger.sqlite"), attempt=1)
        settle()  # as a run does
        began = time.process_time()
        yield ledger, measured
        measured.append((time.process_time() - began) / groups * 1e6)


def of_the_parts(shape: ScheduleSettings, groups: int) -> float:
    """Schedule, buffer and ledger, called as the loop calls them."""
    feed = CountedFeed(groups)
    prompts = list(iter(feed.next, None))
    made = [Group(prompt, [_episode(prompt, 0)]) for prompt in prompts]
    schedule = Schedule(shape)
    buffer: dict[int, Group] = {}
    admitted = step = 0
    with measured_ledger(groups) as (ledger, measured):
        while admitted < groups or schedule.open:
            last = min(groups, admitted + schedule.admissible(schedule.version))
            for ordinal in range(admitted, last):
                schedule.admitted(ordinal, schedule.version)
                ledger.admitted(prompts[ordinal], schedule.version, schedule.deadline(ordinal))
            for ordinal in range(admitted, last):
                buffer[ordinal] = made[ordinal]
                schedule.finished(ordinal)
                ledger.finished(ordinal)
            admitted = last
            batch = schedule.choose(last=admitted == groups)
            assert batch is not None
            ledger.trained([buffer.pop(ordinal) for ordinal in batch], step, schedule.version)
            schedule.trained(batch)
            if schedule.publication_due:
                schedule.published()
                step += 1
                ledger.write()
        asyncio.run(ledger.close())
    return measured[0]


def of_the_loop(shape: ScheduleSettings, groups: int) -> float:
    """The whole pipeline: the parts, a task for each group, and what waits and wakes."""

    async def run(ledger: Ledger) -> None:
        async def after_step(record: StepRecord) -> bool:
            ledger.write()
            return True

        parts = Nothing()
        await Pipeline(CountedFeed(groups), parts, parts, Schedule(shape), after_step=after_step, journal=ledger).run()
        await ledger.close()

    with measured_ledger(groups) as (ledger, measured):
        asyncio.run(run(ledger))
    return measured[0]


class AtOnce:
    """Engines that answer every request with a response of full length, and rewards that cost nothing."""

    version = 0
    finished_at = 0.0

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._receipts = Receipts()

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Callable[[int, GenerationResult], None] | None = None
    ) -> list[GenerationResult]:
        results = []
        for request in requests:
            tokens = request.sampling.max_tokens
            ids = np.arange(tokens, dtype=np.int32)
            made = Tokens.sampled(ids, np.ones(tokens, np.float32), ids // tokens)
            result = GenerationResult(request.id, made, "length")
            self._receipts.take(request)
            self._receipts.write([result])
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
        return [RewardResult(1.0, {"exactMatch": 1.0}, "42", True) for _ in group.episodes]


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
            rollout = GroupRollout(SingleTurn(), parts, parts, texts, settings)
            prompts = (Prompt(n, 0, n, "none", "x" * 1000, tuple(range(256)), "42") for n in range(groups))
            return [await rollout.run(prompt) for prompt in prompts]

    before = resident()
    held = asyncio.run(hold())
    grown = resident() - before
    assert len(held) == groups
    return grown


def main() -> None:
    machine = Hardware.here()
    rows: dict[str, tuple[MeasuredSpread, MeasuredSpread]] = {}
    for name, shape in SHAPES.items():
        pairs = [(of_the_parts(shape, GROUPS), of_the_loop(shape, GROUPS)) for _ in range(7)]
        parts, loop = zip(*pairs, strict=True)
        rows[name] = MeasuredSpread.of(parts), MeasuredSpread.of(loop)
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
            "Processor milliseconds per 1,000 groups, all threads: median (smallest – largest) of seven. Goal for "
            f"schedule, buffer and ledger: under {GOAL_MILLISECONDS:.0f}. The loop around them adds asyncio's task for "
            "each group.",
            "",
            table(
                ["pipeline", "schedule, buffer, ledger", "with the loop"],
                [[name, *(spread.show(".1f") for spread in spreads)] for name, spreads in rows.items()],
            ),
            f"10,000 finished groups of 16 x 8,192 tokens that wait for the trainer: the driver grows by "
            f"{megabytes:.0f} MB (goal: under {GOAL_MEGABYTES:.0f} MB).",
        ]
    )
    write_results(HERE / "results", "overhead", machine, {"milliseconds": rows, "megabytes": megabytes}, text)


if __name__ == "__main__":
    main()
