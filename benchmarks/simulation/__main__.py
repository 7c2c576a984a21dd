"""The simulator against the published 7B tables, the best split of 128 GPUs, and how fast it simulates.

.venv/bin/python -m benchmarks.simulation
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.simulation.published import (
    ASYNC_LIMIT,
    ASYNC_UPDATE,
    STALENESS,
    best_split,
    budget,
    comparisons,
    exponential,
    fitted_speed,
    setup,
    shapes,
    staleness,
)
from rljob_trainer.simulation.engine import DecodeSpeed
from rljob_trainer.simulation.forecast import simulate

HERE = Path(__file__).parent
GOAL_SECONDS = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    machine = Hardware.here()
    lengths = exponential(ASYNC_LIMIT)
    speed = fitted_speed(lengths)
    rows = list(comparisons(lengths, speed))
    splits = best_split(lengths, speed, 0.5)
    engines, best = min(splits, key=lambda split: split[1].step_seconds)
    colocated, even = rows[0].forecast.step_seconds, staleness(0.5, lengths, speed).step_seconds
    sensitivity = []
    for shape in shapes():
        own = fitted_speed(shape)
        found = [staleness(fraction, shape, own).step_seconds / STALENESS[fraction] - 1 for fraction in STALENESS]
        sensitivity.append([shape.describe(), f"{own.saturation:.0f}", *(f"{value:+.0%}" for value in found)])
    began = time.perf_counter()
    simulate(setup(budget(0.5), lengths, 128, DecodeSpeed(speed.alone, speed.saturation), ASYNC_UPDATE / 2), 400)
    seconds = time.perf_counter() - began
    text = "\n".join(
        [
            "# Simulated against published",
            "",
            f"Responses: {lengths.describe()}. Fitted: saturation {speed.saturation:.0f} sequences (staleness 0, a row "
            "that proves nothing). The other rows are predictions.",
            "",
            table(
                ["", "published s", "simulated s", "deviation", "trainer idle", "engines idle", "age", "partial"],
                [
                    [
                        row.name + (" (fitted)" if row.fitted else ""),
                        f"{row.published:.1f}",
                        f"{row.forecast.step_seconds:.1f}",
                        f"{row.deviation:+.1%}",
                        f"{row.forecast.trainer_idle:.0%}",
                        f"{row.forecast.engines_idle:.0%}",
                        f"{row.forecast.mean_age:.2f}",
                        f"{row.forecast.partial_share:.0%}",
                    ]
                    for row in rows
                ],
            ),
            f"64 + 64 over colocated: {colocated / even:.2f} (published 2.37). Best split of 128 GPUs: "
            f"{4 * engines} + {128 - 4 * engines} with {best.step_seconds:.1f} s, {colocated / best.step_seconds:.2f} "
            f"over colocated. Limit of 64 + 64, the trainer never waiting: {ASYNC_UPDATE:.1f} s, "
            f"{colocated / ASYNC_UPDATE:.2f} over colocated.",
            "",
            table(
                ["rollout + trainer GPUs", "step s", "trainer idle", "engines idle"],
                [
                    [
                        f"{4 * e} + {128 - 4 * e}",
                        f"{f.step_seconds:.1f}",
                        f"{f.trainer_idle:.0%}",
                        f"{f.engines_idle:.0%}",
                    ]
                    for e, f in splits
                ],
            ),
            "Other tails, each with its own fit of the saturation (deviations of staleness 0, 0.1, 0.3, 0.5):",
            "",
            table(["lengths", "saturation", *(f"{fraction:g}" for fraction in STALENESS)], sensitivity),
            f"128 engines x 400 steps of 512 x 16 responses: {seconds:.1f} s (goal: under {GOAL_SECONDS:.0f} s).",
        ]
    )
    write_results(args.output, "simulation", machine, {"rows": rows, "seconds": seconds}, text)


if __name__ == "__main__":
    main()
