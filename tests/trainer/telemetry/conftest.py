"""A run that never was: an output folder as the driver would leave it, written by the real sinks."""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_trainer.telemetry.run_folder import SampleRow
from rljob_trainer.telemetry.sinks import open_sinks
from rljob_trainer.telemetry.summary import AgeCounts, Machine, Outcome, Summary, ValidationHistory

HOSTILE = "<script>alert('x')</script><img src=https://evil.example/x onerror=alert(1)> \"&amp; \x00 end"

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: quickstart}
spec:
  algorithm: {preset: ppo}
  # <script>alert('job')</script>
"""


def step_metrics(step: int, steps: int, noise: random.Random) -> dict[str, float]:
    """One step of a run that learns: an S-curve with noise."""
    skill = 1 / (1 + math.exp(-(step / steps - 0.4) * 12))
    generate, reward, values = 0.32 - 0.1 * skill + abs(noise.gauss(0, 0.02)), 0.02, 0.03
    critic, actor, publish = 0.08 + abs(noise.gauss(0, 0.004)), 0.12 + abs(noise.gauss(0, 0.006)), 0.03
    tokens = 512 * (22 - 6 * skill)
    whole = generate + reward + values + critic + actor + publish + 0.04
    metrics = {
        "reward/mean": skill * 0.95 + noise.gauss(0, 0.03),
        "reward/std": 0.4 * math.sqrt(skill * (1 - skill) + 0.01),
        "reward/no_signal_ratio": abs(2 * skill - 1) ** 2 * 0.9,
        "response/length/mean": 12 - 6 * skill + noise.gauss(0, 0.3),
        "response/length/max": 16.0 if skill < 0.8 else 9.0,
        "response/length/clip_ratio": max(0.0, 0.3 * (1 - skill) + noise.gauss(0, 0.01)),
        "actor/entropy": 2.2 * (1 - 0.9 * skill) + noise.gauss(0, 0.03),
        "actor/clip_fraction": abs(0.06 * skill * (1 - skill) * 4 + noise.gauss(0, 0.004)),
        "actor/dual_clip_fraction": 0.0,
        "actor/approx_kl": abs(noise.gauss(0.004, 0.001)),
        "actor/grad_norm": 0.4 + abs(noise.gauss(0, 0.2)) + (30 if step == steps // 2 else 0),
        "actor/learning_rate": 5e-4 * min(1.0, step / 10),
        "critic/grad_norm": 1.1 + abs(noise.gauss(0, 0.2)),
        "critic/value_loss": 0.2 * (1 - skill) + 0.02 + abs(noise.gauss(0, 0.004)),
        "critic/explained_variance": min(0.97, skill + noise.gauss(0, 0.03)),
        "kl/reference": 0.8 * skill + abs(noise.gauss(0, 0.01)),
        "mismatch/log_prob/mean": abs(noise.gauss(3e-6, 5e-7)),
        "throughput/tokens_per_second": tokens / whole,
        "throughput/generated_tokens_per_second": 0.5 * tokens / whole,
        "timing/step_seconds": whole,
        "timing/generate_seconds": generate,
        "timing/reward_seconds": reward,
        "timing/values_seconds": values,
        "timing/update_seconds": critic + actor,
        "timing/update_critic_seconds": critic,
        "timing/update_actor_seconds": actor,
        "timing/publish_seconds": publish,
    }
    if step % 20 == 0:
        metrics["validation/addition/mean@4"] = min(1.0, skill)
        metrics["validation/addition/best@4/mean"] = min(1.0, skill**0.5)
        metrics["validation/addition/maj@4/mean"] = min(1.0, skill**0.7)
        metrics["validation/mean"] = min(1.0, skill)
        metrics["timing/validation_seconds"] = 0.1
        metrics["timing/step_seconds"] += 0.1
    return metrics


def samples_at(step: int, steps: int) -> list[SampleRow]:
    rows = []
    for a, b in ((12, 34), (55, 55), (7, 90), (99, 1)):
        right = str(a + b)
        said = right if step >= steps else f"{a}{b}+={HOSTILE}" if a == 12 else f"{b % 10}{a}+1=9)("
        rows.append(
            SampleRow(
                source="addition",
                prompt=f"What is {a} + {b}?",
                response=said,
                answer=right,
                score=float(said == right),
                correct=said == right,
                finish="stop" if said == right else "length",
                tokens=len(said),
            )
        )
    return rows


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run(steps=200, outcome="succeeded")`` writes a run's folder; ``outcome=None`` leaves the summary out."""

    def make(steps: int = 200, outcome: Outcome | None = "succeeded", folder: Path = tmp_path / "quickstart") -> Path:
        noise = random.Random(1)
        history = ValidationHistory()
        seconds = 0.0
        with open_sinks(folder, tensorboard=False) as sinks:
            first = {"validation/addition/mean@4": 0.01, "validation/mean": 0.01}
            sinks.step(0, first)
            history.add(0, first)
            sinks.samples(0, samples_at(0, steps))
            for step in range(1, steps + 1):
                metrics = step_metrics(step, steps, noise)
                seconds += metrics["timing/step_seconds"]
                sinks.step(step, metrics)
                history.add(step, metrics)
            sinks.samples(steps, samples_at(steps, steps))
        (folder / "job.yaml").write_text(JOB)
        if outcome is not None:
            end = datetime.datetime(2026, 11, 21, 6, 0, tzinfo=datetime.UTC)
            Summary(
                outcome=outcome,
                reason="all steps are done" if outcome == "succeeded" else "engine 0 died: <b>out of memory</b>",
                job="quickstart",
                algorithm="ppo",
                model="llama, 0.34 M parameters",
                started_at=end - datetime.timedelta(seconds=seconds),
                ended_at=end,
                seconds=seconds,
                steps=steps,
                total_steps=steps,
                version=steps,
                samples=512 * steps,
                prompt_tokens=4000 * steps,
                response_tokens=5000 * steps,
                ages=AgeCounts(oldest={0: 100, 2: 300}, tokens={0: 4000, 1: 4000, 2: 2000}),
                seconds_by_stage={"generate": 0.5 * seconds, "update_actor": 0.3 * seconds, "step": 0.2 * seconds},
                validation=history.by_source(),
                checkpoint="checkpoints/step-200",
                packages={"python": "3.11.2", "torch": "2.13.0"},
                machine=Machine(platform="Linux x86_64", processor="A processor", cores=2, memory_gigabytes=8.0),
            ).write(folder)
        return folder

    return make
