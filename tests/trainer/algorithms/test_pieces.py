"""A CPU walks over a long batch in pieces: the comparisons with the oracles hold there, too.

The tests that are named here run a second time, on the same random batches, with pieces of a few tokens: most hold a
sequence or two, some a sequence that is longer than a piece should be, and all of them share their scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_actor_and_critic_loss as losses
import test_correction as correction
import test_estimators as estimators
import test_kl_in_reward_and_controllers as kl
import test_policy_losses as policies
import test_scan as scan
import test_segments as reductions
import torch
from hypothesis import given
from ragged import Ragged, batches

from rljob_trainer.algorithms import Segments, segments

PIECE = 7

test_reductions = reductions.test_reductions_over_kept_tokens
test_positions = reductions.test_positions_spread_and_last_tokens
test_scan = scan.test_lengths_around_a_block
test_gae = estimators.test_gae_is_the_exponential_sum_of_temporal_differences
test_gae_without_bootstrap = estimators.test_gae_without_bootstrap_ends_in_zero
test_group_estimators = estimators.test_group_estimators
test_maxrl = estimators.test_maxrl
test_gdpo = estimators.test_gdpo_normalises_each_reward_alone
test_return_estimators = estimators.test_return_estimators
test_whitening_is_a_choice = estimators.test_whitening_is_a_choice
test_token_baselines = estimators.test_token_baselines
test_weights = correction.test_weights
test_rejection = correction.test_rejection
test_diagnostics = correction.test_diagnostics
test_diagnostics_of_weights = correction.test_diagnostics_of_weights
test_diagnostics_of_rejection = correction.test_diagnostics_of_rejection
test_kl_in_reward = kl.test_rewards_pay_for_the_kl_token_by_token
test_policy_losses = policies.test_value
test_aggregation = losses.test_aggregation
test_actor_loss = losses.test_the_actor_loss_is_the_sum_of_its_terms
test_critic_loss = losses.test_the_critic_loss


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "PIECE_TOKENS", PIECE)
        yield


@given(batch=batches())
def test_pieces_are_whole_sequences_that_follow_each_other(batch: Ragged) -> None:
    pieces = batch.segments.pieces
    assert [i for p in pieces for i in range(len(batch.lengths))[p.sequences]] == list(range(len(batch.lengths)))
    assert [t for p in pieces for t in range(batch.segments.tokens)[p.tokens]] == list(range(batch.segments.tokens))
    for piece in pieces:
        lengths = batch.lengths[piece.sequences]
        assert piece.segments.lengths.tolist() == lengths
        assert (piece.segments.tokens, piece.segments.longest) == (sum(lengths), max(lengths))
        assert sum(lengths) <= PIECE or len([n for n in lengths if n]) == 1


def test_the_batches_here_are_cut() -> None:
    assert len(Segments.from_lengths([3, 4, 0, 9, 5]).pieces) == 3
    assert [(s.start, s.stop) for s in segments.parts(torch.zeros(16))] == [(0, 7), (7, 14), (14, 16)]
