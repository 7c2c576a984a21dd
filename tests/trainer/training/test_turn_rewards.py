"""What an answer has earned before the end of its episode is credited to it and to what came before, not to the rest.

Expected numbers are sums over answers and tokens in float64, by loops.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from watched_step import Watched, spec_of

from rljob_trainer.algorithms import Segments, earned_at_turns
from rljob_trainer.episodes.episode import Episode, Group, Leaf, Prompt, RewardResult, TurnSpan
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.models.materialise import materialise
from rljob_trainer.training.batch import layout
from rljob_trainer.training.scores import turn_rewards
from rljob_trainer.training.step import TrainingStep

SCORES = [[1.0, 0.25, 0.5, 0.0], [0.25, 1.0, 0.0, 0.5]]
EARNED = [[(0.5, -0.25), (), (0.125,), (0.25, 0.25, -0.5)], [(), (1.0, 1.0), (0.0, 0.25), ()]]
"""Of each episode's answers; of fewer than there are, the last ones nothing."""
LEAVES = [[(2, 1), (1,), (3,), (1, 2)], [(1,), (2,), (2, 2), (1,)]]
"""Answers of each leaf."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return materialise(spec_of().model, tmp_path_factory.mktemp("model") / "model").path


def leaf_of(answers: int, before: tuple[int, ...], rng: np.random.Generator) -> Leaf:
    """Answers of two or three tokens with one or two of somebody else's in between."""
    mask: list[bool] = []
    spans = []
    for answer in range(answers):
        mask += [False] * int(rng.integers(1, 3)) if answer else []
        start = len(mask)
        mask += [True] * int(rng.integers(2, 4))
        spans.append(TurnSpan(start, len(mask)))
    made, length = np.array(mask), len(mask)
    ids, log_probs = rng.integers(4, 14, length).astype(np.int32), rng.normal(-2.6, 0.1, length).astype(np.float32)
    return Leaf(before, Tokens(ids, log_probs, np.zeros(length, np.int32), made), spans=tuple(spans))


def groups(
    *, said: bool = True, finish: str = "stop", scores_of: list[list[float]] = SCORES, earned_of: Any = EARNED
) -> list[Group]:
    rng = np.random.default_rng(4)
    made = []
    for number, (scores, earned, leaves) in enumerate(zip(scores_of, earned_of, LEAVES, strict=True)):
        prompt = Prompt(number, 0, number, "copy", "", tuple(rng.integers(4, 14, 3).tolist()), None)
        episodes = []
        for sample, score in enumerate(scores):
            parts = [leaf_of(answers, (*prompt.token_ids, *[5] * n), rng) for n, answers in enumerate(leaves[sample])]
            reward = RewardResult(score, {"environment": score}, turns=earned[sample] if said else ())
            id = EpisodeId(TRAINING, number, sample)
            episodes.append(Episode(id, parts, finish, reward=reward, seconds=1.0))  # type: ignore[arg-type]
        made.append(Group(prompt, episodes))
    return made


async def trained(folder: Path, given: list[Group], reward: dict[str, Any] | None = None, **algorithm: Any) -> Any:
    spec = spec_of(reward, **algorithm)
    critic = None if spec.algorithm.critic is None else LearnerSettings(model_path=folder).actor
    actor = OptimizerSettings(learning_rate=1e-6)
    settings = LearnerSettings(model_path=folder, actor=actor, critic=critic, reference=spec.algorithm.needs_reference)
    learner = Watched(Fsdp2().start(settings))
    step = TrainingStep(spec.algorithm, spec.batch, learner, temperature=1.0, seed=0, reward=spec.reward)
    result = await step.run(given, number=1, version=0)
    return learner.updates[0][0], result.metrics


def to_come(given: list[Group], scores: list[float], scale: float = 1.0) -> np.ndarray[Any, Any]:
    """``[tokens]``: what each token's episode earns from there to its end; NaN where the model did not speak."""
    found: list[float] = []
    episodes = [episode for group in given for episode in group.episodes]
    for episode, score in zip(episodes, scores, strict=True):
        assert episode.reward is not None
        earned = list(episode.reward.turns)
        past = 0.0
        for leaf in episode.leaves:
            stream = np.full(len(leaf.tokens), np.nan)
            for start, stop, _ in leaf.turns:
                stream[start:stop] = score - past
                past += scale * (earned.pop(0) if earned else 0.0)
            found += stream.tolist()
    return np.array(found)


def flat(scores: list[list[float]]) -> list[float]:
    return [score for row in scores for score in row]


GAE = {"preset": "ppo", "kl": {"inReward": {"coefficient": 0}}, "advantage": {"lambda": 1.0}}


async def test_the_target_of_a_token_is_what_is_earned_from_there_on(folder: Path) -> None:
    given = groups()
    batch, metrics = await trained(folder, given, **GAE)
    expected = to_come(given, flat(SCORES))
    np.testing.assert_allclose(batch.returns[batch.mask], expected[batch.mask], atol=1e-6)
    assert not np.isnan(expected[batch.mask]).any()
    assert metrics["reward/mean"] == pytest.approx(np.mean(SCORES))


async def test_returns_without_a_critic_are_too(folder: Path) -> None:
    given = groups()
    batch, metrics = await trained(folder, given, preset="grpo", advantage={"estimator": "reinforce_plus_plus"})
    expected = to_come(given, flat(SCORES))[batch.mask]
    whitened = (expected - expected.mean()) / expected.std(ddof=1)
    np.testing.assert_allclose(batch.advantages[batch.mask], whitened, rtol=1e-4, atol=1e-4)
    assert not any(name.startswith("reward/penalised") for name in metrics), "there is no KL in this reward"


async def test_where_a_group_is_compared_only_the_sum_counts(folder: Path) -> None:
    batch, _ = await trained(folder, groups(), preset="grpo")
    plain, _ = await trained(folder, groups(said=False), preset="grpo")
    np.testing.assert_allclose(batch.advantages, plain.advantages, atol=1e-6)
    assert np.abs(plain.advantages).max() > 0.5


@pytest.mark.parametrize("score", [10.0, 0.1, 1000.0])
async def test_equal_scores_are_no_advantage_however_they_were_earned(folder: Path, score: float) -> None:
    """None of these parts is a sum of few powers of two: what is left of equal sums is divided by their deviation."""
    earned = [[(0.1, 3.3), (0.7,), (1e-3, 1 / 3), ()], [(3.3,), (0.1,), (2.2, -1.7), (0.9,)]]
    batch, _ = await trained(folder, groups(scores_of=[[score] * 4] * 2, earned_of=earned), preset="grpo")
    assert batch.mask.any()
    assert not batch.advantages[batch.mask].any()


async def test_a_score_that_is_replaced_scales_what_others_earned(folder: Path) -> None:
    """The shape of all scores is that after the replacement."""
    given = groups()
    given[0].episodes[1] = replace(given[0].episodes[1], finish="length")
    truncated = {"reward": "replace", "replacement": -3.0}
    batch, _ = await trained(folder, given, {"normalize": True}, truncated=truncated, **GAE)
    scores = np.array(flat(SCORES))
    scores[1] = -3.0
    scale = 1 / np.sqrt(scores.var(ddof=1) + 1e-8)
    expected = to_come(given, ((scores - scores.mean()) * scale).tolist(), scale)
    np.testing.assert_allclose(batch.returns[batch.mask], expected[batch.mask], atol=1e-5)


def test_what_an_answer_earned_stays_with_it_where_its_last_token_is_not_trained() -> None:
    """Of each episode tokens 0 and 1 are an answer, 2 is the world's, 3 to 5 an answer; some tokens are rejected."""
    mask = [True, True, False, True, True, True]
    leaf = Leaf((4, 4), Tokens(*_streams(mask)), spans=(TurnSpan(0, 2), TurnSpan(3, 6)))
    reward = RewardResult(1.0, {"environment": 1.0}, turns=(0.25, 0.5))
    prompt = Prompt(0, 0, 0, "copy", "", (4, 4), None)
    episodes = [Episode(EpisodeId(TRAINING, 0, n), [leaf], "stop", reward=reward, seconds=1.0) for n in range(4)]
    batch = layout([Group(prompt, episodes)])
    rejected = [(), (1,), (0, 1), (4, 5)]
    for episode, places in enumerate(rejected):
        batch.sequences.mask[[6 * episode + place for place in places]] = False
    earned = turn_rewards(batch)
    assert earned is not None
    assert earned.reshape(4, 6).tolist() == [
        [0, 0.25, 0, 0, 0, 0.5],
        [0.25, 0, 0, 0, 0, 0.5],
        [0, 0, 0, 0, 0, 0.5],  # of the first answer nothing is trained, and nothing came before it
        [0, 0.25, 0, 0.5, 0, 0],
    ]


def _streams(mask: list[bool]) -> tuple[Any, ...]:
    size = len(mask)
    return np.full(size, 5, np.int32), np.full(size, -1, np.float32), np.zeros(size, np.int32), np.array(mask)


async def test_of_a_score_that_is_replaced_nothing_was_earned_before(folder: Path) -> None:
    given = groups(finish="length")
    batch, _ = await trained(folder, given, truncated={"reward": "replace", "replacement": -1.0}, **GAE)
    np.testing.assert_allclose(batch.returns[batch.mask], -1.0, atol=1e-6)


async def test_scaled_scores_scale_what_was_earned(folder: Path) -> None:
    given = groups()
    batch, _ = await trained(folder, given, {"normalize": True}, **GAE)
    scores = np.array(flat(SCORES))
    scale = 1 / np.sqrt(scores.var(ddof=1) + 1e-8)
    expected = to_come(given, ((scores - scores.mean()) * scale).tolist(), scale)
    np.testing.assert_allclose(batch.returns[batch.mask], expected[batch.mask], atol=1e-5)


async def test_with_a_kl_in_the_reward_the_penalty_stays_where_it_is(folder: Path) -> None:
    kl = {"inReward": {"coefficient": 0.1}}
    both = [await trained(folder, groups(said=said), **{**GAE, "kl": kl}) for said in (True, False)]
    (batch, metrics), (plain, plainly) = both
    moved = (batch.returns - plain.returns)[batch.mask]
    given = groups()
    whole = np.repeat(flat(SCORES), [episode.response_tokens for group in given for episode in group.episodes])
    np.testing.assert_allclose(moved, (to_come(given, flat(SCORES)) - whole)[batch.mask], atol=1e-5)
    assert metrics["reward/penalised/mean"] == pytest.approx(plainly["reward/penalised/mean"], abs=1e-6)


def test_what_was_earned_at_tokens_that_are_not_trained_stays_at_the_end() -> None:
    segments = Segments.from_lengths([4, 3, 2])
    mask = torch.tensor([True, False, True, True, True, True, False, False, False])
    earned = torch.tensor([0.5, 9.0, 0.25, 0.0, -1.0, 0.0, 7.0, 5.0, 5.0])
    rewards = torch.tensor([0.0, 0.0, 0.0, 2.0, 0.0, 3.0, 0.0, 0.0, 0.0])
    moved = earned_at_turns(rewards, earned, mask, segments)
    assert moved.tolist() == [0.5, 0.0, 0.25, 1.25, -1.0, 4.0, 0.0, 0.0, 0.0]
    poisoned = torch.where(mask, earned, torch.nan)
    assert torch.equal(earned_at_turns(rewards, poisoned, mask, segments), moved)
