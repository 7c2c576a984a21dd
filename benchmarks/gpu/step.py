"""Whole GRPO steps: of `rljob run` with engine and learner on one GPU or on two, and of TRL with vLLM on one."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.against_trl.setting import Setting, read_steps
from benchmarks.environments import ROOT, peer_environment
from benchmarks.gpu.baseline import KeptBaseline
from benchmarks.gpu.figures import Writer
from benchmarks.gpu.model import shaped_model
from benchmarks.gpu.parts import PEER
from benchmarks.measuring import Step, steady
from benchmarks.rljob_run import RLJOB, Run, read_run

JOB = Path(__file__).with_name("job.yaml")
SETTING = Setting("grpo", sequences=256, steps=4, warm_up=1, response_tokens=512)
OURS = KeptBaseline("step-colocated")
"""Our seconds a step, for the ratios."""
SEPARATE_BEFORE = KeptBaseline("step-separate")
"""The same on two GPUs."""
SEPARATE: Mapping[str, Any] = {"placement": "separate", "rollout.gpusPerReplica": 1}
GRADIENT = "actor/grad_norm"
TINY = 1e-6
"""Less is no gradient, but what rounding makes of none."""
_UTILISATION = "throughput/model_flops_utilisation/"


def measure_ours(writer: Writer, cache: Path, placement: Mapping[str, Any], name: str) -> float:
    model = shaped_model(cache)
    settings = {"model.source": model, "data.train.source": model / "prompts.jsonl", **placement}
    output = cache / "gpu-runs" / name
    run = train(output, settings)
    shutil.rmtree(output)
    seconds = _seconds(run.steps(SETTING.sequences, SETTING.epochs))
    writer.plain(f"GRPO step, {name}", seconds, "s")
    # Without a gradient each version would be the first one's weights, and one that never came would not be missed.
    writer.at_least(f"GRPO step, {name}, smallest norm of a gradient", min(run.column(GRADIENT)), TINY)
    for stage, spent in run.stage_seconds(SETTING.warm_up).items():
        writer.plain(f"GRPO step, {name}, {stage}", spent, "s")
    for column in sorted(column for column in run.rows[-1] if column.startswith(_UTILISATION)):
        used = median(run.column(column)[SETTING.warm_up :])
        writer.plain(f"GRPO step, {name}, MFU of {column.removeprefix(_UTILISATION)}", used)
    return seconds


def train(output: Path, settings: Mapping[str, Any]) -> Run:
    """`rljob run` into ``output``, which stays if the part is killed or the run fails. What it prints is the part's own
    output at once, so that a run that hangs has said where.

    Raises ``subprocess.CalledProcessError`` if the run fails.
    """
    shutil.rmtree(output, ignore_errors=True)
    print(f"the run is in {output}", flush=True)
    command = [RLJOB, "run", JOB, "--output", output, "--resume", "never", f"--steps={SETTING.steps}"]
    command += [f"--set={path}={value}" for path, value in settings.items()]
    subprocess.run(list(map(str, command)), cwd=ROOT, env=peer_environment(4), check=True)
    return read_run(output)


def colocated(writer: Writer, cache: Path) -> None:
    OURS.keep(cache, measure_ours(writer, cache, {}, "colocated"))


def deterministic(writer: Writer, cache: Path) -> None:
    seconds = measure_ours(writer, cache, {"deterministic": True}, "deterministic")
    _over(writer, "deterministic over as it is", seconds, OURS.read(cache))


def _over(writer: Writer, what: str, seconds: float, before: float | str) -> None:
    """``before``: seconds, or why there are none to divide by."""
    if isinstance(before, str):
        writer.note(before)
    else:
        writer.plain(f"GRPO step, {what}", seconds / before)


def separate(writer: Writer, cache: Path) -> None:
    SEPARATE_BEFORE.keep(cache, measure_ours(writer, cache, SEPARATE, "separate"))


def separate_deterministic(writer: Writer, cache: Path) -> None:
    seconds = measure_ours(writer, cache, {**SEPARATE, "deterministic": True}, "separate deterministic")
    _over(writer, "separate deterministic over as it is", seconds, SEPARATE_BEFORE.read(cache))


def peer(writer: Writer, cache: Path) -> None:
    python = cache / "peers" / PEER / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "steps.json")
        command = [python, "-m", "benchmarks.gpu.trl_vllm", "--setting", SETTING.to_json(),
                   "--model", shaped_model(cache), "--write", written]  # fmt: skip
        subprocess.run(list(map(str, command)), cwd=ROOT, env=peer_environment(4), check=True)
        seconds = _seconds(read_steps(written))
    writer.plain("GRPO step, TRL with vLLM", seconds, "s")
    before = OURS.read(cache)
    if isinstance(before, str):
        writer.note(before)
    else:
        writer.at_least("GRPO step, TRL's seconds over ours", seconds / before, 1.5)


def _seconds(steps: Sequence[Step]) -> float:
    return median(step.seconds for step in steady(steps, SETTING.warm_up))


MEASURES: Mapping[str, Callable[[Writer, Path], None]] = {
    "step-colocated": colocated,
    "step-separate": separate,
    "step-deterministic": deterministic,
    "step-separate-deterministic": separate_deterministic,
    "step-trl": peer,
}
