"""From a prompt to a scored group: episodes, text, rewards."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from rljob_trainer.episodes.environment import Environment, LanguageModel, Task, tasks_of
from rljob_trainer.episodes.episode import Episode, Group, Prompt, RewardResult
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.receipts import prompt_digest
from rljob_trainer.episodes.requests import BegunTurn, GenerationRequest, SamplingSettings
from rljob_trainer.waits import NEVER, Waits

GREEDY_INDEX = 1 << 20
"""Index of a prompt's greedy response (remax): far above any samplesPerPrompt."""


class AskedEngines(LanguageModel, Protocol):
    """The engines, as one."""

    @property
    def version(self) -> int:
        """The policy version that new requests start under."""
        ...

    @property
    def finished_at(self) -> float:
        """When a request was finished last, in the time of the running event loop."""
        ...

    async def begun(self) -> list[GenerationRequest]:
        """Every request that ``generate`` has not returned, with the tokens it has by now."""
        ...

    async def cut(self, is_over: Callable[[EpisodeId], bool]) -> None:
        """Requests of which ``is_over`` is said end with the tokens that they have, at least one, and their ``finish``
        is ``deadline``."""
        ...

    def progress(self) -> list[int]:
        """For each group under way, how many of its requests are finished."""
        ...

    def waiting_for(self) -> str:
        """In a few words: where the oldest request runs, and what keeps others from an engine."""
        ...


class Rewards(Protocol):
    """Scores episodes of a prompt."""

    def in_processes(self, source: str) -> bool:
        """Whether anything that scores this data source is computed elsewhere, and so can begin with the first sample
        while its siblings run on. What is computed here costs less for a whole group at once."""
        ...

    async def score(self, group: Group) -> list[RewardResult]:
        """One result per episode, in their order."""
        ...


Decode = Callable[[list[list[int]]], list[str]]
"""Token ids of several responses to the texts that rewards and people see: with the special tokens in them, without
those that end an answer."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """``n`` samples a prompt; ``greedy``: one more, greedy response that is scored as the prompt's baseline."""

    n: int
    sampling: SamplingSettings
    seed: int
    greedy: bool = False
    tells_experts: bool = False
    """Engines say which experts tokens were sent to."""


def greedy(sampling: SamplingSettings) -> SamplingSettings:
    """Greedy sampling with the lengths and stop tokens of ``sampling``: always the likeliest token."""
    return SamplingSettings(0.0, max_tokens=sampling.max_tokens, stop_token_ids=sampling.stop_token_ids)


class Scoring:
    """Texts and rewards of episodes that have ended."""

    def __init__(self, rewards: Rewards, decode: Decode) -> None:
        self._rewards = rewards
        self._decode = decode

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> None:
        """Gives each of the prompt's episodes its text and its reward. Raises ``RewardError``."""
        for episode, text in zip(episodes, self._decode([e.said_ids for e in episodes]), strict=True):
            episode.text = text
        for episode, reward in zip(episodes, await self._rewards.score(Group(prompt, list(episodes))), strict=True):
            episode.reward = reward


class GroupRollout:
    """What the pipeline sees as its rollout: generation and reward of one group at a time, many at once."""

    def __init__(
        self,
        environment: Environment,
        engines: AskedEngines,
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
        self._environment = environment
        self._engines = engines
        self._rewards = rewards
        self._scoring = Scoring(rewards, decode)
        self._settings = settings
        self._made: dict[int, list[Episode]] = {}
        """Groups whose rewards are being computed."""
        self._restored: dict[int, dict[EpisodeId, BegunTurn]] = {}
        """What an earlier process had of prompts that will be asked again."""
        self._in_rewards_since: dict[int, float] = {}
        """By ordinal."""
        self._scored_at = NEVER

    def goes_on_from(
        self,
        begun: Mapping[int, dict[EpisodeId, BegunTurn]],
        open_prompts: Collection[int],
        next_ordinal: int,
        *,
        step: int,
        version: int,
        published_as: int,
    ) -> None:
        """``begun`` is what an earlier process had of prompts that will be asked again, by ordinal, at its checkpoint
        of ``step``; the rest as for ``Environment.restore``. Raises ``OSError``; may take long."""
        left = self._environment.restore(
            open_prompts, next_ordinal, step=step, version=version, published_as=published_as
        )
        self._restored = {}
        for id, turn in [*(item for turns in begun.values() for item in turns.items()), *left.items()]:
            if (fitting := self._as_told_now(turn)) is not None:
                self._restored.setdefault(id.ordinal, {})[id] = fitting

    def _as_told_now(self, turn: BegunTurn) -> BegunTurn | None:
        """A turn of an earlier process as engines would make it now, or None: it is made anew. A stream is known of all
        tokens of a batch or of none."""
        if not self._settings.tells_experts:
            return turn._replace(tokens=turn.tokens.having({"routed_experts": None, "prompt_experts": None}))
        return turn if turn.tokens.routed_experts is not None else None

    def settled(self, open_prompts: Collection[int], next_ordinal: int) -> None:
        """No process will run prompts before ``next_ordinal`` again, but for ``open_prompts``."""
        self._environment.settled(open_prompts, next_ordinal)

    def take_counts(self) -> dict[str, float]:
        """Metrics of the environment, since the last call."""
        return self._environment.take_counts()

    @property
    def serving_version(self) -> int:
        return self._engines.version

    @property
    def finished_at(self) -> float:
        """When a sample came from an engine, or a group from the reward functions, whichever was later."""
        return max(self._engines.finished_at, self._scored_at)

    async def run(self, prompt: Prompt) -> Group:
        """Raises ``EngineError`` and ``RewardError``."""
        try:
            return await self._run(prompt)
        finally:
            self._made.pop(prompt.ordinal, None)

    async def _run(self, prompt: Prompt) -> Group:
        settings = self._settings
        tasks = tasks_of(prompt, range(settings.n), settings.sampling, settings.seed)
        if settings.greedy:
            tasks += tasks_of(prompt, [GREEDY_INDEX], greedy(settings.sampling), settings.seed)
        if begun := self._restored.pop(prompt.ordinal, None):
            for task in tasks:
                task.begun.update({id.turn: turn for id, turn in begun.items() if id.sample == task.id.sample})
        if len(tasks) > 1 and self._rewards.in_processes(prompt.source):
            episodes = await self._score_as_they_end(prompt, tasks)
        else:
            episodes = self._made[prompt.ordinal] = await self._environment.play(tasks, self._engines)
            with self._in_reward_functions(prompt.ordinal):
                await self._scoring.score(prompt, episodes)
        self._scored_at = asyncio.get_running_loop().time()
        for episode in episodes:
            episode.text = ""  # as long as the tokens, and made of them when somebody wants to read it
            episode.messages = ()
        group = Group(prompt, episodes[: settings.n])
        if settings.greedy and (baseline := episodes[-1].reward) is not None:
            group.greedy_score = baseline.score
        return group

    async def _score_as_they_end(self, prompt: Prompt, tasks: Sequence[Task]) -> list[Episode]:
        """The first episode's reward does not wait for the last episode, and one that cannot be scored ends the rest.
        Episodes that end in one turn of the event loop are scored together."""
        loop = asyncio.get_running_loop()
        arrived: dict[int, Episode] = {}
        scoring: list[asyncio.Task[None]] = []
        over = False

        def arrive(position: int, episode: Episode) -> None:
            if not arrived:
                loop.call_soon(begin)
            arrived[position] = episode

        def begin() -> None:
            if arrived and not over:
                together = [arrived[position] for position in sorted(arrived)]
                scoring.append(asyncio.create_task(self._scoring.score(prompt, together)))
                scoring[-1].add_done_callback(ended)
            arrived.clear()

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                playing.cancel()

        playing = asyncio.create_task(self._environment.play(tasks, self._engines, arrive))
        try:
            try:
                episodes = self._made[prompt.ordinal] = await playing
            except asyncio.CancelledError:
                for task in scoring:
                    if task.done() and not task.cancelled():
                        task.result()
                raise
            begin()
            with self._in_reward_functions(prompt.ordinal):
                await asyncio.gather(*scoring)
        finally:
            over = True
            playing.cancel()
            for task in scoring:
                task.cancel()
        return episodes

    @contextmanager
    def _in_reward_functions(self, ordinal: int) -> Iterator[None]:
        if not self._in_rewards_since:
            # One wait for all of them: there may be thousands.
            self._rewarding.enter_context(self._waits.wait("rollout", self._in_rewards))
        self._in_rewards_since[ordinal] = time.monotonic()
        try:
            yield
        finally:
            del self._in_rewards_since[ordinal]
            if not self._in_rewards_since:
                self._rewarding.close()

    async def end(self, ordinals: Sequence[int]) -> list[int]:
        """Episodes of these groups that have not ended do so, with what they have. Returns the groups that cannot be
        ended, because one of their episodes has nothing to train on yet."""
        over = {ordinal for ordinal in ordinals if self._environment.end(ordinal)}
        await self._engines.cut(lambda id: id.purpose == TRAINING and id.ordinal in over)
        return [ordinal for ordinal in ordinals if ordinal not in over]

    async def begun(self) -> dict[int, dict[EpisodeId, BegunTurn]]:
        """What there is by now of groups that ``run`` has not returned, by ordinal."""
        groups: dict[int, dict[EpisodeId, BegunTurn]] = {}
        for request in await self._engines.begun():
            if request.id.purpose == TRAINING and len(request.begun):
                turn = BegunTurn(prompt_digest(request.prompt_ids), request.begun)
                groups.setdefault(request.id.ordinal, {})[request.id] = turn
        for made_for, episodes in self._made.items():
            groups[made_for] = self.kept(episodes)
        # Those that are not asked yet are as an earlier process left them.
        return {**self._restored, **groups}

    def kept(self, episodes: Sequence[Episode]) -> dict[EpisodeId, BegunTurn]:
        """What a checkpoint has to keep of episodes that have ended."""
        return {id: turn for episode in episodes for id, turn in self._environment.kept(episode).items()}

    def waiting_for(self, finished: int, wanted: int) -> str:
        # Those groups of a batch that are still under way are taken to be the ones that are furthest.
        n = self._settings.n
        asked, played = self._engines.progress(), self._environment.progress()
        parts = [min(part, n) for part in (asked if played is None else played)] + [n] * len(self._in_rewards_since)
        made = finished * n + sum(heapq.nlargest(wanted - finished, parts))
        said = [f"{made}/{wanted * n} samples"]
        world = self._environment.waiting_for()
        if asked or not (self._in_rewards_since or world):
            said.append(self._engines.waiting_for())
        if world:
            said.append(world)
        if self._in_rewards_since:
            said.append(self._in_rewards())
        return "; ".join(said)

    def _in_rewards(self) -> str:
        oldest = min(self._in_rewards_since, key=lambda ordinal: self._in_rewards_since[ordinal])
        seconds = time.monotonic() - self._in_rewards_since[oldest]
        limit = "" if self._reward_seconds is None else f" (limit {self._reward_seconds:g} s per sample)"
        groups = "1 group" if len(self._in_rewards_since) == 1 else f"{len(self._in_rewards_since)} groups"
        return f"{groups} in reward functions, oldest (prompt {oldest}) for {seconds:.0f} s{limit}"
