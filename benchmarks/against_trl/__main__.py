"""One command: environments, model, both sides in turn, the limit, the table.

.venv/bin/python -m benchmarks.against_trl                       # everything, about 25 minutes
.venv/bin/python -m benchmarks.against_trl --only grpo-16 --repetitions 2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.against_trl.limit import Limit
from benchmarks.against_trl.model import common_model
from benchmarks.against_trl.setting import Setting, read_steps
from benchmarks.environments import DEFAULT_CACHE, ROOT, peer_environment, peer_python
from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, Step, interleaved, ratios, steady, table, write_results
from benchmarks.rljob_run import rljob_run

HERE = Path(__file__).parent
SETTINGS = (
    Setting("grpo", sequences=16, steps=25, warm_up=5),
    Setting("grpo", sequences=128, steps=12, warm_up=3),
    Setting("ppo", sequences=16, steps=15, warm_up=3),
    Setting("ppo", sequences=128, steps=8, warm_up=2),
)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run of one side."""

    steps: list[Step]
    stages: dict[str, float]
    """Median seconds a step by stage, where the side tells."""


@dataclass(frozen=True, slots=True)
class PeerSide:
    """One side over all repetitions. Rates are trained and generated tokens a second, one value a repetition."""

    step_seconds: MeasuredSpread
    tokens_per_second: MeasuredSpread
    rates: list[float]
    share_of_bare_limit: float
    share_of_arithmetic_limit: float
    stages: dict[str, float]
    """Median over the repetitions of the median seconds a step by stage."""


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """One setting: both sides, the limit, and the ratio of the rates pair by pair."""

    setting: Setting
    ours: PeerSide
    theirs: PeerSide
    limit: Limit
    ratio: MeasuredSpread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where environments and models are kept")
    parser.add_argument("--only", choices=[s.name for s in SETTINGS], nargs="*", help="these settings alone")
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each side (default 5)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="OMP_NUM_THREADS of every process (default: all cores)"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where the tables are written")
    arguments = parser.parse_args()
    chosen = [setting for setting in SETTINGS if not arguments.only or setting.name in arguments.only]
    machine = Hardware.here()
    model = common_model(arguments.cache)
    peers = {name: peer_python(f"trl-{name}", arguments.cache) for name in {s.algorithm for s in chosen}}
    compared = [
        compare(setting, model, peers[setting.algorithm], arguments.repetitions, arguments.threads)
        for setting in chosen
    ]
    name = "against_trl" if arguments.threads == 1 else f"against_trl_{arguments.threads}_threads"
    results = {"threads": arguments.threads, "repetitions": arguments.repetitions, "comparisons": compared}
    write_results(arguments.results, name, machine, results, show(compared))


def compare(setting: Setting, model: Path, peer: Path, repetitions: int, threads: int) -> PeerComparison:
    """Runs both sides and the limit in turn."""
    print(f"{setting.name}: {setting.sequences} sequences a step", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ours = partial(run_ours, setting, model, Path(folder), threads)
        theirs = partial(run_theirs, setting, model, peer, Path(folder), threads)
        limit = partial(run_limit, setting, model, Path(folder), threads)
        runs = interleaved({"rljob": ours, "TRL": theirs}, repetitions)
        limits = interleaved({"limit": limit}, 3)["limit"]
    middle = sorted(limits, key=lambda measured: measured.bare)[len(limits) // 2]
    sides = {name: side(of, setting.warm_up, middle) for name, of in runs.items()}
    pairs = ratios(sides["rljob"].rates, sides["TRL"].rates)
    return PeerComparison(setting, sides["rljob"], sides["TRL"], middle, MeasuredSpread.of(pairs))


def side(runs: Sequence[MeasuredRun], warm_up: int, limit: Limit) -> PeerSide:
    """A repetition's figure is the median over its steps after warm-up."""
    counted = [steady(run.steps, warm_up) for run in runs]
    seconds = [median(step.seconds for step in steps) for steps in counted]
    rates = [median(step.rate for step in steps) for steps in counted]
    middle = median(seconds)
    stages = {name: median(run.stages[name] for run in runs) for name in runs[0].stages}
    return PeerSide(
        MeasuredSpread.of(seconds),
        MeasuredSpread.of(rates),
        rates,
        limit.bare / middle,
        limit.arithmetic / middle,
        stages,
    )


def run_ours(setting: Setting, model: Path, folder: Path, threads: int, repetition: int) -> MeasuredRun:
    settings = {
        "model.source": model,
        "data.train.source": model / "prompts.jsonl",
        "batch.groups": setting.sequences // setting.samples_per_prompt,
        "rollout.maxResponseTokens": setting.response_tokens,
        "seed": setting.seed + repetition,
    }
    job, output = HERE / f"{setting.algorithm}.yaml", folder / f"rljob-{repetition}"
    run = rljob_run(job, output, steps=setting.steps, threads=threads, settings=settings)
    return MeasuredRun(run.steps(setting.sequences, setting.epochs), run.stage_seconds(setting.warm_up))


def run_theirs(setting: Setting, model: Path, python: Path, folder: Path, threads: int, repetition: int) -> MeasuredRun:
    written = folder / f"trl-{repetition}.json"
    run_module(python, f"benchmarks.against_trl.trl_{setting.algorithm}", setting, model, written, threads)
    return MeasuredRun(read_steps(written), {})


def run_limit(setting: Setting, model: Path, folder: Path, threads: int, repetition: int) -> Limit:
    written = folder / f"limit-{repetition}.json"
    run_module(Path(sys.executable), "benchmarks.against_trl.limit", setting, model, written, threads)
    return Limit(**json.loads(written.read_text()))


def run_module(python: Path, module: str, setting: Setting, model: Path, written: Path, threads: int) -> None:
    """Runs a measuring module in a process of its own; what it prints is shown only when it fails."""
    command: list[str | Path] = [
        python,
        "-m",
        module,
        "--setting",
        setting.to_json(),
        "--model",
        model,
        "--write",
        written,
    ]
    ended = subprocess.run(command, cwd=ROOT, env=peer_environment(threads), capture_output=True, text=True)
    if ended.returncode != 0:
        sys.exit(f"{module} failed:\n{ended.stdout}\n{ended.stderr}")


def show(compared: Sequence[PeerComparison]) -> str:
    """The tables: what was measured, then how far both sides are from the limit."""
    speed = [
        [c.setting.name, f"{c.ours.step_seconds.show('.3f')}", f"{c.theirs.step_seconds.show('.3f')}",
         c.ours.tokens_per_second.show(".0f"), c.theirs.tokens_per_second.show(".0f"), f"**{c.ratio.show()}**"]
        for c in compared
    ]  # fmt: skip
    distance = [
        [c.setting.name, *(f"{part:.3f}" for part in (c.limit.decode, c.limit.score, c.limit.update, c.limit.bare)),
         f"{c.limit.arithmetic:.4f}", f"{c.ours.share_of_bare_limit:.0%}", f"{c.theirs.share_of_bare_limit:.0%}",
         f"{c.ours.share_of_arithmetic_limit:.1%}", f"{c.theirs.share_of_arithmetic_limit:.1%}"]
        for c in compared
    ]  # fmt: skip
    stages = [
        f"- {c.setting.name}: " + ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in by_size(c.ours.stages))
        for c in compared
    ]
    return "\n".join(
        [
            "Median (smallest – largest) over the repetitions; tokens are those trained plus those generated.",
            "",
            table(["setting", "rljob step s", "TRL step s", "rljob tokens/s", "TRL tokens/s", "ratio"], speed),
            "The limit: the model's own work alone, seconds a step, and the share of it that each side reaches.",
            "",
            table(
                ["setting", "decode", "score", "update", "bare", "arithmetic",
                 "rljob of bare", "TRL of bare", "rljob of arithmetic", "TRL of arithmetic"],
                distance,
            ),
            "Where our step goes, milliseconds (the step from request to published weights first):",
            "",
            *stages,
        ]
    )  # fmt: skip


def by_size(stages: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(stages.items(), key=lambda stage: -stage[1])


if __name__ == "__main__":
    main()
