"""The environment of one question and one answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rljob_trainer.episodes.environment import LanguageModel, Task
from rljob_trainer.episodes.episode import Episode, single_turn
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.receipts import prompt_digest
from rljob_trainer.episodes.requests import BegunTurn, GenerationRequest, GenerationResult


class SingleTurn:
    """Asks the model once for each sample. Nothing is recorded: the model's answer is all there is to an episode."""

    async def play(
        self, tasks: Sequence[Task], model: LanguageModel, ended: Callable[[int, Episode], None] | None = None
    ) -> list[Episode]:
        requests = [task.request(0, task.prompt.token_ids) for task in tasks]
        if ended is None:
            results = await model.generate(requests)
            return [_episode(request, result) for request, result in zip(requests, results, strict=True)]
        made: dict[int, Episode] = {}

        def finished(position: int, result: GenerationResult) -> None:
            if position not in made:
                made[position] = _episode(requests[position], result)
                ended(position, made[position])

        for position, result in enumerate(await model.generate(requests, finished)):
            finished(position, result)  # the last ones may not have been told of yet
        return [made[position] for position in range(len(tasks))]

    def end(self, ordinal: int) -> bool:
        return True  # all there is to end is the model's answer

    def kept(self, episode: Episode) -> dict[EpisodeId, BegunTurn]:
        (leaf,) = episode.leaves
        return {episode.id: BegunTurn(prompt_digest(leaf.prompt_ids), leaf.tokens)}

    def restore(
        self, open_prompts: Collection[int], next_ordinal: int, *, step: int, version: int, published_as: int
    ) -> dict[EpisodeId, BegunTurn]:
        return {}

    def settled(self, open_prompts: Collection[int], next_ordinal: int) -> None:
        """There is no record to close."""

    def corpora(self) -> dict[str, str]:
        return {}

    def take_counts(self) -> dict[str, float]:
        return {}

    def progress(self) -> None:
        """Each request is an episode."""

    def waiting_for(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing is open."""


def _episode(request: GenerationRequest, result: GenerationResult) -> Episode:
    return single_turn(
        request.id,
        request.prompt_ids,
        result.tokens,
        result.finish,
        receipt=result.receipt,
        seconds=result.seconds,
    )
