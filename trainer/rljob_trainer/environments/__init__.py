"""The environments that a job can name: ``singleTurn``, ``tools``, programs of the user's own and agents that know
nothing of rljob. docs/episodes.md."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.aside import aside
from rljob_trainer.endpoint.server import serving_endpoint
from rljob_trainer.environments.agents.command import AgentCommand
from rljob_trainer.environments.agents.common import Agents, agent_texts
from rljob_trainer.environments.agents.function import AgentFunction
from rljob_trainer.environments.agents.program import AgentProgram, cannot_go_on
from rljob_trainer.environments.named_tools import tool_of
from rljob_trainer.environments.tool_loop import ToolLoop
from rljob_trainer.environments.user_program import program_of
from rljob_trainer.episodes.conversation import ChatFormat
from rljob_trainer.episodes.environment import Environment
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import EpisodeLimits
from rljob_trainer.episodes.programs import Programs
from rljob_trainer.episodes.single_turn import SingleTurn
from rljob_trainer.errors import JobFileError, WorldFailedError
from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox.chosen import chosen_sandbox

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedEnvironment, ResolvedSpec
    from rljob_trainer.waits import Waits

FIELD = "spec.rollout.environment"


async def environment_of(
    spec: ResolvedSpec,
    chat: ChatFormat,
    log: Path,
    base: Path,
    stack: AsyncExitStack,
    report: Callable[[str], None],
    waits: Waits | None = None,
) -> Environment:
    """What plays the job's episodes; the caller closes it. ``log``: the folder for the record of those of many turns;
    ``base``: where the user's modules lie. A sandbox is closed with ``stack``; ``report`` is told what it doesn't hold,
    and ``waits`` what an episode waits for outside the run.

    Raises ``JobFileError`` for a program, a tool or an isolation that cannot be had, ``DataError`` for a corpus,
    ``WorldFailedError`` for a sandbox that does not open, ``OSError`` for the log.
    """
    given = spec.rollout.environment
    if given.type == "singleTurn":
        return SingleTurn()
    # Episodes go on from no record whose answers lack a stream, or have one more.
    told = [{"routingReplay": True}] if spec.algorithm.routing_replay else []
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
            uses=[*([dict(given.params)] if given.params else []), *told],
        )
    if not chat.is_there:
        raise JobFileError(f"{FIELD}: type {given.type} uses chat messages; set spec.model.chatTemplate")
    if given.type == "agent":
        agents = await _agents(given, base, stack)
        agent = AgentProgram(
            agents,
            await stack.enter_async_context(serving_endpoint()),
            chat,
            given.call_format,
            at_once=given.agents,
            seconds=float(given.agent_seconds),
        )
        return Programs(
            agent,
            await asyncio.to_thread(EpisodeLog, log),
            chat,
            limits,
            uses=[agent_texts(given.command, given.function, base), dict(given.params), *told],
            counts=agent.take_counts,
            cannot_go_on=cannot_go_on,
        )
    sandbox = None
    if any(tool.type == "python" for tool in given.tools):
        wanted = await chosen_sandbox(given.sandbox, f"{FIELD}.sandbox", float(given.call_seconds), waits=waits)
        try:
            sandbox = await stack.enter_async_context(wanted)
        except WorldError as error:
            raise WorldFailedError(f"cannot open {FIELD}.sandbox: {error}") from error
        for what in sandbox.not_contained:
            report(f"the sandbox is incomplete here: {what} (docs/sandbox.md)")
    running = asyncio.get_running_loop()

    def says(text: str) -> None:
        running.call_soon_threadsafe(lambda: report(text))

    tools = [
        # In a thread: a large corpus takes minutes to be indexed.
        await aside(partial(tool_of, tool, f"{FIELD}.tools[{index}]", base, sandbox, says))
        for index, tool in enumerate(given.tools)
    ]
    loop = ToolLoop(
        tools,
        given.call_format,
        chat,
        given.call_seconds,
        given.max_observation_tokens,
        most_calls=given.max_calls,
        most_at_once=given.max_calls_per_turn,
    )
    return Programs(
        loop,
        await asyncio.to_thread(EpisodeLog, log),
        chat,
        limits,
        uses=[
            *(tool.function for tool in tools),
            *(dict(tool.settings) for tool in tools if tool.settings),
            *told,
        ],
        counts=loop.take_counts,
        corpora={tool.name: tool.corpus for tool in tools if tool.corpus is not None},
    )


async def _agents(given: ResolvedEnvironment, base: Path, stack: AsyncExitStack) -> Agents:
    """What plays the episodes of agents; its processes end with ``stack``. Raises ``JobFileError``."""
    if given.command:
        command = AgentCommand(given.command, given.params, base, f"{FIELD}.command")
        stack.push_async_callback(command.close)
        return command
    assert given.function is not None
    function = AgentFunction(given.function, given.params, base, f"{FIELD}.function")
    stack.push_async_callback(function.close)
    await function.start()
    return function
