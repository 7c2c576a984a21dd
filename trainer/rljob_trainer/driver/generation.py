"""From a prompt to a scored group: requests to the pool, text, rewards. And the same for validation sets.

Every sample's seed is a pure function of (job seed, prompt ordinal, sample index), so that a run that is repeated or
resumed asks for the same samples again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rljob_trainer.rollout.protocol import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.samples import Group, Prompt, RewardResult, Sample

GREEDY_INDEX = 1 << 20
"""Sample index of a prompt's greedy response (remax): far above any samplesPerPrompt."""


class Pool(Protocol):
    """The engines, as one."""

    @property
    def version(self) -> int:
        """The policy version that new requests start under."""
        ...

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """The results in the order of the requests."""
        ...


class Rewards(Protocol):
    """Scores all samples of a group, in their order."""

    async def score(self, group: Group) -> list[RewardResult]: ...


Decode = Callable[[list[int]], str]
"""Token ids to the text that rewards and people see, without special tokens."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """``n`` samples a prompt; ``greedy``: one more, greedy response that is scored as the prompt's baseline."""

    n: int
    sampling: SamplingSettings
    seed: int
    greedy: bool = False


class GroupRollout:
    """What the pipeline sees as its rollout: generation and reward of one group at a time, many at once."""

    def __init__(self, pool: Pool, rewards: Rewards, decode: Decode, settings: GenerationSettings) -> None:
        self._pool = pool
        self._rewards = rewards
        self._decode = decode
        self._settings = settings
        self._started: dict[int, float] = {}
        self._scoring = 0

    @property
    def serving_version(self) -> int:
        return self._pool.version

    async def run(self, prompt: Prompt) -> Group:
        """Raises ``EngineError`` and ``RewardError``."""
        self._started[prompt.ordinal] = time.monotonic()
        try:
            return await self._run(prompt)
        finally:
            del self._started[prompt.ordinal]

    async def _run(self, prompt: Prompt) -> Group:
        settings = self._settings
        requests = [request_of(prompt, i, settings.sampling, settings.seed) for i in range(settings.n)]
        if settings.greedy:
            requests.append(request_of(prompt, GREEDY_INDEX, greedy(settings.sampling), settings.seed))
        results = await self._pool.generate(requests)
        samples = [sample_of(i, result, self._decode) for i, result in enumerate(results)]
        self._scoring += 1
        try:
            rewards = await self._rewards.score(Group(prompt, samples))
        finally:
            self._scoring -= 1
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward
        group = Group(prompt, samples[: settings.n])
        if settings.greedy:
            group.greedy_score = rewards[-1].score
        return group

    def waiting_for(self) -> str:
        if not self._started:
            return "no group is running"
        oldest = min(self._started, key=lambda ordinal: self._started[ordinal])
        seconds = time.monotonic() - self._started[oldest]
        scoring = f", {self._scoring} of them in reward functions" if self._scoring else ""
        return f"{len(self._started)} groups are running{scoring}; the oldest (prompt {oldest}) for {seconds:.0f} s"


def request_of(prompt: Prompt, index: int, sampling: SamplingSettings, seed: int) -> GenerationRequest:
    """The request of one sample."""
    return GenerationRequest(
        request_id=f"{prompt.ordinal}/{index}",
        prompt_ids=prompt.token_ids,
        sampling=sampling,
        seed=sample_seed(seed, prompt.ordinal, index),
    )


def greedy(sampling: SamplingSettings) -> SamplingSettings:
    """The same lengths and stop tokens, always the likeliest token."""
    return SamplingSettings(0.0, max_tokens=sampling.max_tokens, stop_token_ids=sampling.stop_token_ids)


def sample_of(index: int, result: GenerationResult, decode: Decode) -> Sample:
    """The sample that an engine's result is, with its text."""
    return Sample(
        index=index,
        token_ids=result.token_ids,
        log_probs=result.log_probs,
        versions=result.versions,
        mask=np.ones(len(result.token_ids), dtype=np.bool_),
        finish=result.finish,
        text=decode(result.token_ids.tolist()),
    )


def sample_seed(seed: int, ordinal: int, index: int) -> int:
    """63 bits that belong to one sample of one prompt of one job (three rounds of splitmix64)."""
    mask = (1 << 64) - 1
    state = seed
    for part in (ordinal, index):
        state = (state * 0x9E3779B97F4A7C15 + part + 1) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
