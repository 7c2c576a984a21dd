"""Seconds of a step in which engine and learner do nothing: what driver, pipeline, Ray, rewards and metrics cost.

    .venv/bin/python -m benchmarks.driver_overhead

A real run (`rljob run`'s own code: local Ray, the rank's process, reward processes, metrics.jsonl) in which only the
model's work is taken out, inside the rank's process: the engine answers every request at once with a response of full
length, and the learner returns what its first update returned. Requests, responses, batches and results travel as ever.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from benchmarks.against_trl.model import GSM8K, VOCABULARY, common_model
from benchmarks.driver_overhead.idle import make_idle
from benchmarks.environments import DEFAULT_CACHE, ROOT
from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, table, write_results
from benchmarks.rljob_run import Run, read_run
from rljob_api import load_jobs, resolve
from rljob_trainer.data import feed
from rljob_trainer.data.kept import MOST_BYTES, KeptPrompts
from rljob_trainer.driver import run as running
from rljob_trainer.driver.assemble import assemble
from rljob_trainer.driver.parts import Parts
from rljob_trainer.telemetry.plain import PlainView

HERE = Path(__file__).parent
JOBS = ROOT / "benchmarks" / "against_trl"
GOAL_SECONDS = 0.020
SHORT_QUESTIONS = 6875
"""Of GSM8K's 7,473 in this vocabulary: not longer than the prompts of the other shapes."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """One batch."""

    preset: str
    groups: int
    samples: int
    response_tokens: int
    data: Literal["few prompts", "first epoch", "beyond memory"] = "few prompts"
    """256 questions, again and again; or no question of GSM8K twice, as in the first pass over the data. Beyond memory:
    none is kept, as the rows of a data set that are more than memory is spent on; each is rendered and tokenised beside
    the steps."""

    @property
    def name(self) -> str:
        batch = f"{self.preset}, {self.groups} x {self.samples} x {self.response_tokens} tokens"
        return batch if self.data == "few prompts" else f"{batch}, {self.data}"


SHAPES = (
    BatchShape("grpo", 2, 8, 64),
    BatchShape("grpo", 16, 8, 64),
    BatchShape("grpo", 32, 16, 5),
    BatchShape("ppo", 16, 1, 64),
    BatchShape("ppo", 128, 1, 64),
    BatchShape("ppo", 128, 1, 64, "first epoch"),
    BatchShape("ppo", 128, 1, 64, "beyond memory"),
    BatchShape("ppo", 256, 1, 384),
)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds a step, over the steps after warm-up, and the median of each stage."""

    shape: BatchShape
    seconds: MeasuredSpread
    ninetieth_percentile: float
    stages: dict[str, float]


def run_idle(shape: BatchShape, model: Path, steps: int) -> Run:
    """Trains ``steps`` steps of nothing, or fewer if they are not to end the first epoch."""
    few = shape.data == "few prompts"
    settings = {
        "model.source": model,
        "data.train.source": model / "prompts.jsonl" if few else GSM8K,
        "data.maxPromptTokens": 128,
        "batch.groups": shape.groups,
        "batch.samplesPerPrompt": shape.samples,
        "rollout.maxResponseTokens": shape.response_tokens,
        "stop.steps": steps if few else min(steps, SHORT_QUESTIONS // shape.groups),
    }
    memory = MOST_BYTES if shape.data != "beyond memory" else 0
    (document,) = load_jobs(JOBS / f"{shape.preset}.yaml", [f"{path}={value}" for path, value in settings.items()])
    with tempfile.TemporaryDirectory() as folder:
        options = running.RunOptions(Path(folder) / "run", JOBS, "never")
        with (
            patch.object(running, "assemble", _assemble_idle),
            patch.object(feed, "KeptPrompts", lambda: KeptPrompts(memory)),
            PlainView(io.StringIO()) as view,
        ):
            asyncio.run(running.run_job(resolve(document), options, view))
        return read_run(options.output)


async def _assemble_idle(*args: Any, **named: Any) -> Parts:
    parts = await assemble(*args, **named)
    await parts.learner.run(make_idle, VOCABULARY)
    return parts


def measure(shape: BatchShape, model: Path, steps: int, warm_up: int) -> Overhead:
    run = run_idle(shape, model, steps + warm_up)
    # The last step writes the final checkpoint.
    rows = run.rows[warm_up:-1]
    seconds = sorted(row["timing/step_seconds"] for row in rows)
    stages = {name: median for name, median in run.stage_seconds(warm_up).items() if name != "step"}
    return Overhead(shape, MeasuredSpread.of(seconds), seconds[int(0.9 * len(seconds))], stages)


def in_a_process(number: int, steps: int, warm_up: int, cache: Path) -> Overhead:
    """A process for each shape, as users have one for each run. After other shapes in the same process a publication
    takes 6 ms where it takes 2 alone; why is not known."""
    with tempfile.NamedTemporaryFile() as answer:
        module = [sys.executable, "-m", "benchmarks.driver_overhead", "--one", str(number), answer.name]
        settings = ["--steps", str(steps), "--warm-up", str(warm_up), "--cache", str(cache)]
        subprocess.run([*module, *settings], check=True)
        overhead: Overhead = pickle.loads(Path(answer.name).read_bytes())
    return overhead


def show(measured: Sequence[Overhead]) -> str:
    rows = []
    for overhead in measured:
        s = overhead.seconds
        stages = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in overhead.stages.items())
        rows.append(
            [
                overhead.shape.name,
                f"**{1000 * s.median:.1f}** ({1000 * s.min:.1f} – {1000 * s.max:.1f})",
                f"{1000 * overhead.ninetieth_percentile:.1f}",
                stages,
            ]
        )
    return "\n".join(
        [
            "Milliseconds a step without the model: median (smallest – largest). "
            f"The goal: under {1000 * GOAL_SECONDS:.0f}.",
            "",
            table(["batch", "step", "90th percentile", "of which"], rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where the model is kept")
    parser.add_argument("--steps", type=int, default=100, help="counted steps (default 100)")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # number of the shape, file for the answer
    arguments = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
    machine = Hardware.here()
    model = common_model(arguments.cache)
    if arguments.one:
        number, answer = arguments.one
        overhead = measure(SHAPES[int(number)], model, arguments.steps, arguments.warm_up)
        Path(answer).write_bytes(pickle.dumps(overhead))
        return
    measured = []
    for number, shape in enumerate(SHAPES):
        print(shape.name, flush=True)
        measured.append(in_a_process(number, arguments.steps, arguments.warm_up, arguments.cache))
    write_results(arguments.results, "driver_overhead", machine, measured, show(measured))


if __name__ == "__main__":
    main()
