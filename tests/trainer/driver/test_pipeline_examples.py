"""The pipelines' examples: published settings, splits as overlays of one base and a small twin of every mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api import load_jobs, resolve
from rljob_api.resolved import ResolvedSpec
from rljob_trainer.cli import main
from rljob_trainer.pipeline.schedule import ScheduleSettings
from rljob_trainer.pipeline.shape import schedule_settings

EXAMPLES = Path(__file__).parents[3] / "examples"
DAPO = EXAMPLES / "fully-async-dapo-7b"
TWINS = EXAMPLES / "pipelines"
MISMATCH = "fully-async-dapo-7b/mismatch-correction"


def spec_of(*files: Path) -> ResolvedSpec:
    [job] = load_jobs(files[0], overlays=files[1:])
    return resolve(job).spec


@pytest.mark.parametrize("correction", [(), ("mismatch-correction",)], ids=["plain", "corrected"])
@pytest.mark.parametrize(
    ("split", "rollout", "trainer", "response", "fraction", "steps"),
    [
        ("4-4", 4, 4, 8192, 0.1, 100),
        ("4-12", 4, 12, 8192, 0.1, 100),
        ("8-8", 8, 8, 8192, 0.1, 100),
        ("16-16", 16, 16, 28672, 0.5, 400),
        ("32-32", 32, 32, 28672, 0.5, 400),
        ("64-64", 64, 64, 28672, 0.5, 400),
    ],
)
def test_a_split_has_the_published_settings(
    split: str, rollout: int, trainer: int, response: int, fraction: float, steps: int, correction: tuple[str, ...]
) -> None:
    files = [DAPO / f"{name}.yaml" for name in ("base", split, *correction)]
    assert main(["validate", "--schema-only", *map(str, files)]) == 0
    spec = spec_of(*files)
    assert spec.rollout.replicas * spec.rollout.gpus_per_replica == rollout
    assert spec.trainer.ranks == trainer
    assert (spec.rollout.max_response_tokens, spec.data.max_prompt_tokens) == (response, 2048)
    assert (spec.batch.samples_per_prompt, spec.batch.mini_batch_groups, spec.stop.steps) == (16, 32, steps)
    assert schedule_settings(spec) == ScheduleSettings(512, 128, 4, fraction, ordered=False)
    assert spec.algorithm.rollout_correction.mode == ("decoupled" if correction else "bypass")
    bounds = [(rule.statistic, rule.over, rule.low, rule.high) for rule in spec.algorithm.rollout_correction.rejection]
    geometric = [("k1", "sequenceMean", 0.99, 1.001), ("k2", "sequenceMax", None, 42.4)]
    assert bounds == (geometric if correction else [])
    large = steps == 400
    engine, ranks = spec.rollout.parallelism, spec.trainer.parallelism
    assert engine.tensor == (4 if large else 1)
    if large:
        # Four ranks a sequence, and a copy of the weights over eight.
        assert (ranks.context, ranks.shard * ranks.context, ranks.replicate) == (4, 8, trainer // 8)
    assert spec.validation.every == (20 if large else 10)
    the_recipes_have_in_common(spec)


def test_one_step_off_has_the_published_settings() -> None:
    spec = spec_of(EXAMPLES / "one-step-off.yaml")
    assert (spec.rollout.replicas, spec.trainer.ranks, spec.trainer.backend) == (4, 12, "fsdp2")
    assert (spec.batch.groups, spec.batch.mini_batch_groups, spec.rollout.max_response_tokens) == (512, 32, 20480)
    assert (spec.batch.samples_per_prompt, spec.stop.steps, spec.validation.every) == (16, 100, 10)
    assert schedule_settings(spec) == ScheduleSettings(512, 512, 1)
    assert spec.algorithm.rollout_correction.mode == "bypass"
    the_recipes_have_in_common(spec)


def the_recipes_have_in_common(spec: ResolvedSpec) -> None:
    """GRPO advantages, asymmetric clip, mean over tokens, no KL, no filter; a penalty for long responses."""
    loss = spec.algorithm.policy_loss
    assert (loss.type, loss.clip_low, loss.clip_high, loss.dual_clip) == ("ppoClip", 0.2, 0.28, 10.0)
    assert (spec.algorithm.aggregation, spec.algorithm.entropy_coefficient) == ("tokenMean", 0.0)
    assert spec.algorithm.advantage.estimator == "grpo"
    assert not spec.algorithm.group_filter.drop_uniform
    assert (spec.algorithm.kl.in_loss, spec.algorithm.kl.in_reward) == (None, None)
    optimizer = spec.trainer.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.weight_decay) == (1e-6, 10, 0.1)
    assert optimizer.gradient_clip == 1.0
    overlong = spec.reward.overlong
    assert overlong is not None
    assert (overlong.buffer_tokens, overlong.penalty) == (4096, 1.0)
    assert spec.rollout.sampling.temperature == 1.0
    [held_out] = spec.data.validation
    assert held_out.sampling is not None
    assert (held_out.samples_per_prompt, held_out.sampling.top_p) == (32, 0.7)


MODES = {
    "one-step-off": ScheduleSettings(256, 256, 1),
    "on-policy": ScheduleSettings(256, 256, 0, ordered=False),
    "stream": ScheduleSettings(256, 64, 0, ordered=False),
    "stale-samples": ScheduleSettings(256, 64, 2, 0.5, ordered=False),
    "partial-rollout": ScheduleSettings(256, 64, 2, 0.5, ordered=False),
}


def test_there_is_a_twin_of_every_mode() -> None:
    assert {file.stem for file in TWINS.glob("*.yaml")} == set(MODES)
    for name, shape in MODES.items():
        spec = spec_of(EXAMPLES / "quickstart.yaml", TWINS / f"{name}.yaml")
        assert schedule_settings(spec) == shape
        assert spec.pipeline.partial_rollout == ("recompute" if name == "partial-rollout" else "none")
