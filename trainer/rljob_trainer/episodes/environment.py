"""What turns a prompt into episodes. The page is docs/episodes.md.

    episodes = await environment.play(tasks_of(prompt, range(8), sampling, seed), model)

An environment plays all samples of a prompt at once, because siblings share their prompt and are asked for together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rljob_trainer.episodes.episode import Episode, Prompt
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.requests import (
    NOT_BEGUN,
    BegunTurn,
    Finished,
    GenerationRequest,
    GenerationResult,
    SamplingSettings,
)
from rljob_trainer.episodes.seeds import sample_seeds, turn_seed, world_seed


@dataclass(frozen=True, slots=True)
class Task:
    """One episode to be played."""

    id: EpisodeId
    prompt: Prompt
    sampling: SamplingSettings
    """Of the model's turns."""
    seed: int
    """Of the model's random numbers: another one for each sample."""
    world_seed: int
    """Of the world's: the same for all samples of a prompt."""
    begun: dict[int, BegunTurn] = field(default_factory=dict)
    """What an earlier process had of turns, by their number, that are not on record."""

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The prompt's chat messages, to go on from: a copy, for siblings share the prompt. Empty where no chat
        template is applied."""
        return copy.deepcopy(list(self.prompt.messages))

    def request(
        self, turn: int, context: tuple[int, ...], sampling: SamplingSettings | None = None
    ) -> GenerationRequest:
        """The model's turn of this number after ``context``."""
        begun = self.begun.get(turn, NOT_BEGUN).after(context)
        id = self.id if turn == self.id.turn else self.id._replace(turn=turn)
        seed = turn_seed(self.seed, turn)
        return GenerationRequest(id, context, sampling or self.sampling, seed, begun)


def tasks_of(
    prompt: Prompt, samples: Iterable[int], sampling: SamplingSettings, seed: int, purpose: str = TRAINING
) -> list[Task]:
    """Some of a prompt's samples; ``seed`` is the job's."""
    samples = list(samples)
    of_world = world_seed(seed, prompt.ordinal)
    return [
        Task(EpisodeId(purpose, prompt.ordinal, sample), prompt, sampling, own, of_world)
        for sample, own in zip(samples, sample_seeds(seed, prompt.ordinal, samples), strict=True)
    ]


class LanguageModel(Protocol):
    """The policy, wherever it runs."""

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Finished | None = None
    ) -> list[GenerationResult]:
        """The answers in the order of the requests, which are siblings and go to one engine together; ``finished`` is
        called with each and its position when it is there. What is interrupted for new weights goes on by itself."""
        ...


class Environment(Protocol):
    """Plays the samples of a prompt."""

    async def play(
        self, tasks: Sequence[Task], model: LanguageModel, ended: Callable[[int, Episode], None] | None = None
    ) -> list[Episode]:
        """The episodes, unscored, in the order of the tasks; ``ended`` is called with each and its position as soon as
        it has ended. Raises ``EngineError``; cancelling it ends what is under way."""
        ...

    def end(self, ordinal: int) -> bool:
        """The episodes of a prompt that is trained on are over: they end with what they have, as soon as the model has
        ended its answers. False, and nothing is changed, where one of them has nothing to train on yet."""
        ...

    def kept(self, episode: Episode) -> dict[EpisodeId, BegunTurn]:
        """What a checkpoint has to keep of an episode that has ended and is not trained, so that playing it again asks
        for nothing."""
        ...

    def restore(
        self, open_prompts: Collection[int], next_ordinal: int, *, step: int, version: int, published_as: int
    ) -> dict[EpisodeId, BegunTurn]:
        """Before the first episode: the run goes on from ``step``, whose weights were ``version`` and are
        ``published_as`` now; it will play ``open_prompts`` again, and all from ``next_ordinal`` on. Returns what is
        left of turns whose later tokens newer weights made. Raises ``OSError``; may take long."""
        ...

    def settled(self, open_prompts: Collection[int], next_ordinal: int) -> None:
        """No process will play prompts before ``next_ordinal`` again, but for ``open_prompts``."""
        ...

    def corpora(self) -> Mapping[str, str]:
        """Digests of what tools look in, by their names: a run goes on with the same."""
        ...

    def take_counts(self) -> dict[str, float]:
        """Metrics of what has happened since the last call."""
        ...

    def progress(self) -> list[int] | None:
        """For each prompt of training under way, how many of its episodes have ended; None: as many as the engines have
        answered requests."""
        ...

    def waiting_for(self) -> str:
        """What episodes wait for outside of the model, in a few words; empty: nothing."""
        ...

    def close(self) -> None:
        """Writes what is still to be written. Raises ``OSError``; may take long."""
        ...
