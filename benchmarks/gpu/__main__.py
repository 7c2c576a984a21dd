"""Marks on one GPU: the engine against bare vLLM, the learner's utilisation, the step against TRL with vLLM.

python3.11 requirements/install.py --accelerator gpu   # once, on a machine with a GPU
.venv/bin/python -m benchmarks.gpu                     # about 30 minutes
.venv/bin/python -m benchmarks.gpu --device cpu        # tries engine and learner with a small model

Parts whose needs are not met (``needs.py``) are named at once, with the remedy, and left out; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.against_trl.setting import Setting, read_steps
from benchmarks.environments import DEFAULT_CACHE, ROOT, peer_environment, peer_python
from benchmarks.gpu.model import shaped_model
from benchmarks.gpu.needs import ON_CPU, PARTS, PEER, Part, missing
from benchmarks.machine import Machine
from benchmarks.measuring import Spread, Step, interleaved, ratios, steady, table, write_results
from benchmarks.rljob_run import Run, rljob_run

HERE = Path(__file__).parent
SETTING = Setting("grpo", sequences=256, steps=12, warm_up=3, response_tokens=512)
IMPORTABLE = os.pathsep.join(str(ROOT / folder) for folder in (".", "trainer", "api"))
"""Our own processes find the packages of this checkout also where it is not installed."""


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """Generated tokens a second, best round of each process; the mark is a ratio of 0.95."""

    ours: Spread
    bare: Spread
    ratio: Spread


@dataclass(frozen=True, slots=True)
class LearnerOutcome:
    """An update in a process of its own; ``utilisation`` is None where the device's peak is not known (mark: 0.45)."""

    tokens_per_second: Spread
    utilisation: Spread | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Seconds a step and the learner's utilisation (the mark is 0.45); theirs over ours (the mark is 1.5)."""

    ours: Spread
    theirs: Spread
    ratio: Spread
    utilisation: Spread


def engine_rate(side: str, model: Path, device: str, requests: int, tokens: int, folder: Path, number: int) -> float:
    """Tokens a second of one process."""
    written = folder / f"{side}-{number}.json"
    run("benchmarks.gpu.engine", side, "--model", model, "--write", written, "--device", device,
        "--requests", requests, "--tokens", tokens)  # fmt: skip
    rounds: list[tuple[int, float]] = json.loads(written.read_text())
    return max(made / seconds for made, seconds in rounds)


def measure_engine(model: Path, device: str, repetitions: int) -> EngineOutcome:
    requests, tokens = (16, 32) if device == "cpu" else (SETTING.sequences, SETTING.response_tokens)
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            side: partial(engine_rate, side, model, device, requests, tokens, Path(folder)) for side in ("ours", "bare")
        }
        rates = interleaved(sides, repetitions)
    pairs = ratios(rates["ours"], rates["bare"])
    return EngineOutcome(Spread.of(rates["ours"]), Spread.of(rates["bare"]), Spread.of(pairs))


def measure_learner(model: Path, device: str, repetitions: int) -> LearnerOutcome:
    sequences, tokens = (16, 32) if device == "cpu" else (SETTING.sequences, SETTING.response_tokens)
    rates: list[float] = []
    used: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repetitions):
            print(f"repetition {number + 1} of {repetitions}: learner", flush=True)
            written = Path(folder, f"{number}.json")
            run("benchmarks.gpu.learner", "--model", model, "--write", written, "--device", device,
                "--sequences", sequences, "--samples", SETTING.samples_per_prompt, "--tokens", tokens)  # fmt: skip
            update: dict[str, Any] = json.loads(written.read_text())
            rates.append(update["tokens"] / median(update["seconds"]))
            if update["utilisation"] is not None:
                used.append(median(update["utilisation"]))
    return LearnerOutcome(Spread.of(rates), Spread.of(used) if used else None)


def our_run(model: Path, folder: Path, number: int) -> Run:
    settings = {"model.source": model, "data.train.source": model / "prompts.jsonl", "seed": number}
    return rljob_run(HERE / "job.yaml", folder / f"rljob-{number}", steps=SETTING.steps, threads=4, settings=settings)


def their_steps(model: Path, python: Path, folder: Path, number: int) -> list[Step]:
    written = folder / f"trl-{number}.json"
    run("benchmarks.gpu.trl_vllm", "--setting", SETTING.to_json(), "--model", model, "--write", written, python=python)
    return read_steps(written)


def measure_step(model: Path, cache: Path, repetitions: int) -> StepOutcome:
    python = peer_python(PEER, cache)
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Any] = {
            "rljob": partial(our_run, model, Path(folder)),
            "TRL": partial(their_steps, model, python, Path(folder)),
        }
        runs = interleaved(sides, repetitions)
    ours = [step_seconds(run.steps(SETTING.sequences, SETTING.epochs)) for run in runs["rljob"]]
    theirs = [step_seconds(steps) for steps in runs["TRL"]]
    used = [median(run.column("throughput/model_flops_utilisation/actor")) for run in runs["rljob"]]
    return StepOutcome(Spread.of(ours), Spread.of(theirs), Spread.of(ratios(theirs, ours)), Spread.of(used))


def step_seconds(steps: Sequence[Step]) -> float:
    return median(step.seconds for step in steady(steps, SETTING.warm_up))


def run(module: str, *arguments: object, python: Path = Path(sys.executable)) -> None:
    command = [str(part) for part in (python, "-m", module, *arguments)]
    environment = peer_environment(4, PYTHONPATH=IMPORTABLE)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode != 0:
        sys.exit(f"{module} failed:\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}")


def show(engine: EngineOutcome | None, learner: LearnerOutcome | None, step: StepOutcome | None) -> str:
    rows = []
    if engine is not None:
        ours, bare = engine.ours.show(",.0f"), engine.bare.show(",.0f")
        rows.append(["engine, tokens/s", ours, f"{bare} (bare vLLM)", f"**{engine.ratio.show()}**", "0.95"])
    if learner is not None:
        rows.append(["learner alone, tokens/s", learner.tokens_per_second.show(",.0f"), "", "", ""])
        if learner.utilisation is not None:
            rows.append(["learner alone, model FLOPs utilisation", learner.utilisation.show(), "", "", "0.45"])
    if step is not None:
        rows.append(["step, s", step.ours.show(), f"{step.theirs.show()} (TRL)", f"**{step.ratio.show()}**", "1.5"])
        rows.append(["learner in the run, model FLOPs utilisation", step.utilisation.show(), "", "", "0.45"])
    return table(["", "rljob", "peer", "ratio", "mark"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where environments and models are kept")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="default: all that the device allows")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a small model")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    device: str = arguments.device
    wanted: Sequence[Part] = arguments.only or (PARTS if device == "cuda" else ON_CPU)
    lacking = {part: lack for part in wanted if (lack := missing(part, device, arguments.cache)) is not None}
    for part, lack in lacking.items():
        print(f"left out: {part}: {lack}", file=sys.stderr, flush=True)
    ready = [part for part in wanted if part not in lacking]
    if ready:
        measure(ready, device, arguments.cache, arguments.repetitions, arguments.results)
    sys.exit(1 if lacking else 0)


def measure(parts: Sequence[Part], device: str, cache: Path, repetitions: int, results: Path) -> None:
    """Measures and writes down what can be measured."""
    machine = Machine.here()
    model = shaped_model(cache, small=device == "cpu")
    engine = measure_engine(model, device, repetitions) if "engine" in parts else None
    learner = measure_learner(model, device, repetitions) if "learner" in parts else None
    step = measure_step(model, cache, repetitions) if "step" in parts else None
    name = "gpu" if device == "cuda" else "gpu_on_cpu"
    outcomes = {"engine": engine, "learner": learner, "step": step}
    write_results(results, name, machine, outcomes, show(engine, learner, step))


if __name__ == "__main__":
    main()
