"""`rljob` whose engines are wrong in a known way: `python -m benchmarks.learning.sampler run job.yaml ...`.

WRONG_SAMPLER in the environment says how, as JSON: ``temperature`` (sampled at it, and reported at it),
``wrong_share`` and ``wrong_by`` (that share of the reported log-probs gets a normal error of so many nats). Only
training samples are touched; what validates and what scores is right.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from rljob_trainer import cli
from rljob_trainer.driver import assemble
from rljob_trainer.episodes import group
from rljob_trainer.episodes.environment import LanguageModel, Task
from rljob_trainer.episodes.episode import Episode, Prompt
from rljob_trainer.episodes.identity import TRAINING
from rljob_trainer.episodes.requests import SamplingSettings
from rljob_trainer.episodes.single_turn import SingleTurn

SAID = json.loads(os.environ.get("WRONG_SAMPLER", "{}"))
right_tasks = group.tasks_of
random = np.random.default_rng(0)


def tasks_of(
    prompt: Prompt, samples: Iterable[int], sampling: SamplingSettings, seed: int, purpose: str = TRAINING
) -> list[Task]:
    sampling = replace(sampling, temperature=SAID.get("temperature", sampling.temperature))
    return right_tasks(prompt, samples, sampling, seed, purpose)


class WrongLogProbs(SingleTurn):
    """Adds the error to what engines report of training samples."""

    async def play(
        self, tasks: Sequence[Task], model: LanguageModel, ended: Callable[[int, Episode], None] | None = None
    ) -> list[Episode]:
        episodes = await super().play(tasks, model)
        for episode in episodes if tasks[0].id.purpose == TRAINING else []:
            for leaf in episode.leaves:
                said = leaf.tokens.log_probs
                hit = random.random(len(said)) < SAID.get("wrong_share", 0.0)
                error = random.normal(0.0, SAID.get("wrong_by", 0.0), len(said))
                # A probability above 1 would be found at once.
                wrong = np.minimum(said + hit * error, 0.0).astype(np.float32)
                leaf.tokens, leaf.turns = replace(leaf.tokens, log_probs=wrong), ()
        for position, episode in enumerate(episodes if ended is not None else []):
            ended(position, episode)
        return episodes


if __name__ == "__main__":
    group.tasks_of, assemble.SingleTurn = tasks_of, WrongLogProbs
    sys.exit(cli.main())
