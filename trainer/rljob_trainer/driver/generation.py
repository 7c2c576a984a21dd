"""From a prompt to a scored group: requests to the pool, text, rewards. And the same for validation sets.

Every sample's seed is a pure function of (job seed, prompt ordinal, sample index), so that a run that is repeated or
resumed asks for the same samples again.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from rljob_trainer.episodes.episode import Episode, Group, Prompt, RewardResult, single_turn
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.episodes.tokens import NOTHING, Tokens
from rljob_trainer.waits import NEVER, Waits

_64_BITS = (1 << 64) - 1
GREEDY_INDEX = 1 << 20
"""Index of a prompt's greedy response (remax): far above any samplesPerPrompt."""


class Pool(Protocol):
    """The engines, as one."""

    @property
    def version(self) -> int:
        """The policy version that new requests start under."""
        ...

    @property
    def finished_at(self) -> float:
        """When a request was finished last, in the time of the running event loop."""
        ...

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Callable[[int, GenerationResult], None] | None = None
    ) -> list[GenerationResult]:
        """The results in the order of the requests; ``finished`` is called with each and its position when it is
        there."""
        ...

    async def begun(self) -> list[GenerationRequest]:
        """Every request that ``generate`` has not returned, with the tokens it has by now."""
        ...

    def progress(self) -> list[int]:
        """Of each group that is under way, how many of its requests are finished."""
        ...

    def waiting_for(self) -> str:
        """In a few words: where the oldest request runs, and what keeps others from an engine."""
        ...


class Rewards(Protocol):
    """Scores samples of a prompt."""

    def in_processes(self, source: str) -> bool:
        """Whether anything that scores this data source is computed elsewhere, and so can begin with the first sample
        while its siblings run on. What is computed here costs less for a whole group at once."""
        ...

    async def score(self, group: Group) -> list[RewardResult]:
        """One result per sample, in their order."""
        ...


Decode = Callable[[list[list[int]]], list[str]]
"""Token ids of several responses to the texts that rewards and people see, without special tokens."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """``n`` samples a prompt; ``greedy``: one more, greedy response that is scored as the prompt's baseline."""

    n: int
    sampling: SamplingSettings
    seed: int
    greedy: bool = False


class GroupRollout:
    """What the pipeline sees as its rollout: generation and reward of one group at a time, many at once."""

    def __init__(
        self,
        pool: Pool,
        rewards: Rewards,
        decode: Decode,
        settings: GenerationSettings,
        waits: Waits | None = None,
        reward_seconds: float | None = None,
    ) -> None:
        """``reward_seconds``: what a reward function may take for one sample."""
        self._waits = waits or Waits()
        self._rewarding = ExitStack()
        self._reward_seconds = reward_seconds
        self._pool = pool
        self._rewards = rewards
        self._decode = decode
        self._settings = settings
        self._made: dict[int, list[GenerationResult]] = {}
        """Groups whose rewards are being computed."""
        self.restored: dict[int, dict[int, Tokens]] = {}
        """What an earlier process had of prompts that will be asked again."""
        self._scoring: dict[int, float] = {}
        """Since when, by ordinal."""
        self._scored_at = NEVER

    @property
    def serving_version(self) -> int:
        return self._pool.version

    @property
    def finished_at(self) -> float:
        """When a sample came from an engine, or a group from the reward functions, whichever was later."""
        return max(self._pool.finished_at, self._scored_at)

    async def run(self, prompt: Prompt) -> Group:
        """Raises ``EngineError`` and ``RewardError``."""
        try:
            return await self._run(prompt)
        finally:
            self._made.pop(prompt.ordinal, None)

    async def _run(self, prompt: Prompt) -> Group:
        settings = self._settings
        requests = requests_of(prompt, range(settings.n), settings.sampling, settings.seed)
        if settings.greedy:
            requests += requests_of(prompt, [GREEDY_INDEX], greedy(settings.sampling), settings.seed)
        if begun := self.restored.pop(prompt.ordinal, None):
            requests = [replace(request, begun=begun.get(request.id.sample, NOTHING)) for request in requests]
        if len(requests) > 1 and self._rewards.in_processes(prompt.source):
            episodes, rewards = await self._score_as_they_finish(prompt, requests)
        else:
            results = self._made[prompt.ordinal] = await self._pool.generate(requests)
            episodes = episodes_of(requests, results, self._decode)
            with self._in_reward_functions(prompt.ordinal):
                rewards = await self._rewards.score(Group(prompt, episodes))
        self._scored_at = asyncio.get_running_loop().time()
        for episode, reward in zip(episodes, rewards, strict=True):
            episode.reward = reward
            episode.text = ""  # as long as the tokens, and made of them when somebody wants to read it
        group = Group(prompt, episodes[: settings.n])
        if settings.greedy:
            group.greedy_score = rewards[-1].score
        return group

    async def _score_as_they_finish(
        self, prompt: Prompt, requests: Sequence[GenerationRequest]
    ) -> tuple[list[Episode], list[RewardResult]]:
        """The first sample's reward does not wait for the last sample, and one that cannot be scored ends the rest.
        Samples that arrive in one turn of the event loop are scored together."""
        loop = asyncio.get_running_loop()
        arrived: dict[int, GenerationResult] = {}
        begun: set[int] = set()
        scoring: list[asyncio.Task[list[tuple[Episode, RewardResult]]]] = []
        over = False

        def arrive(position: int, result: GenerationResult) -> None:
            if position not in begun:
                begun.add(position)
                if not arrived:
                    loop.call_soon(begin)
                arrived[position] = result

        def begin() -> None:
            if arrived and not over:
                scoring.append(asyncio.create_task(self._score_some(prompt, requests, dict(sorted(arrived.items())))))
                scoring[-1].add_done_callback(ended)
            arrived.clear()

        def ended(task: asyncio.Task[list[tuple[Episode, RewardResult]]]) -> None:
            if not task.cancelled() and task.exception() is not None:
                generating.cancel()

        generating = asyncio.create_task(self._pool.generate(requests, arrive))
        try:
            try:
                results = self._made[prompt.ordinal] = await generating
            except asyncio.CancelledError:
                for task in scoring:
                    if task.done() and not task.cancelled():
                        task.result()
                raise
            for position, result in enumerate(results):
                arrive(position, result)  # The last ones may not have been told of yet.
            begin()
            with self._in_reward_functions(prompt.ordinal):
                scored = [pair for part in await asyncio.gather(*scoring) for pair in part]
        finally:
            over = True
            generating.cancel()
            for task in scoring:
                task.cancel()
        scored.sort(key=lambda pair: pair[0].id.sample)
        return [episode for episode, _ in scored], [reward for _, reward in scored]

    async def _score_some(
        self, prompt: Prompt, requests: Sequence[GenerationRequest], results: Mapping[int, GenerationResult]
    ) -> list[tuple[Episode, RewardResult]]:
        """``results`` by their request's position."""
        episodes = episodes_of([requests[position] for position in results], list(results.values()), self._decode)
        return list(zip(episodes, await self._rewards.score(Group(prompt, episodes)), strict=True))

    @contextmanager
    def _in_reward_functions(self, ordinal: int) -> Iterator[None]:
        if not self._scoring:
            # One wait for all of them: there may be thousands.
            self._rewarding.enter_context(self._waits.wait("rollout", self._in_rewards))
        self._scoring[ordinal] = time.monotonic()
        try:
            yield
        finally:
            del self._scoring[ordinal]
            if not self._scoring:
                self._rewarding.close()

    async def begun(self) -> dict[int, dict[int, Tokens]]:
        """What there is by now of groups that ``run`` has not returned, by ordinal and index of the sample."""
        groups: dict[int, dict[int, Tokens]] = {}
        for request in await self._pool.begun():
            if request.id.purpose == TRAINING and len(request.begun):
                groups.setdefault(request.id.ordinal, {})[request.id.sample] = request.begun
        for made_for, results in self._made.items():
            groups[made_for] = {result.id.sample: result.tokens for result in results}
        # Those that are not asked yet are as an earlier process left them.
        return {**self.restored, **groups}

    def waiting_for(self, finished: int, wanted: int) -> str:
        # Those groups of a batch that are still under way are taken to be the ones that are furthest.
        n = self._settings.n
        parts = [min(part, n) for part in self._pool.progress()] + [n] * len(self._scoring)
        made = finished * n + sum(heapq.nlargest(wanted - finished, parts))
        said = [f"{made}/{wanted * n} samples"]
        if parts[: len(parts) - len(self._scoring)] or not self._scoring:
            said.append(self._pool.waiting_for())
        if self._scoring:
            said.append(self._in_rewards())
        return "; ".join(said)

    def _in_rewards(self) -> str:
        oldest = min(self._scoring, key=lambda ordinal: self._scoring[ordinal])
        seconds = time.monotonic() - self._scoring[oldest]
        limit = "" if self._reward_seconds is None else f" (limit {self._reward_seconds:g} s a sample)"
        groups = "1 group" if len(self._scoring) == 1 else f"{len(self._scoring)} groups"
        return f"{groups} in reward functions, the oldest (prompt {oldest}) for {seconds:.0f} s{limit}"


def requests_of(
    prompt: Prompt, indices: Iterable[int], sampling: SamplingSettings, seed: int, purpose: str = TRAINING
) -> list[GenerationRequest]:
    """The requests of some of a prompt's samples."""
    return [
        GenerationRequest(EpisodeId(purpose, prompt.ordinal, index), prompt.token_ids, sampling, own)
        for index, own in zip(indices, sample_seeds(seed, prompt.ordinal, indices), strict=True)
    ]


def ordinals_of(ids: Iterable[EpisodeId]) -> list[int]:
    """The prompts of training among them, each once."""
    return sorted({id.ordinal for id in ids if id.purpose == TRAINING})


def greedy(sampling: SamplingSettings) -> SamplingSettings:
    """The same lengths and stop tokens, always the likeliest token."""
    return SamplingSettings(0.0, max_tokens=sampling.max_tokens, stop_token_ids=sampling.stop_token_ids)


def episodes_of(
    requests: Sequence[GenerationRequest], results: Sequence[GenerationResult], decode: Decode
) -> list[Episode]:
    """What requests of one turn came to, with the texts of the responses."""
    texts = decode([result.tokens.ids.tolist() for result in results])
    return [
        single_turn(
            request.id,
            request.prompt_ids,
            result.tokens,
            result.finish,
            receipt=result.receipt,
            text=text,
            seconds=result.seconds,
        )
        for request, result, text in zip(requests, results, texts, strict=True)
    ]


def sample_seeds(seed: int, ordinal: int, indices: Iterable[int]) -> list[int]:
    """63 bits that belong to one sample of one prompt of one job, for each index."""
    begun = _mixed(seed, ordinal)
    return [_mixed(begun, index) >> 1 for index in indices]


def _mixed(state: int, part: int) -> int:
    """A step of splitmix64 that takes in ``part``."""
    state = (state * 0x9E3779B97F4A7C15 + part + 1) & _64_BITS
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return state ^ (state >> 31)
