"""`rljob` whose engines are wrong in a known way: `python -m benchmarks.learning.sampler run job.yaml ...`.

WRONG_SAMPLER in the environment says how, as JSON: ``temperature`` (sampled at it, and reported at it),
``wrong_share`` and ``wrong_by`` (that share of the reported log-probs gets a normal error of so many nats). Only
training samples are touched; what validates and what scores is right.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rljob_trainer import cli
from rljob_trainer.driver import generation
from rljob_trainer.episodes.episode import Episode, Prompt
from rljob_trainer.episodes.identity import TRAINING
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings

SAID = json.loads(os.environ.get("WRONG_SAMPLER", "{}"))
right_requests, right_episodes = generation.requests_of, generation.episodes_of
random = np.random.default_rng(0)


def requests_of(
    prompt: Prompt, indices: Iterable[int], sampling: SamplingSettings, seed: int, purpose: str = TRAINING
) -> list[GenerationRequest]:
    sampling = replace(sampling, temperature=SAID.get("temperature", sampling.temperature))
    return right_requests(prompt, indices, sampling, seed, purpose)


def episodes_of(
    requests: Sequence[GenerationRequest], results: Sequence[GenerationResult], decode: generation.Decode
) -> list[Episode]:
    episodes = right_episodes(requests, results, decode)
    for episode in episodes:
        for leaf in episode.leaves:
            said = leaf.tokens.log_probs
            hit = random.random(len(said)) < SAID.get("wrong_share", 0.0)
            error = random.normal(0.0, SAID.get("wrong_by", 0.0), len(said))
            # A probability above 1 would be found at once.
            wrong = np.minimum(said + hit * error, 0.0).astype(np.float32)
            leaf.tokens = replace(leaf.tokens, log_probs=wrong)
    return episodes


if __name__ == "__main__":
    generation.requests_of, generation.episodes_of = requests_of, episodes_of
    sys.exit(cli.main())
