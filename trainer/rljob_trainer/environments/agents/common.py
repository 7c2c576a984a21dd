"""What all forms of agents share: what they are to the rest, their surroundings, and their end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rljob_trainer.endpoint.served import ClientSettings
from rljob_trainer.environments.agents.process import AgentProcess
from rljob_trainer.world.protocol import Json

_END_SECONDS = 10.0
_NO_PROXY = ("NO_PROXY", "no_proxy")


class Agents(Protocol):
    """Plays episodes."""

    async def play(self, task: Mapping[str, Json], client: ClientSettings) -> Json:
        """What the agent makes of a task: its reward, or None. Raises ``AgentError`` and ``EpisodeLostError``.
        Cancelling it ends the agent."""
        ...

    async def close(self) -> None:
        """Ends all processes."""
        ...


class EndingProcesses:
    """Processes that are being ended: somebody has to wait for that."""

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


def written(given: Mapping[str, Any]) -> bytes:
    """Plain data as JSON; what a row holds that JSON cannot (a date, say) as a text."""
    return json.dumps(given, default=str).encode()
