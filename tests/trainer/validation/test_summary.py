"""Validation metrics of scored groups, under the names that the catalogue lists."""

from __future__ import annotations

import pytest
from small_episodes import an_episode

from rljob_trainer.episodes.episode import FinishReason, Group, Prompt, RewardResult
from rljob_trainer.telemetry.names import check_all
from rljob_trainer.validation import summarise


def group(rewards: list[RewardResult], finish: FinishReason = "stop", tokens: int = 3) -> Group:
    prompt = Prompt(ordinal=0, epoch=0, row=0, source="s", text="", token_ids=(1,), answer=None)
    episodes = [an_episode(prompt, i, [0] * tokens, finish=finish, reward=r) for i, r in enumerate(rewards)]
    return Group(prompt, episodes)


def result(score: float, correct: bool | None = None, prediction: str | None = None, **parts: float) -> RewardResult:
    return RewardResult(score, parts, prediction, correct)


def test_correctness_is_the_main_number_and_the_score_a_variable() -> None:
    groups = [
        group([result(0.9, True, "1"), result(-0.1, False, "2")]),
        group([result(-0.1, False, "3"), result(-0.1, False, "3")], finish="length", tokens=7),
    ]
    metrics = summarise("openai/gsm8k", groups)
    check_all(metrics)
    name = "validation/openai-gsm8k"
    assert metrics[f"{name}/mean@2"] == 0.25
    assert metrics[f"{name}/std@2"] == 0.25
    # The first prompt's two draws hold its right sample with probability 3/4.
    assert metrics[f"{name}/best@2/mean"] == pytest.approx(3 / 8)
    assert metrics[f"{name}/worst@2/mean"] == pytest.approx(1 / 8)
    assert metrics[f"{name}/maj@2/mean"] == pytest.approx(1 / 4, abs=0.03)
    assert metrics[f"{name}/pass@1"] == 0.25
    assert metrics[f"{name}/pass@2"] == 0.5
    assert metrics[f"{name}/score/mean@2"] == pytest.approx(0.15)
    assert metrics[f"{name}/response_length/mean"] == 5.0
    assert metrics[f"{name}/response_length/clip_ratio"] == 0.5
    assert metrics[f"{name}/prompts"] == 2.0


def test_a_sample_that_nobody_judged_is_wrong_among_others_that_somebody_has() -> None:
    metrics = summarise("s", [group([result(0.75, False)]), group([result(0.75)]), group([result(1.0, True)])])
    assert metrics["validation/s/mean@1"] == metrics["validation/s/pass@1"] == pytest.approx(1 / 3)
    assert metrics["validation/s/score/mean@1"] == pytest.approx(2.5 / 3)


def test_without_correctness_the_score_is_the_main_number_and_parts_are_shown_apart() -> None:
    metrics = summarise("s", [group([result(3.0, a=1.0, b=2.0)]), group([result(1.0, a=1.0, b=0.0)])])
    check_all(metrics)
    assert metrics["validation/s/mean@1"] == 2.0
    assert metrics["validation/s/a/mean@1"] == 1.0
    assert metrics["validation/s/b/mean@1"] == 1.0
    assert not any("pass@" in name or "maj@" in name or "best@" in name for name in metrics)


def test_groups_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="same number of samples"):
        summarise("s", [group([result(1.0)]), group([result(1.0), result(1.0)])])
    with pytest.raises(ValueError, match="has no reward"):
        summarise("s", [group([None])])  # type: ignore[list-item]
