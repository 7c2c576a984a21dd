"""Does a known result come out on one GPU of 80 GB? An hour; models from a folder, no network: `make gpu-accept`.

.venv/bin/python -m benchmarks.gpu.accept --models FOLDER

FOLDER holds `Qwen2.5-0.5B-Instruct` and `Qwen3-0.6B` as Hugging Face folders. PPO with examples/gsm8k.yaml, the setting
of verl's published example, has to end at 56.7 +- 1.5 % of GSM8K's test set. GRPO at Qwen3-0.6B gives tokens/s.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environments import ROOT
from benchmarks.gpu.figures import Figure
from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.rljob_run import rljob_run

HERE = Path(__file__).parent
EXAMPLE = ROOT / "examples" / "gsm8k.yaml"
PUBLISHED, SPREAD = 0.567, 0.015
PPO: Mapping[str, Any] = {
    "placement": "colocated",
    "rollout.gpusPerReplica": "null",
    "rollout.engineArgs.gpu_memory_utilization": 0.4,
}
"""The example has a GPU for the engine and one for the learner; on one the result is the same."""
GRPO: Mapping[str, Any] = {
    "data.train.source": ROOT / "examples" / "data" / "gsm8k" / "train.jsonl",
    "data.maxPromptTokens": 512,
}
WARM_UP, STEPS = 2, 12
QWEN25, QWEN3 = "Qwen2.5-0.5B-Instruct", "Qwen3-0.6B"


def ppo(models: Path, folder: Path) -> Figure:
    """The last validation on GSM8K's test set."""
    settings = {"model.source": models / QWEN25, **PPO}
    run = rljob_run(EXAMPLE, folder / "ppo", threads=4, settings=settings)
    score = run.column("validation/gsm8k-test/mean@1")[-1]
    met = abs(score - PUBLISHED) <= SPREAD
    return Figure("PPO on GSM8K, share of the test set", score, "", f"{PUBLISHED} +- {SPREAD}", met)


def grpo(models: Path, folder: Path) -> Figure:
    """Tokens (prompts and responses) a second of the whole step."""
    settings = {"model.source": models / QWEN3, **GRPO}
    run = rljob_run(HERE / "job.yaml", folder / "grpo", steps=STEPS, threads=4, settings=settings)
    rates = run.column("throughput/tokens_per_second")[WARM_UP:]
    return Figure("GRPO at Qwen3-0.6B", median(rates), "tokens/s")


def lacking(models: Path) -> list[str]:
    """What of the models is missing, in words."""
    return [
        f"{models / name} has no config.json"
        for name in (QWEN25, QWEN3)
        if not (models / name / "config.json").exists()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="the folder with both models")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    asked = parser.parse_args()
    models = asked.models.resolve()
    if lacks := lacking(models):
        sys.exit(f"{'; '.join(lacks)}: download both models from their hub into this folder, each under its name")
    machine, figures = Hardware.here(), list[Figure]()
    with tempfile.TemporaryDirectory() as folder:
        for measure in (grpo, ppo):
            figures.append(measure(models, Path(folder)))
            rows = [[f.name, f"{f.value:.4g} {f.unit}".rstrip(), f.goal, {True: "yes", False: "**no**"}.get(f.met, "")]  # type: ignore[arg-type]
                    for f in figures]  # fmt: skip
            write_results(asked.results, "accept", machine, figures, table(["figure", "value", "goal", "met"], rows))
    sys.exit(0 if all(figure.met is not False for figure in figures) else 1)


if __name__ == "__main__":
    main()
