"""A run that is rewarded by a reward model, which the example's own script trains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import Runner, metrics_of

from rljob_trainer.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward-model"


@pytest.mark.slow(
    stands_for=[
        "tests/runs/test_learning.py::test_a_run_learns_to_repeat_two_digits",
        "tests/runs/test_reward_model_processes.py::test_scores_through_the_processes",
    ]
)
def test_the_policys_score_rises_by_a_standard_deviation_in_60_steps(runner: Runner) -> None:
    assert main(["validate", str(EXAMPLE / "helpful-7b.yaml")]) == 0
    shutil.copy(EXAMPLE / "tiny.yaml", runner.folder)
    job, model, output = runner.folder / "tiny.yaml", runner.folder / "model", runner.folder / "output"
    subprocess.run([sys.executable, EXAMPLE / "make_model.py", model], check=True, timeout=300)
    assert main(["validate", str(job)]) == 0
    runner.run("run", job, "--output", output)
    records = metrics_of(output)
    assert records[-1]["step"] == 60
    first, last = records[0], records[-1]
    assert last["reward/mean"] >= first["reward/mean"] + first["reward/std"]
    # What the model likes, and nothing else than that: nines.
    rows = [json.loads(line) for line in max((output / "samples").iterdir()).read_text().splitlines()]
    nines = sum(row["response"].count("9") for row in rows) / sum(len(row["response"]) for row in rows)
    assert nines > 0.3
    assert list(json.loads((output / "reward_models.json").read_text())) == ["rewardModel"]
