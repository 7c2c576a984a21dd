"""An episode whose history was changed on the way has several leaves: advantages and means over sequences count it
once, losses count its tokens, and what the model did not make is nowhere.

Expected numbers are computed here by loops over episodes, leaves and tokens in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_for import cut_for
from watched_step import Watched, spec_of

from rljob_trainer.algorithms import LossCounts, Segments, aggregate
from rljob_trainer.episodes.episode import Episode, Group, Leaf, Prompt, RewardResult
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.tokens import ByteArray, Tokens
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.packing import check_batch, take
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.models.materialise import materialise
from rljob_trainer.training.batch import layout
from rljob_trainer.training.step import TrainingStep

SCORES = [[1.0, 0.0, 0.5, 0.0], [0.25, 1.0, 0.0, 0.5], [1.0, 0.0, 0.0, 1.0]]
LEAVES = [[1, 3, 2, 1], [1, 1, 2, 1], [2, 1, 1, 1]]
"""Of each episode."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return materialise(spec_of().model, tmp_path_factory.mktemp("model") / "model").path


def branching(*, observed: float = -1.0) -> list[Group]:
    """Groups whose leaves have 2 to 7 tokens, of which one or two in the middle were not made by the model; these
    have the log-prob ``observed``."""
    rng = np.random.default_rng(4)
    groups = []
    for number, (scores, leaves) in enumerate(zip(SCORES, LEAVES, strict=True)):
        prompt = Prompt(number, 0, number, "copy", "", tuple(rng.integers(4, 14, 3).tolist()), None)
        episodes = []
        for sample, (score, count) in enumerate(zip(scores, leaves, strict=True)):
            made = []
            for leaf in range(count):
                length = int(rng.integers(2, 8))
                mask = np.ones(length, np.bool_)
                mask[1 : 1 + length // 3] = False
                log_probs = np.where(mask, rng.normal(-2.6, 0.1, length), observed).astype(np.float32)
                ids = rng.integers(4, 14, length).astype(np.int32)
                before = (*prompt.token_ids, *rng.integers(4, 14, 2 * leaf).tolist())
                made.append(Leaf(before, Tokens(ids, log_probs, np.zeros(length, np.int32), mask)))
            reward = RewardResult(score, {"exactMatch": score})
            episodes.append(Episode(EpisodeId(TRAINING, number, sample), made, "stop", reward=reward, seconds=1.0))
        groups.append(Group(prompt, episodes))
    return groups


def step_of(folder: Path, **algorithm: Any) -> tuple[TrainingStep, Watched]:
    spec = spec_of(**algorithm)
    critic = None if spec.algorithm.critic is None else LearnerSettings(model_path=folder).actor
    settings = LearnerSettings(
        model_path=folder,
        actor=OptimizerSettings(learning_rate=1e-6),
        critic=critic,
        reference=spec.algorithm.needs_reference,
    )
    learner = Watched(Fsdp2().start(settings))
    return TrainingStep(spec.algorithm, spec.batch, learner, temperature=1.0, seed=0, reward=spec.reward), learner


def by_leaf(groups: list[Group], stream: np.ndarray[Any, Any]) -> Iterator[tuple[Episode, Leaf, Any]]:
    """A stream ``[tokens]`` of the batch in the pieces of its leaves."""
    start = 0
    for group in groups:
        for episode in group.episodes:
            for leaf in episode.leaves:
                yield episode, leaf, stream[start : start + len(leaf.tokens)]
                start += len(leaf.tokens)
    assert start == len(stream)


async def test_a_group_s_mean_and_deviation_count_each_episode_once(folder: Path) -> None:
    groups = branching()
    step, learner = step_of(folder, preset="grpo")
    metrics = (await step.run(groups, number=1, version=0)).metrics
    batch, *_ = learner.updates[0]
    assert batch.advantages is not None
    for episode, leaf, advantages in by_leaf(groups, batch.advantages):
        scores = SCORES[episode.id.ordinal]
        expected = (SCORES[episode.id.ordinal][episode.id.sample] - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-6)
        np.testing.assert_allclose(advantages, np.where(leaf.tokens.mask, expected, 0), rtol=1e-5, atol=1e-6)
    assert metrics["reward/mean"] == pytest.approx(np.mean(SCORES))


@pytest.mark.parametrize("aggregation", ["tokenMean", "promptMean", "seqMeanTokenMean", "seqMeanTokenSum"])
async def test_losses_count_tokens_and_means_over_sequences_count_episodes(folder: Path, aggregation: str) -> None:
    """With one optimizer step a mini-batch's ratio is 1 everywhere: a token's loss is its advantage, negative."""
    groups = branching()
    step, learner = step_of(folder, preset="grpo", aggregation=aggregation)
    metrics = (await step.run(groups, number=1, version=0)).metrics
    batch, _, mini_batches, *_ = learner.updates[0]
    assert len(mini_batches) == 1
    assert batch.advantages is not None
    tokens, per_episode, per_prompt = [], {}, {}
    for episode, leaf, advantages in by_leaf(groups, batch.advantages.astype(np.float64)):
        tokens += (-advantages[leaf.tokens.mask]).tolist()
        per_episode.setdefault(episode.id, []).append(-advantages[leaf.tokens.mask])
        per_prompt.setdefault(episode.id.ordinal, []).extend(-advantages[leaf.tokens.mask])
    expected = {
        "tokenMean": np.mean(tokens),
        "promptMean": np.mean([np.mean(made) for made in per_prompt.values()]),
        "seqMeanTokenMean": np.mean([np.mean([leaf.mean() for leaf in leaves]) for leaves in per_episode.values()]),
        "seqMeanTokenSum": np.mean([sum(leaf.sum() for leaf in leaves) for leaves in per_episode.values()]),
    }[aggregation]
    assert metrics["actor/policy_loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


async def test_what_the_model_was_given_counts_nowhere_even_where_it_is_no_number(folder: Path) -> None:
    told = []
    for observed in (-1.0, float("nan")):
        step, _ = step_of(folder, preset="ppo", rolloutCorrection={"preset": "decoupled_k3_rs_token_tis"})
        told.append((await step.run(branching(observed=observed), number=1, version=0)).metrics)
    known = [{name: value for name, value in metrics.items() if "seconds" not in name and "memory" not in name}
             for metrics in told]  # fmt: skip
    assert known[0] == known[1]
    assert all(np.isfinite(value) for value in known[0].values())


async def test_with_a_critic_an_episode_s_tokens_are_one_trajectory(folder: Path) -> None:
    """With gamma and lambda 1 the target of every token that the model made is the episode's score."""
    groups = branching()
    step, learner = step_of(folder, preset="ppo", kl={"inReward": {"coefficient": 0}}, advantage={"lambda": 1.0})
    await step.run(groups, number=1, version=0)
    batch, *_ = learner.updates[0]
    assert batch.returns is not None
    for episode, leaf, returns in by_leaf(groups, batch.returns):
        np.testing.assert_allclose(returns[leaf.tokens.mask], episode.reward.score, atol=1e-6)  # type: ignore[union-attr]


async def test_the_leaves_of_an_episode_are_drawn_and_stepped_together(folder: Path) -> None:
    groups = branching()
    step, learner = step_of(folder, preset="ppo", resampling={"kind": "pow", "power": 1.0})
    await step.run(groups, number=1, version=0)
    owners = [episode.id for group in groups for episode in group.episodes for _ in episode.leaves]
    for mini_batch in learner.updates[0][2]:
        for owner in {owners[sequence] for sequence in mini_batch}:
            times = {mini_batch.count(s) for s, other in enumerate(owners) if other == owner}
            assert len(times) == 1, f"the leaves of {owner} are there unequally often"


def test_shares_are_the_same_however_the_batch_is_cut() -> None:
    groups = branching()
    groups[0].episodes[1].leaves[2].tokens.mask[:] = False  # two of three leaves are trained
    batch = layout(groups)
    batch = batch.of(replace(batch.sequences, shares=batch.shares()))
    everything = range(len(batch.episode_of))
    for ranks in (1, 2, 3):
        work = cut_for(batch.sequences, [everything], ranks=ranks, token_budget=16)
        assert {share.counts[0] for share in work.shares} == {LossCounts(int(batch.sequences.mask.sum()), 12.0)}


def test_a_prompt_s_tokens_that_are_trained_on_share_it_alike() -> None:
    """However many episodes and leaves they are in; a prompt of which nothing is trained on counts nowhere."""
    groups = branching()
    groups[0].episodes[1].leaves[2].tokens.mask[:] = False
    for episode in groups[2].episodes:
        for leaf in episode.leaves:
            leaf.tokens.mask[:] = False
    batch = layout(groups)
    shares = batch.shares(of_prompts=True)
    assert shares is not None
    for group in groups[:2]:
        made = sum(int(leaf.tokens.mask.sum()) for episode in group.episodes for leaf in episode.leaves)
        for episode, leaf, found in by_leaf(groups, shares):
            if episode in group.episodes:
                np.testing.assert_allclose(found, leaf.tokens.mask.sum() / made, rtol=1e-6)
    batch = batch.of(replace(batch.sequences, shares=shares))
    for ranks in (1, 2, 3):
        work = cut_for(batch.sequences, [range(len(batch.episode_of))], ranks=ranks, token_budget=16)
        assert [share.counts[0].sequences for share in work.shares] == pytest.approx([2.0] * ranks)


def test_without_branches_nothing_is_weighed() -> None:
    groups = branching()
    for group in groups:
        for episode in group.episodes:
            episode.leaves = episode.leaves[:1]
    assert layout(groups).shares() is None
    per_token, mask = torch.randn(5), torch.ones(5, dtype=torch.bool)
    plain, whole = Segments.from_lengths([2, 3]), Segments.from_lengths([2, 3])
    object.__setattr__(whole, "shares", torch.ones(2))
    counts = LossCounts.of(mask, plain)
    assert aggregate("seqMeanTokenMean", per_token, plain, mask, counts) == aggregate(
        "seqMeanTokenMean", per_token, whole, mask, counts
    )


def test_every_token_of_a_batch_has_the_experts_of_the_pass_over_it() -> None:
    """Two turns and what was told between them, a sibling of whose prompt nothing is known, and one without answer.

    Each token's experts are its place in the sequence twice over, so that what stands elsewhere is seen."""

    def experts(first: int, stop: int) -> ByteArray:
        return np.stack([[[place, 100 + place]] * 3 for place in range(first, stop)]).astype(np.uint8)

    def said(first: int, count: int) -> Tokens:
        """The tokens at these places of a sequence, and what their engine tells of the passes before each."""
        ids, ones = np.arange(first, first + count, dtype=np.int32), np.ones(count, np.int32)
        seen = experts(0, first + count - 1)
        return Tokens.sampled(
            ids, -ones.astype(np.float32), ones, routed_experts=seen[first - 1 :], prompt_experts=seen[: first - 1]
        )

    prompt = (0, 1, 2, 3)
    answer = said(4, 3)
    turns = Leaf(prompt, answer).continued(Tokens.given([7, 8], 1, like=answer), said(9, 4), None)
    bare = Leaf(prompt, replace(said(4, 2), prompt_experts=None))
    silent = Leaf(prompt, said(4, 1)[:0])
    leaves = [turns, bare, silent]
    episodes = [
        Episode(EpisodeId(TRAINING, 0, sample), (leaf,), "stop", reward=RewardResult(0.0))
        for sample, leaf in enumerate(leaves)
    ]
    batch = layout([Group(Prompt(0, 0, 0, "train", "", prompt, None), episodes)]).sequences
    assert batch.routed_experts is not None
    nothing = np.zeros((1, 3, 2), np.uint8)
    expected = [
        experts(0, 12), nothing,  # thirteen tokens, of which the last was read by nobody
        np.zeros((3, 3, 2), np.uint8), experts(3, 5), nothing,
        experts(0, 3), nothing,
    ]  # fmt: skip
    np.testing.assert_array_equal(batch.routed_experts, np.concatenate(expected))
    there = take(batch, np.array([2, 0]))
    np.testing.assert_array_equal(there.routed_experts, np.concatenate([*expected[5:], *expected[:2]]))
    check_batch(there)
