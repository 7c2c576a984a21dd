"""One run of a study: its job, the whole `rljob run`, and what is kept of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.environments import ROOT, peer_environment
from benchmarks.learning.methods import SAMPLERS, Case
from benchmarks.rljob_run import RunFailedError, read_run

Task = Literal["copy", "addition"]
DIGITS: dict[Task, int] = {"copy": 3, "addition": 2}
STEPS: dict[Task, int] = {"copy": 200, "addition": 1500}
"""A run's length; the learning rate falls over it."""
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
SEQUENCES = 512
"""What is called a step in the results, whatever the number of samples of a prompt and the batch."""
MINI_BATCHES = 4
"""Optimizer steps for so many sequences, in every method."""
LEARNING_RATE = 2e-3
"""The quick start's 5e-3 is too much for losses that bound no step: CISPO then stayed at 0.86, SAPO at 0.65."""
GOAL = 0.9
ENOUGH = 0.98
"""Score of one step at which a run is over."""
WINDOW = 5
"""Steps that a training reward is averaged over."""
EVERY = 5
"""Steps from one validation to the next, where the engines are wrong and training rewards say little."""
ACCURACY = "validation/held-out/mean@1"


@dataclass(frozen=True, slots=True)
class Learned:
    """What a run showed.

    ``scores``: of the methods, the mean share of right characters in each 512 sequences; of the corrections, the share
    of exact answers on held-out problems that right engines give, greedily, every five steps. ``ages``: of the samples,
    in versions, for each 512 sequences.
    """

    study: str
    name: str
    sampler: str
    seed: int
    task: str
    scores: list[float]
    every: int
    """Steps from one score to the next."""
    ages: list[float]
    reached: int | None
    """The first step with a score of 0.9 or more, of the methods as the mean of the last five; None: never."""
    final: float
    """The last such score."""
    seconds: float
    """Of training, without start and end of the command."""
    failed: str = ""
    """The end of what was printed, if the run failed."""


def job_of(case: Case, task: Task) -> dict[str, Any]:
    """The quick start's model, reward and, but for its rate, optimizer. Ends early far above the goal."""
    method, sampler = case.method, SAMPLERS[case.sampler]
    mini = SEQUENCES // MINI_BATCHES // method.samples
    groups, steps = mini * method.mini_batches, STEPS[task] * MINI_BATCHES // method.mini_batches
    job: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    spec = job["spec"]
    copied = {"type": "exactMatch", "name": "copied", "params": {"partial": True}}
    form = {"type": "pattern", "name": "form", "weight": 0.2, "pattern": f"^[0-9]{{1,{DIGITS[task] + 1}}}$"}
    spec["seed"] = spec["model"]["random"]["seed"] = case.seed
    spec["data"]["train"] = {"task": {"type": task, "digits": DIGITS[task]}}
    if case.study == "corrections":
        spec["data"]["validation"][0]["task"] = spec["data"]["train"]["task"]
        spec["validation"] = {"every": EVERY}
    else:
        del spec["data"]["validation"], spec["validation"]
    spec["reward"] = {"functions": [copied, form] if method.two_rewards else [copied]}
    spec["algorithm"] = case.algorithm
    spec["batch"] = {"samplesPerPrompt": method.samples, "miniBatchGroups": mini}
    if sampler.age:
        staleness = {"maxAge": sampler.age}
        spec["pipeline"] = {"mode": "fullyAsync", "requireBatches": method.mini_batches, "staleness": staleness}
    else:
        spec["batch"]["groups"] = groups
    spec["trainer"]["optimizer"]["learningRate"] = LEARNING_RATE
    spec["checkpoint"] = {"everySteps": 0}
    spec["logging"] = {"tensorboard": False, "samplesEvery": 0}
    spec["stop"] = {"steps": steps} | ({} if method.two_rewards else {"reward": ENOUGH})
    return job


def run(case: Case, task: Task, threads: int) -> Learned:
    """The whole command. A run that fails is a result, too."""
    with tempfile.TemporaryDirectory() as folder:
        job, output = Path(folder) / "job.yaml", Path(folder) / "output"
        job.write_text(yaml.safe_dump(job_of(case, task)))
        command = [sys.executable, "-m", "benchmarks.learning.sampler", "run", str(job), "--output", str(output)]
        said = json.dumps(SAMPLERS[case.sampler].said)
        started = time.perf_counter()
        ended = subprocess.run(
            command, cwd=ROOT, env=peer_environment(threads, WRONG_SAMPLER=said), capture_output=True, text=True
        )
        rows = read_run(output).rows if (output / "metrics.jsonl").exists() else []
        if ended.returncode not in (0, 1, 65, 75) or (ended.returncode and not rows):
            printed = "\n".join((ended.stdout + ended.stderr).splitlines()[-30:])
            raise RunFailedError(f"{case.study}, {case.name}, {case.sampler}, seed {case.seed}:\n{printed}")
        seconds = rows[-1]["progress/seconds"] if rows else time.perf_counter() - started
    batches = MINI_BATCHES // case.method.mini_batches
    if case.study == "corrections":
        scores, every, window = [row[ACCURACY] for row in rows if ACCURACY in row], EVERY, 1
    else:
        scores = binned([row.get("reward/part/copied/mean", row["reward/mean"]) for row in rows], batches)
        every, window = 1, WINDOW
    means = [sum(scores[i - window : i]) / window for i in range(window, len(scores) + 1)]
    reached = next((i + window for i, mean in enumerate(means) if mean >= GOAL), None)
    return Learned(
        study=case.study,
        name=case.name,
        sampler=case.sampler,
        seed=case.seed,
        task=task,
        scores=scores,
        every=every,
        ages=binned([row.get("age/mean", 0.0) for row in rows], batches),
        reached=None if reached is None else reached * every,
        final=means[-1] if means else 0.0,
        seconds=seconds,
        failed=ended.stdout.splitlines()[-1] if ended.returncode else "",
    )


def binned(values: Sequence[float], size: int) -> list[float]:
    """Means of ``size`` values each; what is left over at the end is left out."""
    return [sum(values[i : i + size]) / size for i in range(0, len(values) - size + 1, size)]


def file_of(case: Case, task: Task, folder: Path) -> Path:
    """Where a run's result lies; what is there is not run again."""
    words = "-".join((task, case.study, case.sampler, case.name, f"seed-{case.seed}"))
    return folder / (re.sub(r"[^A-Za-z0-9_.-]+", "_", words) + ".json")


def kept(case: Case, task: Task, folder: Path) -> Learned | None:
    path = file_of(case, task, folder)
    return Learned(**json.loads(path.read_text())) if path.exists() else None


def keep(learned: Learned, case: Case, task: Task, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rounded = asdict(learned) | {
        name: [round(value, 4) for value in getattr(learned, name)] for name in ("scores", "ages")
    }
    file_of(case, task, folder).write_text(json.dumps(rounded) + "\n")
