"""A batch that is not what was made is refused before anything is computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_episodes import an_episode

from rljob_trainer.episodes.episode import Group, Prompt, RewardResult
from rljob_trainer.episodes.receipts import ReceiptError, digest_of, receipt_of
from rljob_trainer.episodes.requests import GenerationRequest, SamplingSettings
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


@pytest.mark.parametrize("stream", ["ids", "log_probs"])
@pytest.mark.parametrize("sample", range(4))
def test_a_stream_that_is_not_the_samples_own_is_named(stream: str, sample: int) -> None:
    groups = [group(4), group(5)]
    batch = layout(groups)
    own = groups[sample // 2].episodes[sample % 2].leaves[0].tokens
    getattr(own, stream)[1] += 1
    with pytest.raises(IntegrityError, match=f"the row of .* of sample {sample % 2} of prompt {4 + sample // 2}"):
        check_layout(batch, groups)


def test_a_batch_that_lacks_a_row_or_has_another_score_is_refused() -> None:
    groups = [group(4), group(5)]
    with pytest.raises(IntegrityError, match="the row of token ids of sample 0 of prompt 5"):
        check_layout(layout(groups[:1]), groups)
    with pytest.raises(IntegrityError, match="of sample 1 of prompt 4 in the batch is not"):
        check_layout(layout(groups), groups[:1])
    batch = layout(groups)
    batch.scores[2] = 7
    with pytest.raises(IntegrityError, match="the score of sample 0 of prompt 5"):
        check_layout(batch, groups)
    batch.offsets[2] += 1
    batch.scores[2] = 0
    with pytest.raises(IntegrityError, match="the row of token ids of sample 1 of prompt 4"):
        check_layout(batch, groups)


def test_a_log_prob_that_changed_after_it_arrived_is_the_receipts_to_name() -> None:
    groups = [group(4)]
    episode = groups[0].episodes[1]
    (leaf,) = episode.leaves
    request = GenerationRequest(episode.id, leaf.prompt_ids, SamplingSettings(), 0)
    episode.leaves = (replace(leaf, receipt=receipt_of(request, leaf.tokens)),)
    check_groups(groups, 3)
    leaf.tokens.log_probs[0] = np.nan
    with pytest.raises(ReceiptError, match="the log-probs of sample 1 of prompt 4 differ"):
        check_groups(groups, 3)
