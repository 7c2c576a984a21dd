"""One episode behind the endpoint: its chat goes through ``Voice.chat``, like that of any program.

So the tokens, log-probs and versions are those that the engine gave, what the model said is never tokenised again, and
who asks does not see that an engine was lost or weights were published: the request waits. The agent sends messages,
not tokens. For an answer that it sends back as it was stands what the model wrote, calls and all, and the chat goes on
from there; one that it has changed is a message like any other, and a branch begins with it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rljob_trainer.endpoint.chat_answer import ChatAnswer, ReadAnswer, ReadCalls
from rljob_trainer.endpoint.chat_request import ChatRequest
from rljob_trainer.endpoint.journal import RequestJournal, refuse, withdraw
from rljob_trainer.endpoint.own_time import OwnTime
from rljob_trainer.endpoint.refusals import RefusedError, invalid
from rljob_trainer.endpoint.repeats import Repeats
from rljob_trainer.episodes.conversation import ChatFormat
from rljob_trainer.episodes.curfew import EpisodeOverError, NoRoomError
from rljob_trainer.episodes.play import Voice
from rljob_trainer.episodes.requests import SamplingSettings

MODEL = "policy"
"""What the model is called that is trained."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What an OpenAI client has to know."""

    base_url: str
    api_key: str
    model: str = MODEL

    def variables(self) -> dict[str, str]:
        """The environment variables by which clients find it; Anthropic's adds the version to its address itself."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }


class ServedEpisode:
    """The model of one episode, as the endpoint serves it. From within an event loop."""

    def __init__(
        self,
        name: str,
        client: ClientSettings,
        voice: Voice,
        sampling: SamplingSettings,
        chat: ChatFormat,
        read_calls: ReadCalls,
        own_seconds: float,
    ) -> None:
        """``name`` is part of the ids of its answers. ``own_seconds``: how long the agent may be at work without
        waiting for the model."""
        self.client = client
        self.sampling = sampling
        self.journal = RequestJournal()
        self.repeats = Repeats()
        self.own_time = OwnTime(own_seconds)
        self.fault: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Done when the model cannot be asked any more: no matter of the agent's."""
        self.was_refused = False
        """The agent was told that the episode is over, or has no room."""
        self._name = name
        self._voice, self._chat, self._read_calls = voice, chat, read_calls
        self._said: dict[str, Mapping[str, Any]] = {}
        """The model's own messages, by what clients have of them."""
        self._running: set[asyncio.Task[ChatAnswer]] = set()

    def ask(self, request: ChatRequest) -> asyncio.Task[ChatAnswer]:
        """Asks the model, whether or not somebody waits for the answer. The task raises ``RefusedError``, and 503 once
        there is a ``fault``."""
        task = asyncio.create_task(self._answer(request), name="answer of the endpoint")
        self._running.add(task)
        task.add_done_callback(self._over)
        return task

    async def _answer(self, request: ChatRequest) -> ChatAnswer:
        messages = [self._as_said(message) for message in request.messages]
        number = len(self.journal.entries)
        entry = self.journal.add(messages, request.tools, request.max_tokens)
        try:
            with self.own_time.stopped():
                answer = await self._voice.chat(messages, tools=request.tools, max_tokens=request.max_tokens)
        except EpisodeOverError as over:
            refuse(entry)
            self.was_refused = True
            code = "context_length_exceeded" if isinstance(over, NoRoomError) else "episode_over"
            raise RefusedError(f"{over}", param="messages", code=code) from over
        except (ValueError, TypeError) as problem:
            # The template does not take the messages: the model was not asked.
            withdraw(entry)
            raise invalid("messages", f"{problem}") from problem
        except (Exception, asyncio.CancelledError) as error:
            if not self.fault.done():
                self.fault.set_result(error)
            raise RefusedError(
                "the run is ending, or the episode was abandoned", status=503, kind="server_error", code="episode_ended"
            ) from error
        read = self._read_calls(answer.text) if request.tools else ReadAnswer(answer.text)
        made = ChatAnswer(f"{self._name}-{number}", MODEL, answer, read, self._chat.decode)
        self._said[_known_by(made.message)] = answer.message
        return made

    def _as_said(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message for the chat template: an answer of the model's as it was. A tool cannot end its own message."""
        if message["role"] == "tool":
            return {**message, "content": self._chat.without_special(message["content"])}
        if message["role"] != "assistant":
            return message
        said = self._said.get(_known_by(message))
        return _rewritten(message) if said is None else said

    def _over(self, task: asyncio.Task[ChatAnswer]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone


def _known_by(message: Mapping[str, Any]) -> str:
    """What is left of an answer when a client has had it and sends it back: its content and its calls, whose arguments
    some write anew."""
    calls = [
        [call["id"], call["function"]["name"], _plain(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    return json.dumps([message.get("content") or "", calls], sort_keys=True)


def _plain(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _rewritten(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """An answer that the model did not give in this way, as chat templates take it."""
    written = {"role": "assistant", "content": message["content"] or ""}
    if "tool_calls" not in message:
        return written
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": _plain(call["function"]["arguments"])},
        }
        for call in message["tool_calls"]
    ]
    return {**written, "tool_calls": calls}
