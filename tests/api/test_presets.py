"""Presets and resolution: job file, then preset, then the method's default; nothing is left open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api import ResolvedJob, RLJob, check, load_jobs, resolve
from rljob_api.correction_presets import CORRECTION_PRESETS
from rljob_api.methods import ESTIMATORS, POLICY_LOSSES
from rljob_api.presets import PRESETS
from rljob_api.spec.algorithm import (
    CorrectionPresetName,
    CorrectionWeights,
    Estimator,
    PolicyLossType,
    Preset,
    RejectionSpec,
)

Make = Callable[..., RLJob]
PRESET_NAMES: list[Preset] = list(PRESETS)


def test_every_name_of_the_schema_has_its_entry() -> None:
    assert set(PRESETS) == set(get_args(Preset))
    assert set(ESTIMATORS) == set(get_args(Estimator))
    assert set(POLICY_LOSSES) == set(get_args(PolicyLossType))


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_preset_resolves_and_survives_a_round_trip(job: Make, name: str) -> None:
    resolved = resolve(job(f"spec: {{algorithm: {{preset: {name}}}}}"))
    text = yaml.safe_dump(resolved.document())
    (again,) = load_jobs(text)
    assert resolve(again) == resolved
    assert resolve(again).document() == resolved.document()


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_preset_says_where_it_comes_from(name: Preset) -> None:
    assert "arXiv" in PRESETS[name].source
    assert PRESETS[name].algorithm.preset == name
    assert PRESETS[name].algorithm.advantage.estimator is not None
    assert PRESETS[name].algorithm.policy_loss.type is not None
    assert PRESETS[name].algorithm.aggregation is not None


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_preset_names_only_parameters_that_its_methods_take(name: Preset) -> None:
    algorithm = PRESETS[name].algorithm
    for model, chooser, methods in (
        (algorithm.advantage, "estimator", ESTIMATORS),
        (algorithm.policy_loss, "type", POLICY_LOSSES),
    ):
        given_names = {key for key, value in dict(model).items() if value is not None} - {chooser}
        table: Mapping[Any, Any] = methods
        assert given_names <= set(table[getattr(model, chooser)].parameters)


@pytest.mark.parametrize(
    ("name", "advantage", "loss", "aggregation"),
    [
        # arXiv 1707.06347, 1506.02438 with lambda 1 for one reward at the end; 1912.09729
        ("ppo", {"gamma": 1, "lambda_": 1, "whiten": True, "whiten_rewards": False},
         {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3},
         "tokenMean"),
        ("grpo", {"normalize_by_std": True, "epsilon": 1e-6}, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
         "seqMeanTokenMean"),
        ("dr_grpo", {"normalize_by_std": False, "epsilon": 1e-6},
         {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}, "seqMeanTokenSumNorm"),
        ("dapo", {"normalize_by_std": True, "epsilon": 1e-6}, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10},
         "tokenMean"),
        ("gspo", {"normalize_by_std": True, "epsilon": 1e-6}, {"clip_low": 3e-4, "clip_high": 4e-4},
         "seqMeanTokenMean"),
        ("sapo", {"normalize_by_std": True, "epsilon": 1e-6}, {"tau_positive": 1.0, "tau_negative": 1.05},
         "seqMeanTokenMean"),
        ("gmpo", {"normalize_by_std": True, "epsilon": 1e-6}, {"clip_low": 0.4, "clip_high": 0.4}, "seqMeanTokenMean"),
        ("rloo", {}, {}, "seqMeanTokenSum"),
        ("remax", {}, {}, "seqMeanTokenSum"),
        ("opo", {}, {}, "tokenMean"),
        ("gpg", {}, {}, "tokenMean"),
    ],
)  # fmt: skip
def test_published_settings(
    job: Make, name: str, advantage: dict[str, Any], loss: dict[str, Any], aggregation: str
) -> None:
    algorithm = resolve(job(f"spec: {{algorithm: {{preset: {name}}}}}")).spec.algorithm
    assert algorithm.advantage.params == advantage
    assert algorithm.policy_loss.params == loss
    assert algorithm.aggregation == aggregation


def test_reference_and_critic_follow_from_the_settings(job: Make) -> None:
    needs = {
        name: (a.needs_reference, a.needs_critic)
        for name in PRESETS
        for a in [resolve(job(f"spec: {{algorithm: {{preset: {name}}}}}")).spec.algorithm]
    }
    assert needs["ppo"] == (True, True)
    assert needs["grpo"] == (True, False)
    assert needs["dapo"] == (False, False)
    assert [name for name, (_, critic) in needs.items() if critic] == ["ppo"]


def test_the_job_file_goes_before_the_preset(job: Make) -> None:
    algorithm = resolve(
        job(
            "spec: {algorithm: {preset: dapo, policyLoss: {clipHigh: 0.3, dualClip: 0}, aggregation: tokenSum, "
            "kl: {inReward: {coefficient: 0.01, controller: {type: adaptive, target: 0.05}}}, entropyCoefficient: 0.1}}"
        )
    ).spec.algorithm
    assert algorithm.policy_loss.params == {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
    assert algorithm.aggregation == "tokenSum"
    assert algorithm.kl.in_reward is not None
    assert (algorithm.kl.in_reward.kind, algorithm.kl.in_reward.controller.target) == ("k1", 0.05)
    assert algorithm.entropy_coefficient == 0.1


def test_a_coefficient_of_zero_turns_a_term_off(job: Make) -> None:
    algorithm = resolve(job("spec: {algorithm: {preset: grpo, kl: {inLoss: {coefficient: 0}}}}")).spec.algorithm
    assert algorithm.kl.in_loss is None
    assert not algorithm.needs_reference


def test_another_estimator_takes_none_of_the_presets_parameters(job: Make) -> None:
    advantage = resolve(job("spec: {algorithm: {preset: dr_grpo, advantage: {estimator: grpo_passk}}}")).spec.algorithm
    assert advantage.advantage.params == {"normalize_by_std": True, "epsilon": 1e-6}


def test_another_loss_brings_its_own_aggregation(job: Make) -> None:
    algorithm = resolve(job("spec: {algorithm: {preset: dapo, policyLoss: {type: gspo}}}")).spec.algorithm
    assert algorithm.aggregation == "seqMeanTokenMean"
    assert algorithm.policy_loss.params == {"clip_low": 3e-4, "clip_high": 4e-4}


def test_the_normed_sum_is_scaled_by_the_longest_response(job: Make) -> None:
    resolved = resolve(job("spec: {algorithm: {preset: dr_grpo}, rollout: {maxResponseTokens: 300}}"))
    assert resolved.spec.algorithm.aggregation_params == {"scale": 300.0}


def test_batch_numbers_of_the_three_modes(job: Make) -> None:
    sync = resolve(job("spec: {batch: {groups: 12, miniBatchGroups: 4}}")).spec
    assert (sync.batch.groups, sync.pipeline.require_batches, sync.pipeline.staleness.max_age) == (12, 3, 0)
    ahead = resolve(job("spec: {pipeline: {mode: oneStepOff}}")).spec
    assert (ahead.batch.groups, ahead.batch.mini_batch_groups, ahead.pipeline.staleness.max_age) == (128, 128, 1)
    stream = resolve(
        job("spec: {pipeline: {mode: fullyAsync, syncEvery: 4, requireBatches: 4}, batch: {miniBatchGroups: 32}}")
    ).spec
    assert stream.batch.groups == 512
    assert stream.algorithm.rollout_correction.mode == "bypass"


def test_placement_and_pool_sizes(job: Make) -> None:
    shared = resolve(job("spec: {trainer: {gpusPerReplica: 8}, rollout: {parallelism: {tensor: 2}}}")).spec
    assert (shared.placement, shared.rollout.replicas) == ("colocated", 4)
    apart = resolve(job("spec: {rollout: {replicas: 3}}")).spec
    assert (apart.placement, apart.rollout.min_replicas, apart.rollout.max_replicas) == ("separate", 3, 3)
    assert resolve(job("spec: {pipeline: {mode: oneStepOff}}")).spec.placement == "separate"


def test_shards_take_the_ranks_that_remain(job: Make) -> None:
    trainer = resolve(
        job("spec: {trainer: {replicas: 4, gpusPerReplica: 8, parallelism: {replicate: 2}}}")
    ).spec.trainer
    assert (trainer.ranks, trainer.parallelism.shard, trainer.parallelism.ranks) == (32, 16, 32)
    assert resolve(job("spec: {trainer: {replicas: 3}}")).spec.trainer.ranks == 3


def test_the_critics_optimizer_is_the_actors_with_its_own_settings(job: Make) -> None:
    spec = resolve(
        job(
            "spec: {algorithm: {preset: ppo, critic: {valueClip: 0}}, "
            "trainer: {optimizer: {learningRate: 1e-6, weightDecay: 0.1, betas: [0.9, 0.95]}}}"
        )
    ).spec
    assert spec.algorithm.critic is not None
    assert spec.algorithm.critic.value_clip is None
    optimizer = spec.trainer.critic_optimizer(spec.algorithm.critic)
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.betas) == (1e-5, 0.1, (0.9, 0.95))


def test_training_data_is_a_list_however_it_is_written(job: Make) -> None:
    assert [part.label for part in resolve(job()).spec.data.train.sources] == ["train"]
    parts = "spec: {data: {train: {source: null, parts: [{name: a, source: x}, {name: b, task: {type: copy}}]}}}"
    assert [part.label for part in job(parts).spec.data.train.sources] == ["a", "b"]


@pytest.mark.parametrize(
    ("source", "label"),
    [
        ("data/gsm8k/train.jsonl", "train"),
        ("hf://openai/gsm8k:main", "gsm8k"),
        ("openai/gsm8k", "gsm8k"),
        ("data/sets/", "sets"),
    ],
)
def test_sources_have_labels(job: Make, source: str, label: str) -> None:
    assert job(f"spec: {{data: {{train: {{source: '{source}'}}}}}}").spec.data.train.sources[0].label == label


@settings(deadline=None)  # a busy machine is no failure
@given(
    preset=st.sampled_from(PRESET_NAMES),
    estimator=st.none() | st.sampled_from(sorted(ESTIMATORS)),
    loss=st.none() | st.sampled_from(sorted(POLICY_LOSSES)),
    mode=st.sampled_from(["sync", "oneStepOff", "fullyAsync"]),
    kl=st.none() | st.sampled_from([0, 0.01]),
    replicas=st.none() | st.integers(1, 3),
)
def test_any_valid_combination_resolves_and_round_trips(
    preset: str, estimator: str | None, loss: str | None, mode: str, kl: float | None, replicas: int | None
) -> None:
    data: dict[str, Any] = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "any"},
        "spec": {
            "model": {"source": "org/model"},
            "data": {"train": {"source": "train.jsonl"}, "answer": "answer"},
            "reward": {
                "functions": [{"type": "gsm8k"}, {"type": "length"}],
                "clip": {"low": 0, "high": 1} if estimator == "maxrl" else None,
            },
            "algorithm": {
                "preset": preset,
                "advantage": {"estimator": estimator},
                "policyLoss": {"type": loss},
                "kl": {
                    "inLoss": None if kl is None else {"coefficient": kl},
                    "inReward": {"coefficient": 0} if estimator in ("maxrl", "gdpo") else None,
                },
            },
            "batch": {"samplesPerPrompt": 4},
            "pipeline": {"mode": mode},
            "rollout": {"replicas": replicas},
        },
    }
    made, violations = check(data)
    assert made is not None
    assert violations == []
    resolved = resolve(made)
    assert isinstance(resolved, ResolvedJob)
    again, violations = check(resolved.document())
    assert violations == []
    assert again is not None
    assert resolve(again) == resolved


def with_correction(**correction: Any) -> ResolvedJob:
    named = CORRECTION_PRESETS[correction["preset"]]
    loss = {} if named.policy_loss is None else {"policyLoss": {"type": named.policy_loss}}
    data: dict[str, Any] = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "any"},
        "spec": {
            "model": {"source": "org/model"},
            "data": {"train": {"source": "train.jsonl"}, "answer": "answer"},
            "reward": {"functions": [{"type": "gsm8k"}]},
            "algorithm": {"preset": "grpo", "rolloutCorrection": correction, **loss},
        },
    }
    made, violations = check(data)
    assert made is not None
    assert violations == []
    return resolve(made)


def test_every_correction_preset_resolves_to_its_mode() -> None:
    assert set(CORRECTION_PRESETS) == set(get_args(CorrectionPresetName))
    for name, preset in CORRECTION_PRESETS.items():
        assert name == "disabled" or name.startswith(preset.mode)
        resolved = with_correction(preset=name).spec.algorithm.rollout_correction
        assert (resolved.mode, resolved.weights, resolved.rejection) == (preset.mode, preset.weights, preset.rejection)


def test_published_numbers_of_correction_presets() -> None:
    """As documented for the systems they come from."""
    presets = CORRECTION_PRESETS
    assert presets["decoupled_token_is"].weights == CorrectionWeights(level="token", high=2.0)
    assert presets["decoupled_token_icepop"].weights == CorrectionWeights(level="token", low=0.5, high=5.0)
    geometric = RejectionSpec(statistic="k1", over="sequenceMean", low=0.999, high=1.001)
    assert presets["decoupled_geo_rs"].rejection == (geometric,)
    assert presets["decoupled_k3_rs"].rejection == (RejectionSpec(statistic="k3", over="sequenceMean", high=0.01),)
    assert presets["bypass_pg_is"].weights == CorrectionWeights(level="sequence", high=2.0)
    assert len(presets) == 19


def test_the_jobs_own_correction_goes_before_the_preset() -> None:
    own = {"preset": "decoupled_k3_rs_token_tis", "weights": {"high": 3.0}}
    resolved = with_correction(**own).spec.algorithm.rollout_correction
    assert resolved.weights is not None
    assert resolved.weights.high == 3.0
    assert resolved.rejection == CORRECTION_PRESETS["decoupled_k3_rs_token_tis"].rejection
