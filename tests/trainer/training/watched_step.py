"""A training step in this process: a learner that remembers what it was asked, a small job, and scored groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from cut_for import cut_for
from small_episodes import an_episode

from rljob_api import resolve
from rljob_api.resolved import ResolvedSpec
from rljob_api.spec.job import RLJob
from rljob_trainer.episodes.episode import Group, Prompt, RewardResult
from rljob_trainer.learner.metrics import update_result, usage_metrics
from rljob_trainer.learner.protocol import (
    ACTOR_ALONE,
    LossSettings,
    ScoreRequest,
    ScoreResult,
    SequenceBatch,
    UpdateRequest,
    UpdateResult,
)
from rljob_trainer.learner.rank import LearnerRank

SCORES = [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]


class Watched:
    """A learner of one rank without Ray, which remembers what it was asked."""

    def __init__(self, rank: LearnerRank) -> None:
        self.rank = rank
        self.scored: list[dict[str, Any]] = []
        self.updates: list[tuple[SequenceBatch, LossSettings, list[list[int]], bool, bool]] = []
        self.continued: list[bool] = []
        self.kept: list[bool] = []
        self.results: list[UpdateResult] = []

    async def score(self, batch: SequenceBatch, request: ScoreRequest) -> ScoreResult:
        self.scored.append({field.name for field in fields(request) if getattr(request, field.name) is True})
        work = cut_for(batch, [range(len(batch))], ranks=1, token_budget=4096, share_prefixes=True)
        part = self.rank.score(work.shares[0], request)
        return ScoreResult(
            **{
                name: work.merge(batch, [stream], per_sequence=name == "final_values")
                for name, stream in part.streams.items()
            },
            metrics=usage_metrics([part.usage]),
        )

    async def update(
        self,
        batch: SequenceBatch,
        loss: LossSettings,
        mini_batches: Sequence[Sequence[int]],
        request: UpdateRequest = ACTOR_ALONE,
    ) -> UpdateResult:
        self.continued.append(request.continues)
        self.kept.append(request.keep_anchor)
        minis = [list(m) for m in mini_batches]
        self.updates.append((batch, loss, minis, request.update_actor, request.update_critic))
        work = cut_for(batch, mini_batches, ranks=1, token_budget=4096, share_prefixes=True)
        report = self.rank.update(work.shares[0], loss, request)
        self.results.append(update_result([report], work, batch))
        return self.results[-1]


def spec_of(reward: dict[str, Any] | None = None, **algorithm: Any) -> ResolvedSpec:
    document = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "test"},
        "spec": {
            "model": {
                "random": {"hiddenSize": 32, "layers": 1, "heads": 1, "tokenizer": {"characters": "0123456789+-="}}
            },
            "data": {"train": {"task": {"type": "copy"}}},
            "reward": {"functions": [{"type": "exactMatch"}], **(reward or {})},
            "algorithm": {"preset": "grpo", **algorithm},
            "batch": {"groups": 3, "samplesPerPrompt": 4},
        },
    }
    return resolve(RLJob.model_validate(document)).spec


def groups_of(scores: Sequence[Sequence[float]], seed: int = 0, *, version: int = 0) -> list[Group]:
    """Random tokens with responses of 1 to 5 tokens; the last sample of each group is truncated."""
    rng = np.random.default_rng(seed)
    groups = []
    for number, row in enumerate(scores):
        prompt = Prompt(number, 0, number, "copy", "", tuple(rng.integers(4, 14, 3).tolist()), None)
        episodes = []
        for index, score in enumerate(row):
            length = int(rng.integers(1, 6))
            episodes.append(
                an_episode(
                    prompt,
                    index,
                    [version] * length,
                    ids=rng.integers(4, 14, length),
                    log_probs=rng.normal(-2.6, 0.1, length),
                    finish="length" if index == len(row) - 1 else "stop",
                    reward=RewardResult(score, {"exactMatch": score}, correct=score == 1),
                )
            )
        groups.append(Group(prompt, episodes))
    return groups
