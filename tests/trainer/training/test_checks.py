"""A batch that is not what was made is refused before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
from small_episodes import an_episode

from rljob_trainer.episodes.episode import Group, Prompt, RewardResult
from rljob_trainer.episodes.receipts import digest_of
from rljob_trainer.errors import EngineError, IntegrityError
from rljob_trainer.training.batch import layout
from rljob_trainer.training.checks import TrainedPrompts, check_groups, check_layout


def group(ordinal: int, version: int = 3) -> Group:
    prompt = Prompt(ordinal, 0, ordinal, "train", "", (1, 2), None)
    episodes = [an_episode(prompt, index, [version] * 3, ids=[ordinal, index, 9]) for index in range(2)]
    for index, episode in enumerate(episodes):
        episode.reward = RewardResult(float(index), of=(episode.id, digest_of(episode)))
    return Group(prompt, episodes)


def test_a_sound_batch_passes() -> None:
    groups = [group(4), group(5)]
    TrainedPrompts().check(groups, 1)
    check_groups(groups, 3)
    check_layout(layout(groups), groups)


def test_a_group_that_is_there_twice_is_refused() -> None:
    with pytest.raises(IntegrityError, match="prompt 4 is in the batch of step 2 twice"):
        TrainedPrompts().check([group(4), group(5), group(4)], 2)


def test_a_group_that_was_trained_is_refused_for_many_steps() -> None:
    trained = TrainedPrompts()
    for step in range(1, 60):
        trained.check([group(step)], step)
        trained.trained([group(step)], step)
    with pytest.raises(IntegrityError, match=r"prompt 7 would be trained on again in step 60: .* used in step 7"):
        trained.check([group(7)], 60)


def test_rewards_of_siblings_that_changed_places_are_refused() -> None:
    groups = [group(4)]
    first, second = groups[0].episodes
    first.reward, second.reward = second.reward, first.reward
    with pytest.raises(IntegrityError, match="the reward of sample 0 of prompt 4 belongs to sample 1 of prompt 4"):
        check_groups(groups, 3)


def test_a_version_that_was_never_published_is_refused() -> None:
    with pytest.raises(IntegrityError, match=r"sample 0 of prompt 4 has tokens of version 3.*newest.*version is 2"):
        check_groups([group(4)], 2)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, 0.02])
def test_a_log_prob_that_no_sampled_token_can_have_is_refused(value: float) -> None:
    groups = [group(4)]
    groups[0].episodes[1].leaves[0].tokens.log_probs[2] = value
    with pytest.raises(EngineError, match=r"response token 2 of sample 1 of prompt 4 is .* by the engine") as refused:
        check_groups(groups, 3)
    assert refused.value.exit_code == 75
    groups[0].episodes[1].leaves[0].tokens.mask[2] = False  # a tool's output, which no engine sampled
    check_groups(groups, 3)


def test_a_mask_that_moved_is_named() -> None:
    groups = [group(4), group(5)]
    batch = layout(groups)
    batch.sequences.mask[3] = False
    with pytest.raises(IntegrityError, match="the mask of sample 1 of prompt 4"):
        check_layout(batch, groups)
