"""The training step asks a real learner for what a job needs, and hands it the streams that the method defines.

The learner is a ``LearnerRank`` in this process; ``Watched`` notes what passes. Expected advantages and rewards are
computed here from the scores, by the methods' definitions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from watched_step import SCORES, Watched, groups_of, spec_of

from rljob_api.correction_presets import CORRECTION_PRESETS
from rljob_api.presets import PRESETS
from rljob_api.resolved import ResolvedSpec
from rljob_api.spec.algorithm import KlLossKind, KlRewardKind
from rljob_trainer.algorithms import Correction, Weights, advantage_estimators
from rljob_trainer.episodes.episode import Group, RewardResult
from rljob_trainer.errors import DataError, EngineError, LearnerError
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import ScoreRequest, SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.models.materialise import materialise
from rljob_trainer.telemetry.catalogue import METRICS
from rljob_trainer.telemetry.names import check_all
from rljob_trainer.training.batch import layout
from rljob_trainer.training.step import TrainingStep

ALL_SCORES = [score for row in SCORES for score in row]
GREEDY = [0.0, 0.5, 1.0]
"""The score of each prompt's greedy response."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return materialise(spec_of().model, tmp_path_factory.mktemp("model") / "model").path


def step_of(
    spec: ResolvedSpec, folder: Path, *, keeps_first_weights: bool = False, learning_rate: float = 1e-6
) -> tuple[TrainingStep, Watched]:
    algorithm = spec.algorithm
    settings = LearnerSettings(
        model_path=folder,
        actor=OptimizerSettings(learning_rate=learning_rate),
        reference=algorithm.needs_reference,
        critic=None if algorithm.critic is None else LearnerSettings(model_path=folder).actor,
    )
    learner = Watched(Fsdp2().start(settings))
    step = TrainingStep(
        algorithm,
        spec.batch,
        learner,
        temperature=1.0,
        seed=0,
        keeps_first_weights=keeps_first_weights,  # type: ignore[arg-type]
        reward=spec.reward,
    )
    return step, learner


def per_token(values: Sequence[float], groups: Sequence[Group]) -> list[float]:
    lengths = [len(leaf.tokens) for g in groups for leaf in g.leaves]
    return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]


NO_KL = {"inLoss": {"coefficient": 0}, "inReward": {"coefficient": 0}}


async def test_one_update_on_policy_needs_no_forward_pass_before_it(folder: Path) -> None:
    step, learner = step_of(spec_of(kl=NO_KL), folder)
    await step.run(groups_of(SCORES), number=1, version=0)
    assert learner.scored == []
    assert learner.updates[0][0].old_log_probs is None


@pytest.mark.parametrize("mode", ["none", "bypass"])
async def test_every_update_compares_trainer_and_engine(folder: Path, mode: str) -> None:
    """Without a forward pass of its own: the first one of the update tells. Tokens of older weights do not count."""
    step, learner = step_of(spec_of(kl=NO_KL, rolloutCorrection={"mode": mode}), folder)
    groups = groups_of(SCORES, version=4)
    for leaf in groups[1].leaves:
        leaf.tokens.versions[:] = 3
    batch = layout(groups).sequences
    trainer = (await learner.score(batch, ScoreRequest(log_probs=True))).log_probs
    metrics = (await step.run(groups, number=1, version=4)).metrics
    assert trainer is not None
    assert batch.rollout_log_probs is not None
    fresh = np.concatenate([leaf.tokens.versions for g in groups for leaf in g.leaves]) == 4
    gap = np.abs(trainer - batch.rollout_log_probs)[fresh]
    assert learner.scored == [{"log_probs"}]  # that of this test
    assert metrics["mismatch/tokens"] == fresh.sum()
    assert metrics["mismatch/log_prob/mean"] == pytest.approx(gap.mean(), rel=1e-4)
    assert metrics["mismatch/log_prob/max"] == pytest.approx(gap.max(), rel=1e-4)


async def test_of_several_mini_batches_the_first_is_compared(folder: Path) -> None:
    spec = spec_of(kl=NO_KL, rolloutCorrection={"mode": "bypass"})
    spec = spec.model_copy(update={"batch": spec.batch.model_copy(update={"mini_batch_groups": 1})})
    step, learner = step_of(spec, folder)
    groups = groups_of(SCORES)
    metrics = (await step.run(groups, number=1, version=0)).metrics
    assert metrics["mismatch/tokens"] == groups[0].response_tokens
    first = learner.results[0].first_log_probs
    assert first is not None
    seen = np.concatenate([leaf.tokens.log_probs for leaf in groups[0].leaves])
    expected = (seen - first[: len(seen)]).mean()
    assert metrics["rollout_correction/kl"] == pytest.approx(expected, rel=1e-4)


async def test_several_updates_are_anchored_at_the_policy_before_the_first(folder: Path) -> None:
    spec = spec_of(kl=NO_KL)
    spec = spec.model_copy(update={"batch": spec.batch.model_copy(update={"epochs": 2, "mini_batch_groups": 1})})
    step, learner = step_of(spec, folder)
    groups = groups_of(SCORES)
    metrics = (await step.run(groups, number=1, version=0)).metrics
    assert learner.scored == [{"log_probs"}]
    batch, _, mini_batches, _, _ = learner.updates[0]
    assert batch.old_log_probs is not None
    assert mini_batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] * 2
    assert metrics["actor/steps"] == 6
    assert "mismatch/log_prob/mean" in metrics


async def test_bypass_takes_the_engines_log_probs(folder: Path) -> None:
    step, learner = step_of(spec_of(kl=NO_KL, rolloutCorrection={"mode": "bypass"}), folder)
    groups = groups_of(SCORES)
    await step.run(groups, number=1, version=0)
    assert learner.scored == []
    sampled = np.concatenate([leaf.tokens.log_probs for g in groups for leaf in g.leaves])
    np.testing.assert_array_equal(learner.updates[0][0].old_log_probs, sampled)


async def test_decoupled_corrects_what_engine_and_trainer_disagree_about(folder: Path) -> None:
    correction = {"mode": "decoupled", "weights": {"level": "token", "high": 1.05}}
    step, learner = step_of(spec_of(kl=NO_KL, rolloutCorrection=correction), folder)
    metrics = (await step.run(groups_of(SCORES), number=1, version=0)).metrics
    batch = learner.updates[0][0]
    expected = np.minimum(np.exp(batch.old_log_probs - batch.rollout_log_probs), 1.05)
    np.testing.assert_allclose(batch.weights, expected, rtol=1e-5)
    assert metrics["rollout_correction/weight/max"] == pytest.approx(1.05)


async def test_an_interpolated_anchor_needs_no_forward_pass_and_one_of_a_version_ago_is_the_engine_s(
    folder: Path,
) -> None:
    correction = {"mode": "decoupled", "proximal": "interpolated", "weights": {"high": 3}}
    step, learner = step_of(spec_of(kl=NO_KL, rolloutCorrection=correction), folder)
    groups = groups_of(SCORES, version=4)
    for age, group in zip((0, 1, 2), groups, strict=True):
        for leaf in group.leaves:
            leaf.tokens.versions[:] = 4 - age
    metrics = (await step.run(groups, number=1, version=4)).metrics
    assert learner.scored == []
    batch, loss = learner.updates[0][:2]
    assert (batch.old_log_probs, batch.weights) == (None, None)
    assert loss.correction == Correction(Weights("token", 3.0))
    assert batch.rollout_share.tolist() == [s for g, a in zip(groups, (0, 1, 0.5), strict=True)
                                            for leaf in g.leaves for s in [a] * len(leaf.tokens)]  # fmt: skip
    assert metrics["actor/correction_weight"] > 0
    assert metrics["drift/kl"] > 0


async def test_figures_of_one_version_are_mismatch_and_of_several_drift_too(folder: Path) -> None:
    """On paper: k3 = rho - 1 - log rho, chi-square rho^2 - 1, per token; the sizes of sequences' products."""
    step, learner = step_of(spec_of(kl=NO_KL, rolloutCorrection={"mode": "decoupled"}), folder)
    groups = groups_of(SCORES, version=7)
    alone = (await step.run(groups, number=1, version=7)).metrics
    batch = learner.updates[0][0]
    logs = batch.old_log_probs.astype(float) - batch.rollout_log_probs
    rho, whole = np.exp(logs), np.exp([part.sum() for part in np.split(logs, np.cumsum(batch.response_lengths)[:-1])])
    assert alone["mismatch/kl"] == pytest.approx(np.mean(rho - 1 - logs), rel=1e-4)
    assert alone["mismatch/chi_square"] == pytest.approx(np.mean(rho**2) - 1, rel=1e-4, abs=1e-6)
    assert alone["mismatch/effective_sample_size"] == pytest.approx(whole.mean() ** 2 / np.mean(whole**2), rel=1e-4)
    assert "drift/kl" not in alone
    # Without a forward pass before the update, a second pull sees weights that have moved since the publication.
    step, _ = step_of(spec_of(kl=NO_KL, rolloutCorrection={"mode": "bypass"}), folder)
    await step.run(groups, number=1, version=7)
    later = (await step.run(groups, number=1, version=7)).metrics
    assert "mismatch/kl" not in later
    assert later["drift/kl"] > 0


async def test_a_correction_that_is_switched_on_weighs_the_next_batch_and_survives(folder: Path) -> None:
    step, learner = step_of(spec_of(kl=NO_KL), folder)
    await step.run(groups_of(SCORES), number=1, version=0)
    assert learner.updates[0][0].weights is None
    step.switch_correction_on()
    again, watched = step_of(spec_of(kl=NO_KL), folder)
    again.load_state_dict(step.state_dict())
    await again.run(groups_of(SCORES), number=2, version=1)
    batch = watched.updates[0][0]
    ratios = np.exp(batch.old_log_probs - batch.rollout_log_probs)
    np.testing.assert_allclose(batch.weights, np.minimum(ratios, 2.0), rtol=1e-5)


async def test_a_correction_preset_acts_as_what_it_stands_for(folder: Path) -> None:
    """decoupled_geo_rs_token_tis: token weights up to 2; sequences with a geometric mean ratio in 0.999 to 1.001."""
    step, learner = step_of(spec_of(kl=NO_KL, rolloutCorrection={"preset": "decoupled_geo_rs_token_tis"}), folder)
    groups = groups_of(SCORES)
    metrics = (await step.run(groups, number=1, version=0)).metrics
    batch = learner.updates[0][0]
    assert batch.old_log_probs is not None
    log_ratio = batch.old_log_probs - batch.rollout_log_probs
    np.testing.assert_allclose(batch.weights, np.minimum(np.exp(log_ratio), 2.0), rtol=1e-5)
    cuts = np.cumsum(batch.response_lengths)[:-1]
    means = np.array([np.exp(part.mean()) for part in np.split(log_ratio, cuts)])
    kept = (means >= 0.999) & (means <= 1.001)
    assert batch.mask.tolist() == np.repeat(kept, batch.response_lengths).tolist()
    assert metrics["rollout_correction/rejection/masked_sequence_ratio"] == pytest.approx(1 - kept.mean())


async def test_a_veto_leaves_out_sequences_with_one_token_that_the_trainer_finds_impossible(folder: Path) -> None:
    step, learner = step_of(spec_of(kl=NO_KL, rolloutCorrection={"preset": "disabled", "veto": 0.3}), folder)
    groups = groups_of(SCORES)
    groups[0].episodes[1].leaves[0].tokens.log_probs[0] = 0.0  # by the trainer it is one of about a dozen tokens
    await step.run(groups, number=1, version=0)
    masks = np.split(learner.updates[0][0].mask, np.cumsum(learner.updates[0][0].response_lengths)[:-1])
    assert [bool(part.all()) for part in masks] == [i != 1 for i in range(12)]
    assert not masks[1].any()


async def test_what_is_rejected_still_counts_as_disagreement(folder: Path) -> None:
    """The limits look at it: they are there for such tokens above all."""
    measured = []
    for correction in ({"preset": "disabled"}, {"preset": "disabled", "veto": 0.3}):
        step, learner = step_of(spec_of(kl=NO_KL, rolloutCorrection=correction), folder)
        groups = groups_of(SCORES)
        groups[0].episodes[1].leaves[0].tokens.log_probs[0] = 0.0
        measured.append((await step.run(groups, number=1, version=0)).metrics)
    assert learner.updates[0][0].mask.mean() < 1
    assert measured[0]["mismatch/kl"] == measured[1]["mismatch/kl"] > 1 / len(learner.updates[0][0].mask)


async def test_with_limits_the_samples_that_are_most_apart_are_named(folder: Path) -> None:
    step, _ = step_of(spec_of(kl=NO_KL, rolloutCorrection={"limits": {"kl": 1}}), folder)
    groups = groups_of(SCORES)
    groups[2].episodes[1].leaves[0].tokens.log_probs[:] -= 5.0
    groups[0].episodes[3].leaves[0].tokens.log_probs[:] -= 4.0
    trained = await step.run(groups, number=1, version=0)
    assert trained.apart is not None
    assert trained.apart.kl == trained.metrics["mismatch/kl"] > 1
    first, second, _ = trained.apart.worst.split(", ")
    assert first.startswith("sample 1 of prompt 2 by ")
    assert second.startswith("sample 3 of prompt 0 by ")
    assert float(first.split()[-2]) == pytest.approx(5.0, abs=1.0)


TOKEN_UP_TO_2 = {"level": "token", "low": None, "high": 2.0, "clamp": False}
SEQUENCE_UP_TO_2 = {"level": "sequence", "low": None, "high": 2.0}
BYPASS_PRESETS: list[tuple[str, dict[str, Any], str]] = [  # the name, its weights, what a sequence is rejected by
    ("bypass_ppo_clip", {}, ""),
    ("bypass_ppo_clip_geo_rs", {}, "geometric"),
    ("bypass_ppo_clip_k3_rs", {}, "k3"),
    ("bypass_pg_is", SEQUENCE_UP_TO_2, ""),
    ("bypass_pg_token_icepop", {"level": "token", "low": 0.5, "high": 5.0}, ""),
    ("bypass_pg_geo_rs", {"level": "none"}, "geometric"),
    ("bypass_pg_geo_rs_seq_tis", SEQUENCE_UP_TO_2, "geometric"),
    ("bypass_pg_geo_rs_token_tis", TOKEN_UP_TO_2, "geometric"),
]


async def test_decoupled_weights_are_clamped_where_the_job_says_so(folder: Path) -> None:
    """The engine's log-probs are far off, so that nearly every weight is beyond one of two close bounds."""
    given = {"mode": "decoupled", "weights": {"low": 0.99, "high": 1.01, "clamp": True}}
    step, learner = step_of(spec_of(rolloutCorrection=given), folder)
    groups = groups_of(SCORES)
    for leaf in groups[0].leaves:
        leaf.tokens.log_probs[:] = np.linspace(-9.0, -0.1, len(leaf.tokens))
    metrics = (await step.run(groups, number=1, version=0)).metrics
    batch = learner.updates[0][0]
    assert {0.99, 1.01} <= {round(float(weight), 6) for weight in batch.weights}
    assert batch.weights.min() == pytest.approx(0.99)
    assert batch.weights.max() == pytest.approx(1.01)
    assert "rollout_correction/weight/zeroed_ratio" not in metrics


@pytest.mark.parametrize(("preset", "weights", "rejection"), BYPASS_PRESETS)
async def test_a_bypass_preset_corrects_in_its_loss(
    folder: Path, preset: str, weights: dict[str, Any], rejection: str
) -> None:
    loss = "bypassPpoClip" if preset.startswith("bypass_ppo") else "bypassReinforce"
    spec = spec_of(kl=NO_KL, policyLoss={"type": loss}, rolloutCorrection={"preset": preset})
    step, learner = step_of(spec, folder)
    groups = groups_of(SCORES)
    for leaf in groups[1].leaves:  # these go with what the trainer finds, to 1e-4 of a nat
        leaf.tokens.log_probs[:] = 0.0
    await step.run(groups, number=1, version=0)
    known = learner.results[0].first_log_probs
    assert known is not None
    position = groups[0].response_tokens
    for leaf in groups[1].leaves:
        leaf.tokens.log_probs[:] = known[position : position + len(leaf.tokens)] + 1e-4
        position += len(leaf.tokens)
    step, learner = step_of(spec, folder)
    metrics = (await step.run(groups, number=1, version=0)).metrics
    batch, settings = learner.updates[0][:2]
    given = dict(settings.policy_loss_params)
    assert {name: given[name] for name in weights} == weights
    trainer = learner.results[0].first_log_probs
    parts = np.split(trainer - batch.rollout_log_probs, np.cumsum(batch.response_lengths)[:-1])
    if rejection == "geometric":
        bad = [not 0.999 <= math.exp(part.mean()) <= 1.001 for part in parts]
    elif rejection == "k3":
        bad = [(np.exp(part) - 1 - part).mean() > 0.01 for part in parts]
    else:
        bad = [False] * len(parts)
    assert any(bad) == bool(rejection)
    assert not all(bad)
    expected = sum(len(part) for part, out in zip(parts, bad, strict=True) if out) / len(trainer)
    assert metrics.get("actor/rejected_fraction", 0.0) == pytest.approx(expected)
    apart = trainer - batch.rollout_log_probs
    assert metrics["rollout_correction/kl"] == pytest.approx(-apart.mean(), rel=1e-4)
    assert metrics.get("rollout_correction/rejection/masked_ratio", 0.0) == pytest.approx(expected)
    assert ("rollout_correction/weight/mean" in metrics) == ("high" in weights)


def test_every_bypass_preset_is_there() -> None:
    assert [preset for preset, *_ in BYPASS_PRESETS] == [
        name for name, preset in CORRECTION_PRESETS.items() if preset.mode == "bypass"
    ]


async def test_the_entropy_coefficient_follows_its_target(folder: Path) -> None:
    """c <- c + rate (target - entropy), kept within 0 and the maximum."""
    target = {"target": 5.0, "rate": 0.01, "maximum": 0.05}
    step, learner = step_of(spec_of(kl=NO_KL, entropyCoefficient=0.01, entropyTarget=target), folder)
    first = (await step.run(groups_of(SCORES), number=1, version=0)).metrics
    second = (await step.run(groups_of(SCORES), number=2, version=1)).metrics
    moved = 0.01 + 0.01 * (5.0 - first["actor/entropy"])
    assert [loss.entropy_coefficient for _, loss, *_ in learner.updates] == pytest.approx([0.01, moved])
    assert second["actor/entropy_coefficient"] == pytest.approx(moved)
    check_all(second)
    resumed, _ = step_of(spec_of(kl=NO_KL, entropyCoefficient=0.01, entropyTarget=target), folder)
    resumed.load_state_dict(step.state_dict())
    assert resumed.state_dict() == step.state_dict()


async def test_resampling_trains_on_telling_samples_again_and_on_others_not_at_all(folder: Path) -> None:
    """maxMin draws only samples with the highest and the lowest score, here 1 and 0, as often as there are samples."""
    spec = spec_of(preset="ppo", kl=NO_KL, resampling={"kind": "maxMin"})
    step, learner = step_of(spec, folder)
    await step.run(groups_of(SCORES), number=1, version=0)
    drawn = [index for mini_batch in learner.updates[0][2] for index in mini_batch]
    assert len(drawn) == 12
    assert len(set(drawn)) < 12
    assert {ALL_SCORES[index] for index in drawn} == {0.0, 1.0}
    again, other = step_of(spec, folder)
    await again.run(groups_of(SCORES), number=1, version=0)
    assert other.updates[0][2] == learner.updates[0][2]


async def test_gradient_noise_is_reported_when_asked_for(folder: Path) -> None:
    """Signal is the squared norm of the mean gradient; the advantages' part is computed here from their definition."""
    step, learner = step_of(spec_of(kl=NO_KL, gradientNoise=True), folder)
    metrics = (await step.run(groups_of(SCORES), number=1, version=0)).metrics
    assert learner.scored == [{"log_probs", "sum_squared_probs"}]
    assert learner.updates[0][0].old_log_probs is None
    assert metrics["variance/signal_strength"] == pytest.approx(metrics["actor/grad_norm"] ** 2)
    scores = np.array(SCORES)
    spread = scores.std(axis=1, ddof=1, keepdims=True)
    expected = (scores - scores.mean(axis=1, keepdims=True)) / (spread + 1e-6)
    assert metrics["variance/squared_advantage"] == pytest.approx((expected**2).mean(), rel=1e-4)
    assert metrics["variance/total_power"] > 0
    check_all(metrics)


async def test_grpo_advantages_are_the_groups_standard_scores(folder: Path) -> None:
    step, learner = step_of(spec_of(kl=NO_KL), folder)
    groups = groups_of(SCORES)
    await step.run(groups, number=1, version=0)
    expected = []
    for row in SCORES:
        mean = sum(row) / 4
        deviation = math.sqrt(sum((x - mean) ** 2 for x in row) / 3)
        expected += [(x - mean) / (deviation + 1e-6) for x in row]
    np.testing.assert_allclose(learner.updates[0][0].advantages, per_token(expected, groups), atol=1e-5)


async def test_truncated_responses_can_lose_their_reward_and_their_place_in_the_loss(folder: Path) -> None:
    truncated = {"reward": "replace", "replacement": -1.0, "mask": True}
    step, learner = step_of(spec_of(kl=NO_KL, truncated=truncated, advantage={"normalizeByStd": False}), folder)
    groups = groups_of(SCORES)
    await step.run(groups, number=1, version=0)
    batch = learner.updates[0][0]
    replaced = [[*row[:3], -1.0] for row in SCORES]
    expected = [x - sum(row) / 4 for row in replaced for x in row]
    np.testing.assert_allclose(batch.advantages, per_token(expected, groups), atol=1e-5)
    np.testing.assert_array_equal(batch.mask, per_token([1.0, 1.0, 1.0, 0.0] * 3, groups))


async def test_rewards_are_clipped_and_then_normalised_over_the_batch(folder: Path) -> None:
    reward = {"clip": {"low": 0.25, "high": 0.75}, "normalize": True}
    spec = spec_of(reward, preset="rloo", kl=NO_KL, advantage={"estimator": "reinforce"})
    step, learner = step_of(spec, folder)
    groups = groups_of(SCORES)
    metrics = (await step.run(groups, number=1, version=0)).metrics
    clipped = [min(max(score, 0.25), 0.75) for score in ALL_SCORES]
    mean = sum(clipped) / 12
    deviation = math.sqrt(sum((score - mean) ** 2 for score in clipped) / 11)
    expected = [(score - mean) / deviation for score in clipped]
    np.testing.assert_allclose(learner.updates[0][0].advantages, per_token(expected, groups), atol=1e-5)
    assert metrics["reward/mean"] == pytest.approx(sum(ALL_SCORES) / 12)


async def test_the_greedy_baseline_is_clipped_like_the_rewards(folder: Path) -> None:
    spec = spec_of({"clip": {"low": 0.25, "high": 0.75}}, preset="remax", kl=NO_KL)
    step, learner = step_of(spec, folder)
    groups = groups_of(SCORES)
    for group in groups:
        group.greedy_score = 1.0
    await step.run(groups, number=1, version=0)
    expected = [min(max(score, 0.25), 0.75) - 0.75 for score in ALL_SCORES]
    np.testing.assert_allclose(learner.updates[0][0].advantages, per_token(expected, groups), atol=1e-5)


async def test_gdpo_counts_the_punishment_of_long_responses_as_a_reward(folder: Path) -> None:
    functions = [{"type": "exactMatch"}, {"type": "pattern", "pattern": "1", "weight": 0.5}]
    spec = spec_of(
        {"functions": functions, "overlong": {"bufferTokens": 4}},
        kl=NO_KL,
        advantage={"estimator": "gdpo", "whiten": False},
    )
    step, learner = step_of(spec, folder)
    groups = groups_of(SCORES)
    rng = np.random.default_rng(5)
    for group in groups:
        for sample in group.episodes:
            parts = {
                "exactMatch": sample.reward.score,
                "pattern": float(rng.random()),
                "overlong": -float(rng.random()),
            }
            sample.reward = RewardResult(sample.reward.score, parts, correct=None)
    await step.run(groups, number=1, version=0)
    expected = []
    for group in groups:
        total = np.zeros(4)
        for name, weight in (("exactMatch", 1.0), ("pattern", 0.5), ("overlong", 1.0)):
            of = np.array([sample.reward.parts[name] for sample in group.episodes])
            total += weight * (of - of.mean()) / (of.std(ddof=1) + 1e-6)
        expected += total.tolist()
    np.testing.assert_allclose(learner.updates[0][0].advantages, per_token(expected, groups), atol=1e-4)


PULLS = ((1, 0), (1, 0), (2, 1), (2, 1), (2, 1))
"""Step and version of each."""
DECOUPLED = {"mode": "decoupled", "weights": {"level": "token", "high": 2.0}}


async def test_pulls_of_one_version_are_one_update_to_the_schedule(folder: Path) -> None:
    step, learner = step_of(spec_of(rolloutCorrection={"mode": "bypass"}), folder, keeps_first_weights=True)
    for number, version in PULLS:
        await step.run(groups_of(SCORES), number=number, version=version)
    assert learner.continued == [False, True, False, True, True]
    assert learner.kept == [True, False, True, False, False], "an engine may join between two pulls"
    anchored = ["anchored" in wanted for wanted in learner.scored]
    assert not any(anchored), "bypass mode has the engines' log-probs for its anchor"


async def test_pulls_of_one_version_have_the_policy_that_it_began_with_as_their_anchor(folder: Path) -> None:
    spec = spec_of(preset="grpo", kl=NO_KL, rolloutCorrection=DECOUPLED)
    step, learner = step_of(spec, folder, keeps_first_weights=True)
    groups = groups_of(SCORES)
    told = [(await step.run(groups, number=number, version=version)).metrics for number, version in PULLS]
    assert learner.kept == [True, False, True, False, False]
    assert [("anchored" in wanted) for wanted in learner.scored] == [False, True, False, True, True]
    old = [batch.old_log_probs for batch, *_ in learner.updates]
    np.testing.assert_array_equal(old[1], old[0])
    np.testing.assert_array_equal(old[3], old[2])
    np.testing.assert_array_equal(old[4], old[2])
    assert not np.array_equal(old[2], old[0])
    # The same samples of version 0, seen by the same weights: both pulls say how well engine and trainer agree.
    assert told[0]["mismatch/kl"] == told[1]["mismatch/kl"]


async def test_without_a_correction_later_pulls_are_scored_with_the_first_weights(folder: Path) -> None:
    """The first one needs no forward pass: its single optimizer step begins there."""
    spec = spec_of(preset="grpo", kl=NO_KL, rolloutCorrection={"mode": "none"})
    step, learner = step_of(spec, folder, keeps_first_weights=True)
    for number, version in PULLS[:2]:
        await step.run(groups_of(SCORES), number=number, version=version)
    assert learner.scored == [{"log_probs", "anchored"}]
    assert learner.updates[0][0].old_log_probs is None
    assert learner.updates[1][0].old_log_probs is not None


async def test_ppo_charges_the_reward_for_kl_and_trains_the_critic_on_returns(folder: Path) -> None:
    spec = spec_of(preset="ppo", kl={"inReward": {"kind": "k1", "coefficient": 0.5}}, critic={"warmupSteps": 1})
    step, learner = step_of(spec, folder)
    groups = groups_of(SCORES)
    await step.run(groups, number=1, version=0)
    batch, _, _, actor, critic = learner.updates[0]
    assert learner.scored == [{"log_probs", "reference", "values"}]
    assert (actor, critic) == (False, True)
    # gamma = lambda = 1: the return is the sum of what follows. The reference is the model itself, so the KL is 0.
    np.testing.assert_allclose(batch.returns, per_token(ALL_SCORES, groups), atol=1e-5)
    await step.run(groups, number=2, version=1)
    assert learner.updates[1][3:] == (True, True)
    metrics = (await step.run(groups, number=3, version=2)).metrics
    batch = learner.updates[2][0]
    scored_old, reference = batch.old_log_probs, batch.ref_log_probs
    assert reference is not None
    assert scored_old is not None
    charged = -0.5 * (scored_old.astype(np.float64) - reference)
    expected, position = [], 0
    for score, length in zip(ALL_SCORES, [len(leaf.tokens) for g in groups for leaf in g.leaves], strict=True):
        rewards = charged[position : position + length].copy()
        rewards[-1] += score
        expected += np.cumsum(rewards[::-1])[::-1].tolist()
        position += length
    np.testing.assert_allclose(batch.returns, expected, atol=1e-5)
    assert metrics["kl/coefficient"] == 0.5


async def test_the_kl_in_the_reward_can_be_exact(folder: Path) -> None:
    """In the second step the actor has left the reference: a KL over the vocabulary is positive for every token."""
    spec = spec_of(preset="ppo", kl={"inReward": {"kind": "full", "coefficient": 0.5}}, advantage={"whiten": False})
    step, learner = step_of(spec, folder, learning_rate=1e-2)
    groups = groups_of(SCORES)
    first = (await step.run(groups, number=1, version=0)).metrics
    second = (await step.run(groups, number=2, version=1)).metrics
    assert learner.scored[0] == {"log_probs", "vocabulary_kl", "reference", "values"}
    assert first["kl/in_reward"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl/in_reward"] > 0
    # The return of a first token is the score without what all tokens of the sequence were charged for.
    returns, firsts = learner.updates[1][0].returns, np.cumsum([0, *learner.updates[1][0].response_lengths])[:-1]
    charged = np.array(ALL_SCORES) - returns[firsts]
    assert (charged > 0).all()
    means = charged / 0.5 / learner.updates[1][0].response_lengths
    assert means.mean() == pytest.approx(second["kl/in_reward"], rel=1e-4)


async def test_an_adaptive_coefficient_follows_the_measured_kl_and_is_part_of_the_state(folder: Path) -> None:
    controller = {"type": "adaptive", "target": 0.1, "horizon": 100}
    spec = spec_of(preset="ppo", kl={"inReward": {"kind": "k1", "coefficient": 0.5, "controller": controller}})
    step, _ = step_of(spec, folder)
    await step.run(groups_of(SCORES), number=1, version=0)
    # The KL is 0 in the first step, far below the target: the change is cut to -0.2, for 12 of 100 samples.
    assert step.kl.coefficient == pytest.approx(0.5 * (1 - 0.2 * 12 / 100))
    other, _ = step_of(spec, folder)
    other.load_state_dict(step.state_dict())
    assert other.kl.coefficient == step.kl.coefficient


def adaptive(coefficient: float) -> ResolvedSpec:
    controller = {"type": "adaptive", "target": 0.1, "horizon": 100}
    return spec_of(preset="ppo", kl={"inReward": {"kind": "k1", "coefficient": coefficient, "controller": controller}})


def test_another_job_s_checkpoint_leaves_the_coefficient_that_this_job_names(folder: Path) -> None:
    before, _ = step_of(adaptive(0.5), folder)
    before.kl.update(0.0, 12)
    without, _ = step_of(spec_of(preset="ppo", kl=NO_KL), folder)
    for other in (before, without):
        step, _ = step_of(adaptive(0.2), folder)
        step.load_state_dict(other.state_dict(), own=False)
        assert step.kl.coefficient == 0.2
    copy, _ = step_of(adaptive(0.5), folder)
    copy.load_state_dict(before.state_dict(), own=False)
    assert copy.kl.coefficient == before.kl.coefficient == pytest.approx(0.5 * (1 - 0.2 * 12 / 100))


def test_another_job_s_checkpoint_leaves_the_entropy_coefficient_that_this_job_names(folder: Path) -> None:
    target = {"target": 5.0, "rate": 0.01, "maximum": 0.05}
    before, _ = step_of(spec_of(kl=NO_KL, entropyCoefficient=0.01, entropyTarget=target), folder)
    step, _ = step_of(spec_of(kl=NO_KL, entropyCoefficient=0.02, entropyTarget=target), folder)
    step.load_state_dict(before.state_dict(), own=False)
    assert step.entropy is not None
    assert step.entropy.coefficient == 0.02


def test_another_job_s_checkpoint_leaves_the_correction_that_this_job_names(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, _ = step_of(spec_of(kl=NO_KL), folder)
    before.switch_correction_on()
    bypass, _ = step_of(spec_of(kl=NO_KL, rolloutCorrection={"mode": "bypass"}), folder)
    bypass.load_state_dict(before.state_dict(), own=False)
    assert not bypass.correcting
    assert bypass.algorithm.rollout_correction.mode == "bypass"
    assert caplog.messages == [
        "algorithm.rolloutCorrection differs from the checkpoint's job: it restarts with this job's settings"
    ]
    alike, _ = step_of(spec_of(kl=NO_KL), folder)
    alike.load_state_dict(before.state_dict(), own=False)
    assert alike.correcting


async def test_an_adaptive_coefficient_waits_for_the_critic(folder: Path) -> None:
    """While only the critic learns, the policy is its reference and the KL 0, whatever the coefficient."""
    controller = {"type": "adaptive", "target": 0.1, "horizon": 100}
    in_reward = {"kind": "k1", "coefficient": 0.5, "controller": controller}
    step, _ = step_of(spec_of(preset="ppo", kl={"inReward": in_reward}, critic={"warmupSteps": 2}), folder)
    coefficients = []
    for number in range(1, 4):
        await step.run(groups_of(SCORES), number=number, version=number - 1)
        coefficients.append(step.kl.coefficient)
    assert coefficients == pytest.approx([0.5, 0.5, 0.5 * (1 - 0.2 * 12 / 100)])


async def trained(spec: ResolvedSpec, folder: Path) -> tuple[dict[str, float], SequenceBatch]:
    """A step's metrics, which must be finite and known, and the batch that the learner got."""
    step, learner = step_of(spec, folder)
    groups = groups_of(SCORES)
    if advantage_estimators[spec.algorithm.advantage.estimator].needs_greedy:
        for group, score in zip(groups, GREEDY, strict=True):
            group.greedy_score = score
    metrics = (await step.run(groups, number=1, version=0)).metrics
    check_all(metrics)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics["reward/mean"] == pytest.approx(np.mean(SCORES))
    assert metrics["actor/steps"] == 1
    assert metrics["actor/grad_norm"] > 0
    return metrics, learner.updates[0][0]


@pytest.mark.parametrize("preset", PRESETS)
async def test_presets_train_and_report_known_metrics(folder: Path, preset: str) -> None:
    _, batch = await trained(spec_of(preset=preset), folder)
    assert batch.advantages is not None
    assert np.any(batch.advantages != 0)


BY_HAND = {  # of the first group's scores 1, 0, 0, 0: mean 1/4, deviation 1/2; of the second's 1/2, 1/2, 1, 0: mean 1/2
    "gdpo": ({"whiten": False}, [1.5, -0.5, -0.5, -0.5], [0, 0, 0.5 / 6**-0.5, -0.5 / 6**-0.5]),
    "maxrl": ({}, [3, -1, -1, -1], [0, 0, 1, -1]),
    "grpo_passk": ({"normalizeByStd": False}, [1, 0, 0, 0], [0, 0, 0.5, 0]),
    "remax": ({}, [1, 0, 0, 0], [0, 0, 0.5, -0.5]),
}


@pytest.mark.parametrize("estimator", BY_HAND)
async def test_estimators_get_what_they_need_from_the_step(folder: Path, estimator: str) -> None:
    """The deviation of 1/2, 1/2, 1, 0 is the root of (1/4 + 1/4) / 3 = 1/6; in the third group all have 1, and so
    has its greedy response."""
    settings, first, second = BY_HAND[estimator]
    _, batch = await trained(spec_of(kl=NO_KL, advantage={"estimator": estimator, **settings}), folder)
    expected = per_token([*first, *second, 0, 0, 0, 0], groups_of(SCORES))
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-4)


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("mode", ["none", "bypass"])
async def test_token_baselines_train_with_what_the_learner_scores(folder: Path, estimator: str, mode: str) -> None:
    """arXiv 2602.07078: r_i - sum_j r_j W_jt / sum_j W_jt over the group's responses that reach t, W the running sum of
    1 - 2 pi + sum of pi^2; without tool output both are the same."""
    spec = spec_of(kl=NO_KL, advantage={"estimator": estimator}, rolloutCorrection={"mode": mode})
    _, batch = await trained(spec, folder)
    work = step_of(spec_of(), folder)[1]
    wanted = ScoreRequest(log_probs=True, sum_squared_probs=True)
    scored = await work.score(layout(groups_of(SCORES)).sequences, wanted)
    assert scored.log_probs is not None
    assert scored.sum_squared_probs is not None
    cuts = np.cumsum(batch.response_lengths)[:-1]
    energies = [e.cumsum() for e in np.split(1 - 2 * np.exp(scored.log_probs) + scored.sum_squared_probs, cuts)]
    expected = []
    for i, own in enumerate(energies):
        group = range(i // 4 * 4, i // 4 * 4 + 4)
        for t in range(len(own)):
            there = [(ALL_SCORES[j], energies[j][t]) for j in group if len(energies[j]) > t]
            baseline = sum(r * w for r, w in there) / sum(w for _, w in there) if len(there) > 1 else 0.0
            expected.append(ALL_SCORES[i] - baseline)
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-4)


async def test_a_reward_that_maxrl_cannot_divide_by_is_the_data_s_fault(folder: Path) -> None:
    step, learner = step_of(spec_of(kl=NO_KL, advantage={"estimator": "maxrl"}), folder)
    scores = [row[:] for row in SCORES]
    scores[1][2] = -0.5
    with pytest.raises(DataError, match=r"^step 7: .* has -0\.5: .* \(sample 2 of prompt 1\)$") as refused:
        await step.run(groups_of(scores), number=7, version=0)
    assert refused.value.exit_code == 65
    assert learner.updates == []


def test_a_sample_without_a_reward_is_named() -> None:
    groups = groups_of(SCORES)
    groups[1].episodes[2].reward = None
    with pytest.raises(DataError, match="sample 2 of prompt 1"):
        layout(groups)


async def test_age_counts_the_optimizer_steps_since_the_oldest_token(folder: Path) -> None:
    """Two pulls a version, two epochs, a mini-batch a group: six steps a pull, twelve a version. By hand."""
    spec = spec_of(kl=NO_KL)
    spec = spec.model_copy(update={"batch": spec.batch.model_copy(update={"epochs": 2, "mini_batch_groups": 1})})
    step, _ = step_of(spec, folder, keeps_first_weights=True)

    async def moved(number: int, version: int, oldest: int, of: TrainingStep = step) -> tuple[float, float]:
        metrics = (await of.run(groups_of(SCORES, version=oldest), number=number, version=version)).metrics
        return metrics["age/optimizer_steps/mean"], metrics["age/optimizer_steps/max"]

    assert await moved(1, version=0, oldest=0) == ((0 + 1 + 2 + 3 + 4 + 5) / 6, 5)
    assert await moved(1, version=0, oldest=0) == (6 + 2.5, 6 + 5)
    assert await moved(2, version=1, oldest=1) == (2.5, 5)
    assert await moved(2, version=1, oldest=0) == (12 + 6 + 2.5, 12 + 6 + 5)
    # A resumed run counts its versions from elsewhere; its steps are those of the surviving weights.
    resumed, _ = step_of(spec, folder, keeps_first_weights=True)
    resumed.load_state_dict(step.state_dict())
    assert await moved(3, version=9, oldest=7, of=resumed) == (24 + 2.5, 24 + 5)
    assert await moved(4, version=10, oldest=8, of=resumed) == (12 + 6 + 2.5, 12 + 6 + 5)


async def test_every_age_of_the_catalogue_is_reported(folder: Path) -> None:
    step, _ = step_of(spec_of(kl=NO_KL), folder)
    metrics = (await step.run(groups_of(SCORES), number=1, version=0)).metrics
    assert {name for name in metrics if name.startswith("age/")} == {m.name for m in METRICS if m.family == "age"}


KINDS_OF_A_TOKEN = [kind for kind in get_args(KlLossKind) if kind != "full"]
"""Those that the reference is scored for before the update."""


def spoil(learner: Watched, stream: str, value: float) -> None:
    """Its scores of the last sample end with ``value``."""
    score = learner.score

    async def broken(batch: SequenceBatch, request: ScoreRequest) -> Any:
        scored = await score(batch, request)
        getattr(scored, stream)[-1] = value
        return scored

    learner.score = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize(
    ("place", "kind"),
    [("inReward", kind) for kind in get_args(KlRewardKind)] + [("inLoss", kind) for kind in KINDS_OF_A_TOKEN],
)
async def test_a_reference_that_scores_no_number_is_named_and_not_the_reward(
    folder: Path, place: str, kind: str, value: float
) -> None:
    step, learner = step_of(spec_of(kl={**NO_KL, place: {"kind": kind, "coefficient": 0.1}}), folder)
    spoil(learner, "ref_log_probs", value)
    with pytest.raises(
        LearnerError,
        match=r"^step 7: the log-prob of response token \d of sample 3 of prompt 2 is (nan|-inf) from the reference",
    ):
        await step.run(groups_of(SCORES), number=7, version=0)
    assert learner.updates == []


@pytest.mark.parametrize(
    ("stream", "algorithm", "named"),
    [
        ("log_probs", {"kl": NO_KL, "rolloutCorrection": {"mode": "decoupled"}}, "log-prob .* from the policy"),
        ("values", {"preset": "ppo"}, "value .* from the critic"),
        ("final_values", {"preset": "ppo", "truncated": {"bootstrap": True}}, "value after .* from the critic"),
        (
            "vocabulary_kl",
            {"kl": {"inReward": {"kind": "full", "coefficient": 0.1}}},
            "KL over the vocabulary .* from the policy or the reference",
        ),
        (
            "sum_squared_probs",
            {"kl": NO_KL, "advantage": {"estimator": "optimal_token_baseline"}},
            "sum of squared probabilities .* from the policy",
        ),
    ],
)
async def test_a_model_that_scores_no_number_is_named(
    folder: Path, stream: str, algorithm: dict[str, Any], named: str
) -> None:
    step, learner = step_of(spec_of(**algorithm), folder)
    spoil(learner, stream, math.nan)
    with pytest.raises(LearnerError, match=named) as refused:
        await step.run(groups_of(SCORES), number=7, version=0)
    assert "sample 3 of prompt 2 is nan" in str(refused.value)
    assert learner.updates == []


@pytest.mark.parametrize("mode", ["none", "decoupled", "bypass"])
async def test_an_engine_that_gives_no_number_ends_the_step_before_it_begins(folder: Path, mode: str) -> None:
    step, learner = step_of(spec_of(kl=NO_KL, rolloutCorrection={"mode": mode}), folder)
    groups = groups_of(SCORES)
    groups[1].episodes[2].leaves[0].tokens.log_probs[0] = math.nan
    with pytest.raises(EngineError, match="response token 0 of sample 2 of prompt 1 is nan by the engine"):
        await step.run(groups, number=7, version=0)
    assert (learner.scored, learner.updates) == ([], [])


async def test_a_token_that_is_not_trained_may_have_any_score(folder: Path) -> None:
    step, learner = step_of(spec_of(kl={**NO_KL, "inLoss": {"coefficient": 0.1}}), folder)
    spoil(learner, "ref_log_probs", math.nan)
    groups = groups_of(SCORES)
    groups[-1].episodes[-1].leaves[0].tokens.mask[-1] = False
    metrics = (await step.run(groups, number=1, version=0)).metrics
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("kind", KINDS_OF_A_TOKEN)
async def test_a_loss_that_is_no_number_moves_no_weight(folder: Path, kind: str) -> None:
    """Whatever gradient the KL of a NaN has: abs and k3's clamp give it 0."""
    step, learner = step_of(spec_of(kl={**NO_KL, "inLoss": {"kind": kind, "coefficient": 0.1}}), folder)
    await step.run(groups_of(SCORES), number=1, version=0)
    batch, loss, mini_batches, *_ = learner.updates[0]
    assert batch.ref_log_probs is not None
    batch.ref_log_probs[-1] = math.nan
    result = await learner.update(batch, loss, mini_batches)
    assert (result.actor_steps, len(result.skipped)) == (0, 1)
    assert result.skipped[0].startswith("actor, mini-batch 0: the gradient of ")
