"""Agents in the two forms in which they may be written: a command, or a Python function in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rljob_trainer.endpoint.served import ClientSettings
from rljob_trainer.environments.agents.process import AgentError, AgentProcess
from rljob_trainer.episodes.record import EpisodeLostError
from rljob_trainer.errors import JobFileError
from rljob_trainer.world.protocol import Json

_WORKER = Path(__file__).with_name("worker.py")
_START_SECONDS = 120.0
"""Of a worker: interpreter and the user's module, on a loaded machine too."""
_END_SECONDS = 10.0
_NO_PROXY = ("NO_PROXY", "no_proxy")


class Agents(Protocol):
    """Plays episodes, each in a process that plays no other at the same time."""

    async def play(self, task: Mapping[str, Json], client: ClientSettings) -> Json:
        """What the agent makes of a task: its reward, or None. Raises ``AgentError`` and ``EpisodeLostError``.
        Cancelling it ends the agent."""
        ...

    async def close(self) -> None:
        """Ends all processes."""
        ...


class _Processes:
    """Those that are being ended: somebody has to wait for that."""

    def __init__(self) -> None:
        self._ending: set[asyncio.Task[None]] = set()

    def end(self, process: AgentProcess) -> None:
        process.end()
        task = asyncio.create_task(process.over(), name="end of an agent")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def over(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending, timeout=_END_SECONDS)


class Command:
    """A command for each episode. It has the task as JSON on its standard input, and the address of its model in its
    environment; the last line of its standard output is its reward, as JSON."""

    def __init__(self, command: Sequence[str], params: Mapping[str, Any], folder: Path, field: str) -> None:
        """``folder``: where it is run. Raises ``JobFileError`` when there is no such command."""
        self._variables = surroundings()
        found = shutil.which(command[0], path=self._variables["PATH"])
        if os.sep in command[0]:
            found = shutil.which(str(folder / command[0]))
        if found is None:
            raise JobFileError(
                f"{field}: {command[0]} is no command that can be run here, from {folder} with PATH="
                f"{self._variables['PATH']}"
            )
        self._command = [found, *command[1:]]
        self._name = f"the agent {' '.join(command)[:80]}"
        self._params = dict(params)
        self._folder = folder
        self._processes = _Processes()

    async def play(self, task: Mapping[str, Json], client: ClientSettings) -> Json:
        process = await AgentProcess.start(self._command, {**self._variables, **client.variables()}, self._folder)
        try:
            given = _written({**task, "params": self._params})
            _, output = await asyncio.gather(process.write(given, last=True), process.output())
            await process.check_ended(self._name)
            return _reward_in(output.decode(errors="replace"), self._name)
        finally:
            self._processes.end(process)

    async def close(self) -> None:
        await self._processes.over()


class Function:
    """A Python function, in processes that each play one episode after the other."""

    def __init__(self, function: str, params: Mapping[str, Any], folder: Path, field: str) -> None:
        """``function`` as ``module:name``; ``folder``: where its module is looked for first."""
        self._name, self._field = f"the agent {function}", field
        self._variables, self._folder = surroundings(), folder
        self._command = [sys.executable, "-P", "-B", str(_WORKER), function, str(folder), json.dumps(dict(params))]
        self._idle: list[AgentProcess] = []
        self._processes = _Processes()

    async def start(self) -> None:
        """The first process. Raises ``JobFileError`` for a function that cannot be had."""
        try:
            self._idle.append(await self._started())
        except (AgentError, EpisodeLostError) as problem:
            raise JobFileError(f"{self._field}: {problem}") from problem

    async def play(self, task: Mapping[str, Json], client: ClientSettings) -> Json:
        process = self._idle.pop() if self._idle else await self._started()
        is_whole = False
        try:
            given = {"task": task, "client": _plain(client), "variables": client.variables()}
            await process.write(_written(given) + b"\n")
            answer = await self._heard(process)
            is_whole = True
        finally:
            if is_whole:
                self._idle.append(process)
            else:
                self._processes.end(process)
        if "lost" in answer:
            raise EpisodeLostError(f"{self._name}: {answer['lost']}")
        if "raised" in answer:
            raise AgentError(f"{self._name} raised {answer['raised']}\n{answer['traceback']}")
        return answer["returned"]

    async def close(self) -> None:
        for process in self._idle:
            self._processes.end(process)
        self._idle = []
        await self._processes.over()

    async def _started(self) -> AgentProcess:
        process = await AgentProcess.start(self._command, self._variables, self._folder)
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer = await self._heard(process)
        except TimeoutError:
            self._processes.end(process)
            raise EpisodeLostError(f"{self._name}: its process does not start within {_START_SECONDS:g} s") from None
        except BaseException:
            self._processes.end(process)
            raise
        if "problem" in answer:
            self._processes.end(process)
            raise AgentError(
                f"{self._name} cannot be had ({answer['problem']}); its module must lie beside the job file or be "
                "installed"
            )
        return process

    async def _heard(self, process: AgentProcess) -> dict[str, Any]:
        """The next answer of a worker. Raises ``AgentError`` and ``EpisodeLostError`` for one that has ended."""
        line = await process.line()
        if not line:
            await process.check_ended(self._name)
            raise AgentError(f"{self._name} ended its process, with exit code 0")
        answer: dict[str, Any] = json.loads(line)
        return answer


def agent_texts(command: Sequence[str], function: str | None, folder: Path) -> dict[str, Json]:
    """What an agent is, as far as the job and the files beside it tell: a digest of each file that it names."""
    names = [*command, *([f"{function.partition(':')[0].replace('.', '/')}.py"] if function else [])]
    files = {name: folder / name for name in names}
    return {
        "command": list(command),
        "function": function,
        "files": {name: zlib.crc32(path.read_bytes()) for name, path in files.items() if os.path.isfile(path)},
    }


def surroundings() -> dict[str, str]:
    """Environment variables of all agents: ``python`` is the interpreter of the job, and no proxy is between an agent
    and its model."""
    own = os.path.dirname(sys.executable)
    path = os.pathsep.join([own, os.environ.get("PATH", os.defpath)])
    direct = {name: ",".join(filter(None, [os.environ.get(name), "127.0.0.1"])) for name in _NO_PROXY}
    return {"PATH": path, **direct}


def _written(given: Mapping[str, Any]) -> bytes:
    """As JSON; what a row holds that JSON cannot (a date, say) as a text."""
    return json.dumps(given, default=str).encode()


def _plain(client: ClientSettings) -> dict[str, str]:
    return {"base_url": client.base_url, "api_key": client.api_key, "model": client.model}


def _reward_in(output: str, name: str) -> Json:
    """The last line of an output, if there is one. Raises ``AgentError`` for one that is no JSON."""
    lines = output.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    if last is None:
        return None
    try:
        return json.loads(last)
    except ValueError:
        raise AgentError(
            f"{name}: the last line of its standard output is {last[:80]!r}, and a reward is wanted there (a number, "
            'or {"score": ...} as JSON); what is for people belongs on standard error'
        ) from None
