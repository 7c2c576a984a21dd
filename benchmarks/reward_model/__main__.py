"""Scores a second through the pool of reward models, with a model that costs next to nothing.

    .venv/bin/python -m benchmarks.reward_model

Groups of samples are scored at once, as a run does it, by two replicas: as Ray actors (the pool), as processes beside
the driver, and by the model alone in this process, with nothing around it. All sides run in turn, several times.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, interleaved, table, write_results
from rljob_api.spec.reward_model import RewardModelSpec
from rljob_trainer.driver.local_ray import ray_for_run
from rljob_trainer.models.tokenizer import character_tokenizer
from rljob_trainer.rewards.reward_model.actor import ActorReplica
from rljob_trainer.rewards.reward_model.process import ScorerProcess
from rljob_trainer.rewards.reward_model.replica import ScorerReplica
from rljob_trainer.rewards.reward_model.scorer import Row, Scorer, settings_of
from rljob_trainer.rewards.reward_model.scorers import ReplicaSupply, Scorers
from rljob_trainer.rewards.reward_model.served import ServedModel, found
from rljob_trainer.waits import Waits

HERE = Path(__file__).parent
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .\n"
REPLICAS, SAMPLES, GROUP, OPEN_GROUPS, LENGTH, GOAL = 2, 12_000, 8, 64, 64, 2000.0
POOL, PROCESSES, BARE = "the pool (Ray actors)", "processes beside the driver", "one model, nothing around it"
SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class MeasuredScoring:
    """One repetition of one side."""

    rate: float
    """Scores a second."""
    busy: float
    """Share of the replicas' time that they computed."""
    driver_milliseconds: float
    """Processor time of this process for a score."""
    queue: int
    """Samples that waited for a replica at once."""
    wait_milliseconds: float
    """Mean time in that queue."""


@dataclass(frozen=True, slots=True)
class ScoringSide:
    """All repetitions of one side."""

    name: str
    rate: MeasuredSpread
    busy: MeasuredSpread
    driver_milliseconds: MeasuredSpread
    queue: float
    wait_milliseconds: MeasuredSpread

    @classmethod
    def of(cls, name: str, runs: list[MeasuredScoring]) -> ScoringSide:
        return cls(
            name,
            MeasuredSpread.of([run.rate for run in runs]),
            MeasuredSpread.of([run.busy for run in runs]),
            MeasuredSpread.of([run.driver_milliseconds for run in runs]),
            statistics.median(run.queue for run in runs),
            MeasuredSpread.of([run.wait_milliseconds for run in runs]),
        )


def free_model(folder: Path) -> Path:
    """One narrow layer: what is measured is what stands around it, its tokenizer too."""
    tokenizer = character_tokenizer(CHARACTERS, 512)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=512,
        num_labels=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def samples() -> list[Row]:
    chance = random.Random(0)
    return [
        [{"role": "user", "content": "say something"}, {"role": "assistant", "content": text}]
        for text in ("".join(chance.choices(CHARACTERS, k=chance.randint(1, 2 * LENGTH))) for _ in range(SAMPLES))
    ]


async def scored(start: ReplicaSupply, model: ServedModel, rows: list[Row]) -> MeasuredScoring:
    """All samples in groups, so many of which are under way at once."""
    scorers = Scorers(REPLICAS, start, Waits())
    groups = [rows[at : at + GROUP] for at in range(0, len(rows), GROUP)]
    slots = asyncio.Semaphore(OPEN_GROUPS)

    async def group(its: list[Row]) -> None:
        async with slots:
            for said in await asyncio.gather(*(scorers.score(model.name, row) for row in its)):
                assert isinstance(said, float)

    try:
        await scorers.serve(model)
        while sum(standing.state == "serving" for standing in scorers.standings()) < REPLICAS:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.gather(*map(group, groups[:OPEN_GROUPS]))
        scorers.take_counts(model.name)
        began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.gather(*map(group, groups))
        seconds = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        counts = scorers.take_counts(model.name)
    finally:
        await scorers.close()
    assert counts.rows == len(rows)
    processor = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return MeasuredScoring(
        rate=counts.rows / seconds,
        busy=counts.seconds / seconds / REPLICAS,
        driver_milliseconds=1000 * processor / counts.rows,
        queue=counts.most,
        wait_milliseconds=1000 * counts.waited / counts.taken,
    )


def bare(model: ServedModel, rows: list[Row]) -> MeasuredScoring:
    scorer = Scorer(settings_of(model, "cpu"))
    size = GROUP * OPEN_GROUPS // REPLICAS
    scorer.scores(rows[:size])
    began = time.monotonic()
    for at in range(0, len(rows), size):
        scorer.scores(rows[at : at + size])
    return MeasuredScoring(len(rows) / (time.monotonic() - began), 1.0, 0.0, 0, 0.0)


def measured(side: str, model: ServedModel, rows: list[Row]) -> MeasuredScoring:
    if side == BARE:
        return bare(model, rows)

    async def beside(name: str) -> ScorerReplica:
        return await ScorerProcess.start()

    async def actor(name: str) -> ScorerReplica:
        return await ActorReplica.start("cpu", {"num_cpus": 1}, start_seconds=SECONDS, call_seconds=SECONDS)

    if side == PROCESSES:
        return asyncio.run(scored(ReplicaSupply(beside, "processes", ""), model, rows))
    with ray_for_run(REPLICAS):
        return asyncio.run(scored(ReplicaSupply(actor, "the pool", "", SECONDS), model, rows))


def show(sides: list[ScoringSide]) -> str:
    rows = [
        [
            side.name,
            side.rate.show(",.0f"),
            *(
                ["", "", "", ""]
                if side.name == BARE
                else [
                    side.busy.show(".2f"),
                    side.driver_milliseconds.show(".3f"),
                    f"{side.queue:.0f}",
                    side.wait_milliseconds.show(".1f"),
                ]
            ),
        ]
        for side in sides
    ]
    header = ["", "scores/s", "share of time computing", "driver, ms a score", "longest queue", "mean wait, ms"]
    said = (
        f"{SAMPLES:,} samples of {LENGTH} tokens on average, in groups of {GROUP}, {OPEN_GROUPS} groups at once, "
        f"{REPLICAS} replicas with one thread each. Median (smallest – largest) over repetitions in turn. The goal: at "
        f"least {GOAL:,.0f} scores a second through the pool."
    )
    return f"{said}\n\n{table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = Hardware.here()
    rows = samples()
    with tempfile.TemporaryDirectory() as folder:
        source = free_model(Path(folder) / "model")
        model = found("free", "field", RewardModelSpec(source=str(source)), Path(folder))
        sides = {side: lambda _, side=side: measured(side, model, rows) for side in (POOL, PROCESSES, BARE)}
        results = [ScoringSide.of(name, runs) for name, runs in interleaved(sides, arguments.repetitions).items()]
    write_results(arguments.results, "reward_model", machine, results, show(results))


if __name__ == "__main__":
    main()
