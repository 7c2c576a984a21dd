"""Gradients and streams of learners in any layout, to be held against each other.

Called in ranks of their own (the fixture ``ranks``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.learner.work import RankScores, cut


def plain(folder: Path, **changes: Any) -> LearnerSettings:
    settings = LearnerSettings(folder, critic=OptimizerSettings(), reference=True, micro_batch_tokens=1 << 20)
    return replace(settings, **changes)


def gradients(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, loss: LossSettings
) -> dict[str, torch.Tensor]:
    """Whole gradients of all models after one mini-batch, some way off the reference, where a KL is not zero."""
    backend = Fsdp2()
    learner = backend.start(settings, rank, address, timeout_seconds=20)
    placement, rules = backend.placement(settings), backend.rules(settings)
    share = cut(batch, [range(len(batch))], placement, rules).sent()[rank]
    found = {}
    for trained in learner._trained:
        with torch.no_grad():
            for number, parameter in enumerate(trained.module.parameters()):
                parameter.mul_(1 + 0.05 * (number % 3))
            if trained is learner.critic:  # whose head begins at zero
                trained.module.head.weight.add_(0.1)  # type: ignore[operator,union-attr]
        learner.gradient([trained], share, 0, loss)
        for name, parameter in trained.module.named_parameters():
            assert parameter.grad is not None, name
            found[f"{trained.name}.{name}"] = full(parameter.grad).clone()
    return found


def scores(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, wanted: ScoreRequest
) -> RankScores:
    backend = Fsdp2()
    learner = backend.start(settings, rank, address, timeout_seconds=20)
    if learner.critic is not None:
        with torch.no_grad():
            learner.critic.module.head.weight.add_(0.1)  # type: ignore[operator,union-attr]
    with torch.no_grad():
        for parameter in learner.actor.module.parameters():
            parameter.mul_(1.1)
    work = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings))
    learner._untouched.keep()
    return learner.score(work.sent()[rank], wanted)


def distances(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
    """Of each parameter: norm of the difference over the norm, or over a hundredth of the largest norm of all."""
    assert ours.keys() == theirs.keys()
    least = 0.01 * max(float(value.norm()) for value in theirs.values())
    for name, value in theirs.items():
        difference = float((ours[name].double() - value.double()).norm())
        yield name, difference / max(float(value.norm()), least)
