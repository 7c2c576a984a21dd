"""The environment of tools: the model calls them in its answers and goes on with what they say, until it calls none."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from rljob_trainer.environments.call_formats import FORMATS, MalformedCall, ToolCall, without_thoughts
from rljob_trainer.environments.tools import Tool, ToolError
from rljob_trainer.episodes.conversation import ChatFormat
from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.identity import TRAINING
from rljob_trainer.episodes.play import LONG_TEXT, Voice
from rljob_trainer.episodes.programs import is_cancelled
from rljob_trainer.texts import writable
from rljob_trainer.world.protocol import World, failure_of_the_world

_LOGGED = 20
"""Exceptions of tools that are told in the log; all are counted."""
_log = logging.getLogger(__name__)


class Said(TypedDict):
    """What a tool said."""

    text: str
    failed: bool


class ToolLoop:
    """A program (``episodes/programs.py``) that plays all episodes of a run."""

    def __init__(
        self,
        tools: Sequence[Tool],
        call_format: str,
        chat: ChatFormat,
        seconds: float,
        longest: int | None,
        *,
        most_calls: int | None = None,
        most_at_once: int | None = None,
    ) -> None:
        """``seconds``: of one call. ``longest``: tokens of one observation; None: as long as it is. ``most_calls``: of
        one episode; ``most_at_once``: of one answer; None: any number."""
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._calls_in = FORMATS[call_format]
        self._chat = chat
        # In a code fence is Python for the one tool there is, of which the prompt tells.
        self._schemas = None if call_format == "codeFence" else [tool.schema for tool in tools]
        self._seconds = seconds
        self._longest = longest
        self._most_calls = most_calls
        self._most_at_once = most_at_once
        self._counts: Counter[str] = Counter()
        self._logged = 0

    async def __call__(self, task: Task, model: Voice, world: World) -> None:
        # A validation's calls are counted nowhere: they are no rollout's.
        counts = self._counts if task.id.purpose == TRAINING else Counter[str]()
        messages, left = task.messages, self._most_calls
        while True:
            answer = await model.chat(messages, tools=self._schemas)
            calls = self._calls_in(without_thoughts(answer.text))
            if not calls:
                return
            messages = [*messages, answer.message]
            most = min(most for most in (len(calls), left, self._most_at_once) if most is not None)
            for call in calls[:most]:
                name, text = await self._observation(call, world, counts)
                messages.append({"role": "tool", "name": name, "content": self._chat.without_special(text)})
            if left is not None:
                left -= most
            if len(calls) > most:
                counts["calls"] += len(calls) - most
                counts["errors"] += len(calls) - most
                messages.append({"role": "tool", "name": "none", "content": self._not_made(len(calls) - most, left)})

    def _not_made(self, calls: int, left: int | None) -> str:
        """What the model is told of ``calls`` that it has made in vain; ``left``: to its episode."""
        these = "1 call was" if calls == 1 else f"{calls} calls were"
        if left == 0:
            return f"Error: {these} not made: all {self._most_calls} calls are used up; answer without tools"
        return f"Error: {these} not made: at most {self._most_at_once} in one answer"

    def take_counts(self) -> dict[str, float]:
        """Metrics of the calls since the last time."""
        calls, errors = self._counts["calls"], self._counts["errors"]
        self._counts.clear()  # episodes that go on count on in here
        return {"rollout/tool_calls": float(calls), "rollout/tool_errors": float(errors)}

    async def _observation(self, call: ToolCall | MalformedCall, world: World, counts: Counter[str]) -> tuple[str, str]:
        """The tool's name, and what the model is told."""
        counts["calls"] += 1
        if isinstance(call, MalformedCall):
            counts["errors"] += 1
            return "none", f"Error: the call cannot be read: {call.problem}"
        name = call.name or next(iter(self._tools))
        tool = self._tools.get(name)
        if tool is None:
            counts["errors"] += 1
            return "none", f"Error: there is no tool {name[:80]!r}; there are {', '.join(self._tools)}"
        given = {str(tool.first): call.arguments} if isinstance(call.arguments, str) else dict(call.arguments)

        async def use(arguments: dict[str, Any]) -> Said:
            async with tool.turn:
                return await self._use(tool, arguments)

        said: Said = await world.call(f"tool {name}", use, given)
        counts["errors"] += said["failed"]
        return name, said["text"]

    async def _use(self, tool: Tool, arguments: dict[str, Any]) -> Said:
        """A tool that raises has said something too: arguments are the model's. Raises ``WorldError``.

        ``SystemExit`` (of a parser of arguments, say) and a ``CancelledError`` of its own are no more than that.
        """
        try:
            async with asyncio.timeout(None if tool.own_limit else self._seconds) as limit:
                return Said(text=await self._cut(await tool(arguments)), failed=False)
        except ToolError as error:
            return Said(text=await self._cut(writable(f"Error: {error}")), failed=True)
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:  # of the user's code
            if (failure := failure_of_the_world(error)) is not None:
                raise failure from error
            if limit.expired():
                return Said(text=f"Error: no answer within {self._seconds:g} s", failed=True)
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            self._logged += 1
            if self._logged <= _LOGGED:
                what = f"{type(error).__name__}: {error}"
                _log.warning("tool %s raised %s; the model gets the error", tool.name, writable(what))
            return Said(text=await self._cut(writable(f"Error: {type(error).__name__}: {error}")), failed=True)

    async def _cut(self, text: str) -> str:
        """A text of at most so many tokens, its middle left out."""
        if self._longest is None:
            return text
        most = self._longest * self._chat.longest_token
        if len(text) > 2 * most:
            text = text[:most] + text[-most:]  # what stays is in there
        encode = self._chat.encode
        ids = encode(text) if len(text) <= LONG_TEXT else await asyncio.to_thread(encode, text)
        if len(ids) <= self._longest:
            return text
        left = self._longest // 2
        right = self._longest - left
        return f"{self._chat.decode(ids[:left])} ... {self._chat.decode(ids[len(ids) - right :])}"
