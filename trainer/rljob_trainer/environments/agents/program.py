"""The environment of agents: each episode is an agent that talks to an endpoint. The page is docs/agents.md.

An agent is no durable program: it cannot be run again over a record, since nobody knows what else it depends on. So
the whole run of an agent is one call of the world, whose result is what it returned and all that it asked. An episode
that has ended is played again from that, without the agent; one that has not begins anew.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from rljob_trainer.endpoint.chat_answer import Call, ReadAnswer
from rljob_trainer.endpoint.journal import answers_in, turns_of
from rljob_trainer.endpoint.served import ServedEpisode
from rljob_trainer.endpoint.server import Endpoint
from rljob_trainer.environments.agents.common import Agents
from rljob_trainer.environments.agents.process import AgentError
from rljob_trainer.environments.call_formats import MalformedCall, ToolCall, split, without_thoughts
from rljob_trainer.episodes.conversation import ChatFormat
from rljob_trainer.episodes.curfew import EpisodeOverError
from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.identity import TRAINING
from rljob_trainer.episodes.play import Voice
from rljob_trainer.episodes.record import CallPlace, EpisodeRecord
from rljob_trainer.errors import ProgramError
from rljob_trainer.world.protocol import Json, World

AGENT = "agent"
"""The kind of the one call of the world that there is in an episode."""
_PLACE = CallPlace((), 0)
"""Where it is made."""


class AgentProgram:
    """A program (``episodes/programs.py``) that plays all episodes of a run."""

    def __init__(
        self, agents: Agents, endpoint: Endpoint, chat: ChatFormat, call_format: str, *, at_once: int, seconds: float
    ) -> None:
        """``at_once``: agents that run at the same time. ``seconds``: of one agent, while it does not wait for the
        model."""
        self._agents, self._endpoint, self._chat = agents, endpoint, chat
        self._call_format, self._seconds = call_format, seconds
        self._places = asyncio.Semaphore(at_once)
        self._counts: Counter[str] = Counter()

    async def __call__(self, task: Task, model: Voice, world: World) -> Json:
        """What the agent returned. Raises ``EpisodeOverError`` for one that was cut, ``ProgramError`` for one that
        failed, ``EpisodeLostError`` where that says nothing about it."""
        is_live = False

        async def play() -> Json:
            nonlocal is_live
            is_live = True
            async with self._places:
                return await self._live(task, model)

        ended = await world.call(AGENT, play)
        if not is_live:
            for turn in turns_of(ended["asked"]):
                try:
                    await model.chat(turn.messages, tools=turn.tools, max_tokens=turn.max_tokens)
                except EpisodeOverError:
                    continue  # the agent was told so, and went on
        if ended["cut"] is not None:
            raise EpisodeOverError(ended["cut"])
        return ended["returned"]

    def take_counts(self) -> dict[str, float]:
        """Metrics of the calls that the model wrote since the last time."""
        calls, errors = self._counts["calls"], self._counts["errors"]
        self._counts.clear()
        return {"rollout/tool_calls": float(calls), "rollout/tool_errors": float(errors)}

    async def _live(self, task: Task, model: Voice) -> dict[str, Json]:
        with self._endpoint.open(
            model, task.sampling, self._chat, self._reader(task), own_seconds=self._seconds
        ) as episode:
            returned, cut = await self._played(task, episode)
            return {"returned": returned, "cut": cut, "asked": episode.journal.entries}

    async def _played(self, task: Task, episode: ServedEpisode) -> tuple[Json, str | None]:
        """What the agent returned, and why it was cut, if it was."""
        agent = asyncio.create_task(self._agents.play(_told(task), episode.client), name="agent")
        try:
            await asyncio.wait([agent, episode.fault, episode.own_time.is_up], return_when=asyncio.FIRST_COMPLETED)
            if episode.fault.done():
                raise episode.fault.result()
            if not agent.done():
                if not answers_in(episode.journal.entries):
                    raise ProgramError(f"{task.id}: its agent did not ask the model within {self._seconds:g} s")
                return None, f"the agent ran for {self._seconds:g} s without asking the model"
            try:
                return agent.result(), None
            except AgentError as error:
                if not episode.was_refused:
                    raise ProgramError(
                        f"{task.id}: {error}\nCorrect it and start again: the run continues from its last checkpoint"
                    ) from error
                # It was told that the episode is over, and has let that pass.
                return None, "the episode is over, so its agent was ended"
        finally:
            agent.cancel()
            await asyncio.wait([agent])
            if not agent.cancelled():
                agent.exception()

    def _reader(self, task: Task) -> Callable[[str], ReadAnswer]:
        # A validation's calls are counted nowhere: they are no rollout's.
        counts = self._counts if task.id.purpose == TRAINING else Counter[str]()

        def read(text: str) -> ReadAnswer:
            behind = without_thoughts(text)
            content, found = split(behind, self._call_format)
            calls = [call for call in map(_whole, found) if call is not None]
            counts["calls"] += len(found)
            counts["errors"] += len(found) - len(calls)
            # What cannot be read is no call, and all of it a text, as with other servers.
            return (
                ReadAnswer(text) if len(calls) < len(found) else ReadAnswer(text.removesuffix(behind) + content, calls)
            )

        return read


def cannot_go_on(record: EpisodeRecord) -> str | None:
    """Why an episode of an agent has to begin anew that has this record; None: it has ended, and all is there."""
    if not record.calls:
        return None
    call = record.calls.get(_PLACE)
    if call is None or not call.done:
        return "its agent had not finished and must be started again"
    if answers_in(call.result["asked"]) > record.turns:
        return "part of it was generated by newer weights"
    return None


def _told(task: Task) -> dict[str, Any]:
    """A task as agents have it: plain data."""
    prompt = task.prompt
    return {
        "messages": task.messages,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "row": dict(prompt.columns),
        "seed": task.world_seed,
    }


def _whole(call: ToolCall | MalformedCall) -> Call | None:
    """A call that names a tool and its arguments."""
    if isinstance(call, MalformedCall) or call.name is None or isinstance(call.arguments, str):
        return None
    return Call(call.name, call.arguments)
