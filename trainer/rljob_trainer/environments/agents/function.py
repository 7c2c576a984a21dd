"""Agents that are Python functions: processes that have imported them, and play one episode after the other.

A function that is ``async`` mostly waits: a process plays several of its episodes at once. Any other has a process to
itself while it plays.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rljob_trainer.endpoint.served import ClientSettings
from rljob_trainer.environments.agents.common import EndingProcesses, surroundings, written
from rljob_trainer.environments.agents.process import AgentError, AgentProcess
from rljob_trainer.episodes.record import EpisodeLostError
from rljob_trainer.errors import JobFileError
from rljob_trainer.world.protocol import Json

_WORKER = Path(__file__).with_name("worker.py")
_START_SECONDS = 120.0
"""Of a worker: interpreter and the user's module, on a loaded machine too."""
_PARTING_SECONDS = 2.0
"""What an episode that is given up has for its end; then its process is killed."""
AT_ONCE = 32
"""Episodes of an ``async`` function in one process."""

Answer = dict[str, Any]


class AgentFunction:
    """A Python function in processes of its own."""

    def __init__(self, function: str, params: Mapping[str, Any], folder: Path, field: str) -> None:
        """``function`` as ``module:name``; ``folder``: where its module is looked for first."""
        self._name, self._field = f"the agent {function}", field
        self._command = [sys.executable, "-P", "-B", str(_WORKER), function, str(folder), json.dumps(dict(params))]
        self._folder = folder
        self._workers: list[_AgentWorker] = []
        self._room = 1
        """Episodes that a process plays at once."""
        self._ending = EndingProcesses()

    async def start(self) -> None:
        """Starts the first process. Raises ``JobFileError`` for a function that cannot be had."""
        worker = self._new()
        try:
            ready = await worker.started
        except (AgentError, EpisodeLostError) as problem:
            raise JobFileError(f"{self._field}: {problem}") from problem
        self._room = AT_ONCE if ready["concurrent"] else 1

    async def play(self, task: Mapping[str, Json], client: ClientSettings) -> Json:
        given = {"base_url": client.base_url, "api_key": client.api_key, "model": client.model}
        free = [worker for worker in self._workers if worker.is_there and len(worker.playing) < self._room]
        # The fullest one: the others may be idle, and be there for many.
        worker = max(free, key=lambda one: len(one.playing)) if free else self._new()
        with worker.one() as (number, answering):
            try:
                await asyncio.shield(worker.started)
                await worker.write({"number": number, "task": task, "client": given})
                answer = await answering
            except asyncio.CancelledError:
                self._give_up(worker, number)
                raise
        if "lost" in answer:
            raise EpisodeLostError(f"{self._name}: {answer['lost']}")
        if "raised" in answer:
            raise AgentError(f"{self._name} raised {answer['raised']}\n{answer['traceback']}")
        return answer["returned"]

    async def close(self) -> None:
        for worker in self._workers:
            worker.end()
        await self._ending.over()

    def _new(self) -> _AgentWorker:
        self._workers = [worker for worker in self._workers if worker.is_there]
        worker = _AgentWorker(self._command, self._folder, self._name, self._ending)
        self._workers.append(worker)
        return worker

    def _give_up(self, worker: _AgentWorker, number: int) -> None:
        """An episode that nobody wants any more ends by itself, if it is one of several, or with its process."""
        if self._room == 1:
            worker.end()
        elif worker.is_ready:  # else it has not begun
            worker.cancel(number)


class _AgentWorker:
    """One process. It is started at once; whoever has a place in it waits for that."""

    def __init__(self, command: list[str], folder: Path, name: str, ending: EndingProcesses) -> None:
        self.playing: dict[int, asyncio.Future[Answer]] = {}
        self.is_there = True
        """It has not ended."""
        self._numbers = count()
        self._name, self._ending = name, ending
        self._process: AgentProcess | None = None
        self._parting: dict[int, asyncio.TimerHandle] = {}
        self._reading: asyncio.Task[None] | None = None
        self.started = asyncio.create_task(self._start(command, folder), name="start of an agent's process")
        self.started.add_done_callback(_heard)

    @property
    def is_ready(self) -> bool:
        """It has started."""
        return self._reading is not None

    @contextmanager
    def one(self) -> Iterator[tuple[int, asyncio.Future[Answer]]]:
        """Inside, an episode has a place: its number and its answer."""
        number = next(self._numbers)
        answering: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.playing[number] = answering
        answering.add_done_callback(_heard)
        try:
            yield number, answering
        finally:
            self.playing.pop(number, None)

    async def write(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        await self._process.write(written(message) + b"\n")

    def cancel(self, number: int) -> None:
        """Tells an episode to end. All end with the process if that one does not."""
        assert self._process is not None
        self._process.say(written({"cancel": number}) + b"\n")
        self._parting[number] = asyncio.get_running_loop().call_later(_PARTING_SECONDS, self.end)

    def end(self) -> None:
        """Kills the process."""
        self.is_there = False
        for timer in self._parting.values():
            timer.cancel()
        if self._reading is None and asyncio.current_task() is not self.started:
            self.started.cancel()
        if self._process is not None:
            self._ending.end(self._process)
            self._process = None

    async def _start(self, command: list[str], folder: Path) -> Answer:
        """Raises ``AgentError`` for a function that cannot be had, and ``EpisodeLostError``."""
        try:
            self._process = process = await AgentProcess.start(command, surroundings(), folder)
            async with asyncio.timeout(_START_SECONDS):
                line = await process.line()
            if not line:
                await process.check_ended(self._name)
                raise AgentError(f"{self._name} ended its process with exit code 0")
        except TimeoutError:
            self.end()
            raise EpisodeLostError(f"{self._name}: its process did not start within {_START_SECONDS:g} s") from None
        except BaseException:
            self.end()
            raise
        ready: Answer = json.loads(line)
        if "problem" in ready:
            self.end()
            raise AgentError(
                f"cannot load {self._name} ({ready['problem']}); its module must be beside the job file or be installed"
            )
        self._reading = asyncio.create_task(self._read(process), name="answers of an agent's process")
        return ready

    async def _read(self, process: AgentProcess) -> None:
        """Hands on answers until the process ends, which is the end of all that it plays."""
        while line := await process.line():
            answer: Answer = json.loads(line)
            number = answer["number"]
            if (timer := self._parting.pop(number, None)) is not None:
                timer.cancel()
            if (answering := self.playing.get(number)) is not None and not answering.done():
                answering.set_result(answer)
        was_there = self.is_there
        try:
            await process.check_ended(self._name)
            error: Exception = AgentError(f"{self._name} ended its process with exit code 0")
        except (AgentError, EpisodeLostError) as problem:
            error = problem if was_there else EpisodeLostError(f"{self._name}: an episode beside it did not end")
        self.end()
        for answering in self.playing.values():
            if not answering.done():
                answering.set_exception(error)


def _heard(future: asyncio.Future[Any]) -> None:
    """Whoever waited for it may be gone."""
    if not future.cancelled():
        future.exception()
