"""What changes in a rank's memory outside of updates is named, and so is what an update does not reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cut_for import cut_for
from whole_state import parts

from rljob_trainer.errors import LearnerError
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch, UpdateRequest
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.learner.work import RankReport, Share

MATRIX = "language_model.model.layers.1.mlp.down_proj.weight"
LOSS = LossSettings()


@pytest.fixture
def rank(tied_folder: Path) -> LearnerRank:
    settings = OptimizerSettings(learning_rate=1e-3, weight_decay=0.0)
    return Fsdp2().start(LearnerSettings(tied_folder, actor=settings, critic=settings, reference=True))


@pytest.fixture
def share(make_batch: Callable[..., SequenceBatch]) -> Share:
    batch = make_batch(groups=2)
    return cut_for(batch, [range(len(batch))], ranks=1, token_budget=1000).shares[0]


def update(rank: LearnerRank, share: Share) -> RankReport:
    return rank.update(share, LOSS, UpdateRequest(update_critic=True))


def tensor_of(rank: LearnerRank, name: str) -> torch.Tensor:
    """By the name that messages give it."""
    return next(t for trained in rank._trained for n, t in parts(trained.state()).items() if n == name)


def test_updates_scores_and_a_resume_are_no_change(rank: LearnerRank, share: Share, tmp_path: Path) -> None:
    for _ in range(2):
        rank.score(share, ScoreRequest(log_probs=True, reference=True, values=True))
        assert update(rank, share).notes == []
    rank.save(tmp_path)
    assert update(rank, share).notes == []
    rank.load(tmp_path)
    assert update(rank, share).notes == []


@pytest.mark.parametrize("model", ["actor", "critic"])
@pytest.mark.parametrize("which", ["model.", "optimizer."])
def test_a_tensor_that_changes_between_updates_is_named(
    rank: LearnerRank, share: Share, model: str, which: str
) -> None:
    update(rank, share)
    names = [name for trained in rank._trained for name, tensor in parts(trained.state()).items() if tensor.ndim == 2]
    name = next(name for name in names if name.startswith(f"{model}.{which}") and "down_proj" in name)
    changed = tensor_of(rank, name)
    with torch.no_grad():
        changed.view(-1)[7] = changed.view(-1)[7] + 1e-3
    with pytest.raises(LearnerError, match=f"learner rank 0: {name} changed in memory after the last update"):
        update(rank, share)


def test_moments_of_which_two_rows_change_places_are_named(rank: LearnerRank, share: Share) -> None:
    """Their sum stays what it was."""
    update(rank, share)
    name = next(n for n, t in parts(rank.actor.state()).items() if n.startswith("actor.optimizer.") and t.ndim == 2)
    rows = tensor_of(rank, name)
    with torch.no_grad():
        rows[[0, 1]] = rows[[1, 0]].clone()
    with pytest.raises(LearnerError, match=f"{name} changed in memory"):
        update(rank, share)


def test_a_reference_that_moves_is_named(rank: LearnerRank, share: Share) -> None:
    update(rank, share)
    assert rank._reference is not None
    with torch.no_grad():
        dict(rank._reference.named_parameters())[MATRIX][0, 0] += 1.0
    with pytest.raises(LearnerError, match=f"the reference has changed: {MATRIX}"):
        update(rank, share)


def test_a_matrix_that_no_gradient_reaches_is_told_of_once(rank: LearnerRank, share: Share) -> None:
    """After two updates: of a critic whose head begins at 0 the first one moves the head alone."""
    parameter = dict(rank.actor.module.named_parameters())[MATRIX]
    parameter.register_hook(torch.zeros_like)
    assert update(rank, share).notes == []
    (note,) = update(rank, share).notes
    assert f"did not change actor.model.{MATRIX}: no gradient reaches them" in note
    assert update(rank, share).notes == []


def test_a_step_that_moves_nothing_is_told_of(rank: LearnerRank, share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    update(rank, share)
    for rule, _ in rank.actor.optimizer._rules:
        monkeypatch.setattr(rule, "apply", lambda *_: None)
    (note,) = update(rank, share).notes
    assert "the actor's optimizer steps changed none of its" in note
    assert note.endswith("nothing is learned")
