"""Agents that are commands: a process for each episode."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rljob_trainer.endpoint.served import ClientSettings
from rljob_trainer.environments.agents.common import EndingProcesses, surroundings, written
from rljob_trainer.environments.agents.process import AgentError, AgentProcess
from rljob_trainer.errors import JobFileError
from rljob_trainer.world.protocol import Json


class AgentCommand:
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
                f"{field}: {command[0]} is not an executable command here, from {folder} with PATH="
                f"{self._variables['PATH']}"
            )
        self._command = [found, *command[1:]]
        self._name = f"the agent {' '.join(command)[:80]}"
        self._params = dict(params)
        self._folder = folder
        self._processes = EndingProcesses()

    async def play(self, task: Mapping[str, Json], client: ClientSettings) -> Json:
        process = await AgentProcess.start(self._command, {**self._variables, **client.variables()}, self._folder)
        try:
            given = written({**task, "params": self._params})
            _, output = await asyncio.gather(process.write(given, last=True), process.output())
            await process.check_ended(self._name)
            return _reward_in(output.decode(errors="replace"), self._name)
        finally:
            self._processes.end(process)

    async def close(self) -> None:
        await self._processes.over()


def _reward_in(output: str, name: str) -> Json:
    """The last line of an output, if there is one. Raises ``AgentError`` for one that is no JSON."""
    lines = output.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    if last is None:
        return None
    try:
        return json.loads(last)
    except (ValueError, RecursionError):
        raise AgentError(
            f"{name}: the last line of its standard output is {last[:80]!r}, but it must be the reward (a number, "
            'or {"score": ...} as JSON); write messages for people to standard error'
        ) from None
