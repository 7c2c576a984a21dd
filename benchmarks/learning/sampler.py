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
from rljob_trainer.rollout.protocol import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.samples import Prompt, Sample

SAID = json.loads(os.environ.get("WRONG_SAMPLER", "{}"))
right_requests, right_samples = generation.requests_of, generation.samples_of
random = np.random.default_rng(0)


def requests_of(
    prompt: Prompt, indices: Iterable[int], sampling: SamplingSettings, seed: int, prefix: str = ""
) -> list[GenerationRequest]:
    sampling = replace(sampling, temperature=SAID.get("temperature", sampling.temperature))
    return right_requests(prompt, indices, sampling, seed, prefix)


def samples_of(
    results: Sequence[GenerationResult], decode: generation.Decode, indices: Iterable[int] | None = None
) -> list[Sample]:
    samples = right_samples(results, decode, indices)
    for sample in samples:
        hit = random.random(len(sample.log_probs)) < SAID.get("wrong_share", 0.0)
        error = random.normal(0.0, SAID.get("wrong_by", 0.0), len(sample.log_probs))
        # A probability above 1 would be found at once.
        sample.log_probs = np.minimum(sample.log_probs + hit * error, 0.0).astype(np.float32)
    return samples


if __name__ == "__main__":
    generation.requests_of, generation.samples_of = requests_of, samples_of
    sys.exit(cli.main())
