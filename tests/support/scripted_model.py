"""A model that says what a test writes, with log-probs that the test can work out, and episodes that it plays behind
the endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from published_chats import FAMILIES, chat_of, letters_of

from rljob_trainer.endpoint.served import ClientSettings
from rljob_trainer.endpoint.server import Endpoint
from rljob_trainer.environments.agents.common import Agents
from rljob_trainer.environments.agents.program import AgentProgram, cannot_go_on
from rljob_trainer.episodes.environment import Task, tasks_of
from rljob_trainer.episodes.episode import Episode, Prompt
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import EpisodeLimits
from rljob_trainer.episodes.programs import Programs
from rljob_trainer.episodes.requests import Finished, GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.episodes.tokens import Tokens

CHAT = chat_of(FAMILIES[0])
END = CHAT.encode("<|im_end|>")
ASKED = ({"role": "user", "content": "How much is 2 * 21?"},)
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 * 21"}}</tool_call>'


def said(text: str) -> list[int]:
    """The token ids with which the model says a text, letter by letter, and ends."""
    return [*letters_of(CHAT, text), *END]


def log_probs_of(count: int, turn: int) -> list[float]:
    """Of the tokens of a turn: binary fractions, which every kind of float holds."""
    return [-(1 + turn + i % 7) / 8 for i in range(count)]


class Scripted:
    """Says one text after the other. ``gate``: answers wait until it is set."""

    def __init__(self, *texts: str, version: int = 3) -> None:
        self.texts = texts
        self.version = version
        self.seen: list[list[int]] = []
        """The token ids of every request, as they came."""
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Finished | None = None
    ) -> list[GenerationResult]:
        self.seen += [list(request.prompt_ids) for request in requests]
        await self.gate.wait()
        return [self._answer(request) for request in requests]

    def _answer(self, request: GenerationRequest) -> GenerationResult:
        whole = said(self.texts[request.id.turn % len(self.texts)])
        ids = np.array(whole[: request.sampling.max_tokens], np.int32)
        log_probs = np.array(log_probs_of(len(ids), request.id.turn), np.float32)
        tokens = Tokens.sampled(ids, log_probs, np.full(len(ids), self.version, np.int32))
        return GenerationResult(request.id, tokens, "stop" if len(ids) == len(whole) else "length")


def tasks(samples: int = 1, longest: int = 2000) -> list[Task]:
    """Of one prompt, whose number is 5."""
    text = CHAT.render(ASKED)
    prompt = Prompt(5, 0, 5, "s", text, tuple(CHAT.encode(text)), "42", {"level": 2}, messages=ASKED)
    return tasks_of(prompt, range(samples), SamplingSettings(max_tokens=longest), seed=1)


class InTest:
    """An agent that is a function of the test, in its process."""

    def __init__(self, agent: Callable[[ClientSettings], Awaitable[Any]]) -> None:
        self._agent = agent

    async def play(self, task: Any, client: ClientSettings) -> Any:
        return await self._agent(client)

    async def close(self) -> None:
        """Nothing is open."""


def environment(
    agents: Agents,
    endpoint: Endpoint,
    log: EpisodeLog,
    *,
    turns: int = 8,
    at_once: int = 4,
    seconds: float = 60.0,
    tries: int = 2,
    call_format: str = "hermes",
) -> Programs:
    """As a job of type agent has it."""
    program = AgentProgram(agents, endpoint, CHAT, call_format, at_once=at_once, seconds=seconds)
    return Programs(
        program,
        log,
        CHAT,
        EpisodeLimits(turns, prompt_tokens=1000),
        tries=tries,
        counts=program.take_counts,
        cannot_go_on=cannot_go_on,
    )


async def played(
    agent: Callable[[ClientSettings], Awaitable[Any]],
    model: Scripted,
    endpoint: Endpoint,
    log: EpisodeLog,
    *,
    longest: int = 2000,
    **options: Any,
) -> tuple[Episode, dict[str, float]]:
    """One episode of an agent that is a function of the test, and what was counted."""
    programs = environment(InTest(agent), endpoint, log, **options)
    (episode,) = await programs.play(tasks(longest=longest), model)
    return episode, programs.take_counts()
