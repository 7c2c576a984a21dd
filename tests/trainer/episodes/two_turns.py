"""Episodes of two turns for the tests here: a program, a world that counts, and a real engine that plays them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob_trainer.episodes.environment import Task, tasks_of
from rljob_trainer.episodes.episode import Episode, Prompt
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import EpisodeLimits, Voice
from rljob_trainer.episodes.programs import Programs
from rljob_trainer.episodes.receipts import Receipts, check_answer
from rljob_trainer.episodes.record import RecordedCall
from rljob_trainer.episodes.requests import Finished, GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.errors import RLJobError
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.world.protocol import World

PROMPT = Prompt(5, 0, 5, "test", "", (9, 8, 7), None)
SAMPLING = SamplingSettings(max_tokens=60)


class Sums:
    """A service: adds up what it is given, and notes under which key."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.world: World | None = None

    async def __call__(self, numbers: list[int]) -> int:
        assert self.world is not None
        self.asked.append(self.world.key)
        await asyncio.sleep(0)
        return sum(numbers)


def program_of(service: Sums, extra: int = 0) -> Any:
    """Asks the model, has the service add up what it said, tells the model, and asks again."""

    async def two_turns(task: Task, model: Voice, world: World) -> None:
        service.world = world
        first = await model.ask(task.prompt.token_ids)
        total = await world.call("sum", service, list(first.said))
        observed = [3 + total % 90, 4 + world.seed % 5 + extra]
        await model.ask([*first.context, *observed])

    return two_turns


class Played:
    """A real engine, several groups at once; what it answers is held against its receipt."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self._receipts, self._results = Receipts(), dict[EpisodeId, GenerationResult]()
        self.groups: list[int] = []
        """How many requests came together."""

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Finished | None = None
    ) -> list[GenerationResult]:
        self.groups.append(len(requests))
        for request in requests:
            self.engine.add(request)
            self._receipts.take(request)
        while any(request.id not in self._results for request in requests):
            await asyncio.sleep(0)
            done = self.engine.step()
            self._receipts.write(done)
            self._results |= {result.id: result for result in done}
        for request in requests:
            check_answer(request, self._results[request.id])
        return [self._results.pop(request.id) for request in requests]


def tasks(samples: int = 3) -> list[Task]:
    return tasks_of(PROMPT, range(samples), SAMPLING, seed=1)


class Killed(RLJobError):  # noqa: N818
    """The process is gone: no matter of the program's."""


class DyingLog(EpisodeLog):
    """The process dies in the moment in which it would hand over line number ``dies_at``."""

    def __init__(self, folder: Path, dies_at: int) -> None:
        super().__init__(folder)
        self.left = dies_at

    def put(self, id: Any, call: RecordedCall) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed
        super().put(id, call)


class Ids:
    """A chat format for programs that ask with token ids: the text of an answer is their numbers."""

    is_there, answer_end, marks_end, vocabulary, longest_token = False, "", False, 10**6, 8

    def render(self, messages: Any, tools: Any = None, *, generation: bool = True) -> str:
        raise AssertionError

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def without_special(self, text: str) -> str:
        return text

    def ends_answer(self, token_id: int) -> bool:
        return False


def programs(program: Any, log: EpisodeLog, **options: Any) -> Programs:
    """The environment of a program, with room for as many turns as it likes."""
    return Programs(
        program, log, Ids(), EpisodeLimits(50, prompt_tokens=100, turn_tokens=6, vocabulary=10**6), **options
    )


async def play(engine: TorchEngine, log: EpisodeLog, service: Sums, **options: Any) -> list[Episode]:
    return await programs(program_of(service, **options), log).play(tasks(), Played(engine))
