"""A rank knows which policy version each copy of its weights is, and gives none away under another number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cut_for import cut_for

from rljob_trainer.errors import LearnerError, StepGivenUpError
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import LossSettings, SequenceBatch, UpdateRequest
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.learner.work import Share
from rljob_trainer.publish import colocated
from rljob_trainer.rollout.actor import EngineSpec

pytestmark = pytest.mark.integrity


@pytest.fixture
def rank(tied_folder: Path) -> LearnerRank:
    return Fsdp2().start(LearnerSettings(tied_folder, actor=OptimizerSettings(learning_rate=0.1)))


@pytest.fixture
def share(make_batch: Callable[..., SequenceBatch]) -> Share:
    batch = make_batch(groups=2)
    return cut_for(batch, [range(len(batch))], ranks=1, token_budget=1000).shares[0]


def weights(rank: LearnerRank, version: int) -> list[torch.Tensor]:
    with rank.holding(version):
        return [tensor.clone() for _, tensor in rank.named_parameters_for_publish()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_between_two_pulls_it_has_the_versions_first_weights_and_then_those_and_the_next(
    rank: LearnerRank, share: Share
) -> None:
    folder = weights(rank, 0)
    rank.update(share, LossSettings(), UpdateRequest(keep_anchor=True))
    assert same(weights(rank, 0), folder)
    with pytest.raises(LearnerError, match="version 1, but has weights without a version, kept version 0; nothing"):
        weights(rank, 1)
    rank.update(share, LossSettings(), UpdateRequest(continues=True))
    assert same(weights(rank, 0), folder)
    rank.call_present(1)
    assert same(weights(rank, 0), folder)
    assert not same(weights(rank, 1), folder)


def test_without_a_copy_an_update_leaves_no_version_until_it_gets_a_number(rank: LearnerRank, share: Share) -> None:
    rank.update(share, LossSettings())
    with pytest.raises(LearnerError, match="the weights of version 0, but has weights without a version; nothing"):
        weights(rank, 0)
    rank.call_present(1)
    weights(rank, 1)


def test_an_update_that_was_the_critics_alone_or_was_given_up_leaves_the_version(
    tied_folder: Path, share: Share
) -> None:
    rank = Fsdp2().start(LearnerSettings(tied_folder, critic=OptimizerSettings()))
    folder = weights(rank, 0)
    rank.update(share, LossSettings(), UpdateRequest(update_actor=False, update_critic=True))
    assert same(weights(rank, 0), folder)
    rank.giving_up.ask()
    with pytest.raises(StepGivenUpError):
        rank.update(share, LossSettings())
    assert same(weights(rank, 0), folder)


def test_a_number_belongs_to_one_set_of_weights(rank: LearnerRank, share: Share) -> None:
    rank.call_present(2)
    rank.call_present(2)  # a publication that is tried again
    with pytest.raises(LearnerError, match="as version 1, but has already used that number or a later one"):
        rank.call_present(1)
    rank.update(share, LossSettings(), UpdateRequest(keep_anchor=True))
    with pytest.raises(LearnerError, match="as version 2, but has already used that number or a later one"):
        rank.call_present(2)


def test_weights_that_were_read_are_no_version_until_they_get_a_number(rank: LearnerRank, tmp_path: Path) -> None:
    rank.call_present(3)
    rank.save(tmp_path)
    rank.load(tmp_path)
    with pytest.raises(LearnerError, match="the weights of version 3, but has weights without a version"):
        weights(rank, 3)


def test_a_colocated_engine_is_told_no_version_that_the_weights_are_not(
    rank: LearnerRank, share: Share, tied_folder: Path
) -> None:
    colocated.start_engine(rank, EngineSpec("torch", str(tied_folder), max_context=64))
    try:
        colocated.take_weights(rank, 1, True)
        rank.update(share, LossSettings())
        with pytest.raises(LearnerError, match="was asked for the weights of version 1"):
            colocated.take_weights(rank, 1, False)
        colocated.take_weights(rank, 2, True)
        assert colocated.call_engine(rank, "status").version == 2
    finally:
        colocated.call_engine(rank, "close")
