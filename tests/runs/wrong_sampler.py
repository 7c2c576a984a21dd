"""`rljob` whose engines sample some prompts at another temperature than the job's, and report log-probs of that one.

`python wrong_sampler.py run job.yaml ...` with WRONG_SAMPLER in the environment, as JSON: ``temperature``; ``first``
and ``last``, the ordinals of the prompts it holds for; ``times``, how often each of them is sampled wrongly.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rljob_trainer import cli
from rljob_trainer.episodes import group
from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.episode import Prompt
from rljob_trainer.episodes.identity import TRAINING
from rljob_trainer.episodes.requests import SamplingSettings

WRONG = {"first": 0, "last": 10**9, "times": 10**9} | json.loads(os.environ["WRONG_SAMPLER"])
asked: Counter[int] = Counter()
right = group.tasks_of


def wrong(
    prompt: Prompt, samples: Iterable[int], sampling: SamplingSettings, seed: int, purpose: str = TRAINING
) -> list[Task]:
    asked[prompt.ordinal] += 1
    if WRONG["first"] <= prompt.ordinal <= WRONG["last"] and asked[prompt.ordinal] <= WRONG["times"]:
        sampling = replace(sampling, temperature=WRONG["temperature"])
    return right(prompt, samples, sampling, seed, purpose)


group.tasks_of = wrong

if __name__ == "__main__":
    sys.exit(cli.main())
