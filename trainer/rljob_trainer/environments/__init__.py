"""The environments that a job can name: ``singleTurn``, ``tools`` and programs of the user's own. docs/episodes.md."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.environments.tool_loop import ToolLoop
from rljob_trainer.environments.tools import tool_of
from rljob_trainer.environments.user_program import program_of
from rljob_trainer.episodes.conversation import ChatFormat
from rljob_trainer.episodes.environment import Environment
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import EpisodeLimits
from rljob_trainer.episodes.programs import Programs
from rljob_trainer.episodes.single_turn import SingleTurn
from rljob_trainer.errors import JobFileError
from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox import Mode, Sandbox, SandboxLimits, mode_available

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedEnvironment, ResolvedSpec

FIELD = "spec.rollout.environment"


async def environment_of(
    spec: ResolvedSpec, chat: ChatFormat, log: Path, base: Path, stack: AsyncExitStack, report: Callable[[str], None]
) -> Environment:
    """What plays the job's episodes; the caller closes it. ``log``: the folder for the record of those of many turns;
    ``base``: where the user's modules lie. A sandbox is closed with ``stack``; ``report`` is told what it doesn't hold.

    Raises ``JobFileError`` for a program, a tool or an isolation that cannot be had, ``OSError`` for the log.
    """
    given = spec.rollout.environment
    if given.type == "singleTurn":
        return SingleTurn()
    limits = EpisodeLimits(given.max_turns, spec.data.max_prompt_tokens, given.max_turn_tokens, chat.vocabulary)
    if given.type == "custom":
        assert given.function is not None
        program, written = program_of(given.function, given.params, f"{FIELD}.function", base)
        return Programs(
            program,
            await asyncio.to_thread(EpisodeLog, log),
            chat,
            limits,
            written=written,
            uses=[dict(given.params)] if given.params else (),
        )
    if not chat.is_there:
        raise JobFileError(f"{FIELD}: tools are called in chat messages; set spec.model.chatTemplate")
    sandbox = None
    if any(tool.type == "python" for tool in given.tools):
        sandbox = await stack.enter_async_context(await _sandbox(given))
        for what in sandbox.not_contained:
            report(f"the sandbox does not hold everything here: {what} (docs/sandbox.md)")
    tools = [tool_of(tool, f"{FIELD}.tools[{index}]", base, sandbox) for index, tool in enumerate(given.tools)]
    loop = ToolLoop(tools, given.call_format, chat, given.call_seconds, given.max_observation_tokens)
    return Programs(
        loop,
        await asyncio.to_thread(EpisodeLog, log),
        chat,
        limits,
        uses=[tool.function for tool in tools],
        counts=loop.take_counts,
    )


async def _sandbox(given: ResolvedEnvironment) -> Sandbox:
    from rljob_api.spec.environment import SandboxSpec

    wanted = given.sandbox or SandboxSpec()
    seconds = float(given.call_seconds)
    limits = SandboxLimits(
        wall_seconds=seconds,
        cpu_seconds=seconds,
        memory_bytes=wanted.memory_megabytes * 2**20,
        processes=wanted.processes,
    )
    return Sandbox(await asyncio.to_thread(_mode, wanted.isolation), limits, wanted.workers)


def _mode(isolation: str) -> Mode:
    """Raises ``JobFileError`` for an isolation that does not work on this machine."""
    if isolation == "none":
        return "none"
    tried: tuple[Mode, ...] = ("namespaces", "landlock")
    wrong = []
    for mode in tried:
        if isolation in ("auto", mode):
            try:
                problem = mode_available(mode)
            except (OSError, WorldError) as error:
                problem = str(error)
            if problem is None:
                return mode
            wrong.append(f"{mode}: {problem}")
    raise JobFileError(
        f"{FIELD}.sandbox.isolation: programs that the model writes cannot be contained on this machine "
        f"({'; '.join(wrong)}). Run where one of the modes works (docs/sandbox.md), or write isolation: none if they "
        "may do what this job may"
    )
