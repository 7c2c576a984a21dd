"""Scores the held-out sets of a job: generation through the same pool, the same rewards, then statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rljob_api.spec.data import ValidationSet
from rljob_trainer.episodes.environment import Environment, LanguageModel, tasks_of
from rljob_trainer.episodes.episode import Episode, Group, Prompt
from rljob_trainer.episodes.group import Decode, Scoring
from rljob_trainer.episodes.identity import validation_of
from rljob_trainer.episodes.requests import SamplingSettings
from rljob_trainer.errors import DeadlineError
from rljob_trainer.telemetry.names import metric
from rljob_trainer.telemetry.run_folder import SampleRow
from rljob_trainer.validation import summarise
from rljob_trainer.waits import NEVER, Waits, patiently

_SEED_OFFSET = 0x5EED
"""Validation draws other random numbers than training."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One validation set, ready to be asked."""

    name: str
    prompts: Sequence[Prompt]
    samples_per_prompt: int
    sampling: SamplingSettings


@dataclass(frozen=True, slots=True)
class HeldOutScores:
    """Metrics under their public names, and the groups behind them by set."""

    metrics: dict[str, float]
    groups: Mapping[str, Sequence[Group]]
    mean: float
    """Over sets, of their main number (``summarise``): the share of correct answers, or the mean score."""


def held_out(spec: ValidationSet, prompts: Sequence[Prompt], training: SamplingSettings) -> HeldOut:
    """``training`` gives the stop tokens, and the length where the set has none of its own."""
    sampling = replace(
        training,
        temperature=spec.sampling.temperature,
        top_p=spec.sampling.top_p,
        top_k=spec.sampling.top_k,
        max_tokens=spec.sampling.max_response_tokens or training.max_tokens,
    )
    return HeldOut(spec.name, prompts, spec.samples_per_prompt, sampling)


class ValidationEngines(LanguageModel, Protocol):
    """Who is asked: the pool, or what it has lent."""

    def waiting_for(self) -> str:
        """One sentence: what is under way."""
        ...


class Validator:
    """Asks every prompt of every set ``samples_per_prompt`` times and reduces the scores."""

    def __init__(
        self,
        environment: Environment,
        pool: ValidationEngines,
        scoring: Scoring,
        sets: Sequence[HeldOut],
        *,
        seed: int,
        bootstrap: int,
        waits: Waits | None = None,
        patience_seconds: float = 3600.0,
    ) -> None:
        """``patience_seconds``: without a scored group for so long, ``run`` gives up."""
        self._environment = environment
        self._pool = pool
        self._scoring = scoring
        self._sets = sets
        self._seed = seed + _SEED_OFFSET
        self._bootstrap = bootstrap
        self._waits = waits or Waits()
        self.patience_seconds = patience_seconds
        self._scored = 0
        self.scored_at = NEVER
        """When a prompt was scored last, in the time of the running event loop."""
        self._asked = pool

    def progress(self) -> str:
        """How far the validation under way is."""
        total = sum(len(held.prompts) for held in self._sets)
        return f"validation: {self._scored} of {total} prompts scored; {self._asked.waiting_for()}"

    async def run(self, lent: ValidationEngines | None = None) -> HeldOutScores:
        """On all engines while training waits, or on the ``lent`` ones.

        Raises ``EngineError``, ``RewardError`` and ``DeadlineError``.
        """
        self._scored, self._asked = 0, lent or self._pool
        patience, self.scored_at = self.patience_seconds, asyncio.get_running_loop().time()
        done = asyncio.Event()
        scoring = asyncio.create_task(self._score_all(self._asked))
        scoring.add_done_callback(lambda _: done.set())
        with nullcontext() if lent else self.waited_for():
            try:
                await patiently(done, lambda: self.scored_at + patience)
                return scoring.result()
            except TimeoutError:
                raise DeadlineError(
                    f"{self.progress()}. No prompt was scored for {patience:.0f} s. If samples take that "
                    "long, raise deadlines.progressSeconds or shorten the validation's maxResponseTokens."
                ) from None
            finally:
                scoring.cancel()

    def waited_for(self) -> AbstractContextManager[object]:
        """Inside, the trainer waits for the validation that is under way."""
        return self._waits.wait("trainer", self.progress, self.patience_seconds, progress=lambda: self.scored_at)

    async def _score_all(self, engines: ValidationEngines) -> HeldOutScores:
        metrics: dict[str, float] = {}
        groups: dict[str, list[Group]] = {}
        for held in self._sets:
            scoring = [asyncio.create_task(self._group(held, prompt, engines)) for prompt in held.prompts]
            try:
                groups[held.name] = await asyncio.gather(*scoring)
            finally:
                for task in scoring:
                    task.cancel()
            metrics.update(summarise(held.name, groups[held.name], bootstrap=self._bootstrap))
        mean = float(np.mean([metrics[_mean_at_n(held)] for held in self._sets]))
        metrics["validation/mean"] = mean
        return HeldOutScores(metrics, groups, mean)

    async def _group(self, held: HeldOut, prompt: Prompt, engines: ValidationEngines) -> Group:
        samples = range(held.samples_per_prompt)
        tasks = tasks_of(prompt, samples, held.sampling, self._seed, purpose=validation_of(held.name))
        episodes = await self._environment.play(tasks, engines)
        await self._scoring.score(prompt, episodes)
        self._scored += 1
        self.scored_at = asyncio.get_running_loop().time()
        return Group(prompt, episodes)


def _mean_at_n(held: HeldOut) -> str:
    return metric("validation/<source>/mean@<n>", source=held.name, n=held.samples_per_prompt)


def _turns(episode: Episode, decode: Decode) -> list[dict[str, str | float]]:
    speakers, ids = zip(*episode.exchange(), strict=True)
    turns: list[dict[str, str | float]] = [
        {"by": by, "text": text} for by, text in zip(speakers, decode(list(ids)), strict=True)
    ]
    if episode.reward is not None and episode.reward.turns:
        answers = [turn for turn in turns if turn["by"] == "model"]
        for answer, earned in zip(answers, episode.reward.turns, strict=False):
            answer["earned"] = earned
    return turns


def sample_rows(groups: Sequence[Group], limit: int, decode: Decode) -> list[SampleRow]:
    """The first samples of the first groups, for people to read."""
    each = max(1, limit // max(1, len(groups)))
    shown = [(group.prompt, episode) for group in groups for episode in group.episodes[:each]][:limit]
    rows = []
    for (prompt, episode), text in zip(shown, decode([episode.response_ids for _, episode in shown]), strict=True):
        reward = episode.reward
        rows.append(
            SampleRow(
                source=prompt.source,
                prompt=prompt.text,
                response=text,
                score=None if reward is None else reward.score,
                answer=prompt.answer,
                prediction=None if reward is None else reward.prediction,
                correct=None if reward is None else reward.correct,
                finish=episode.finish,
                tokens=episode.response_tokens,
                parts={} if reward is None else reward.parts,
                turns=_turns(episode, decode) if episode.has_turns else (),
            )
        )
    return rows
