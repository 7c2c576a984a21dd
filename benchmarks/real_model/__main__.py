"""Trains SmolLM2-135M-Instruct on examples/gsm8k.yaml with small-model.yaml over it; writes the curve and the figures.

    .venv/bin/python -m benchmarks.real_model

The goal: the mean format reward of the last three steps exceeds that of the first three by at least 0.2.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks.environments import DEFAULT_CACHE, ROOT
from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.real_model.model import smollm2
from benchmarks.rljob_run import Run, rljob_run
from rljob_trainer.telemetry.svg import Axes, Series, line_chart

HERE = Path(__file__).parent
JOB = ROOT / "examples" / "gsm8k.yaml"
OVERLAY = HERE / "small-model.yaml"
GOAL = 0.2


@dataclass(frozen=True, slots=True)
class Figures:
    """What the run showed."""

    steps: int
    reward: list[float]
    first_three: float
    last_three: float
    right: list[float]
    """Share of right answers, watched but not rewarded."""
    response_tokens: list[float]
    step_seconds: float
    stage_seconds: dict[str, float]
    """Median seconds a step by stage."""
    generated_tokens_per_second: float

    @property
    def rise(self) -> float:
        return self.last_three - self.first_three


def figures(run: Run) -> Figures:
    reward = run.column("reward/mean")
    stages = run.stage_seconds()
    return Figures(
        steps=len(run.rows),
        reward=reward,
        first_three=mean(reward[:3]),
        last_three=mean(reward[-3:]),
        right=run.column("reward/part/right/mean"),
        response_tokens=run.column("response/length/mean"),
        step_seconds=stages.pop("step"),
        stage_seconds=stages,
        generated_tokens_per_second=median(run.column("throughput/generated_tokens_per_second")),
    )


def show(seen: Figures) -> str:
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in seen.stage_seconds.items() if seconds >= 0.05)
    rows = [
        [str(step), f"{reward:.3f}", f"{right:.3f}", f"{length:.1f}"]
        for step, (reward, right, length) in enumerate(
            zip(seen.reward, seen.right, seen.response_tokens, strict=True), start=1
        )
    ]
    return "\n".join(
        [
            f"Format reward {seen.first_three:.3f} (first three steps) → {seen.last_three:.3f} (last three): "
            f"**+{seen.rise:.3f}** in {seen.steps} steps of {seen.step_seconds:.0f} s ({stages}).",
            "",
            "![reward by step](real_model.svg)",
            "",
            table(["step", "format reward", "right answers", "response tokens"], rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where the model is kept")
    parser.add_argument("--output", type=Path, help="where the run is kept (default: nowhere)")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of every process (default 2)")
    parser.add_argument("--steps", type=int, help="default: as small-model.yaml says")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    machine = Hardware.here()
    settings = {"model.source": smollm2(arguments.cache)}
    with tempfile.TemporaryDirectory() as temporary:
        output = arguments.output or Path(temporary) / "run"
        run = rljob_run(
            JOB, output, overlays=[OVERLAY], steps=arguments.steps, threads=arguments.threads, settings=settings
        )
    seen = figures(run)
    write_results(arguments.results, "real_model", machine, seen, show(seen))
    steps = list(range(1, seen.steps + 1))
    chart = line_chart(
        [Series("format reward", steps, seen.reward), Series("right answers", steps, seen.right)],
        Axes(from_zero=True, percent=True),
        standalone=True,
    )
    (arguments.results / "real_model.svg").write_text(chart)
    if seen.rise < GOAL:
        raise SystemExit(f"the format reward rose by {seen.rise:.3f}, the goal is {GOAL}")


if __name__ == "__main__":
    main()
