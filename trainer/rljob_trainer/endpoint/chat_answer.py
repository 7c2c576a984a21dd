"""What the model said, as OpenAI's API has it: one object, or the chunks of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rljob_trainer.episodes.episode import is_cut
from rljob_trainer.episodes.play import Answer

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, without special tokens."""


class Call(NamedTuple):
    """A call of a tool that the model has written."""

    name: str
    arguments: Mapping[str, Any]


class ReadAnswer(NamedTuple):
    """An answer with the calls taken out of its text."""

    content: str
    calls: Sequence[Call] = ()


ReadCalls = Callable[[str], ReadAnswer]
"""Finds the calls in what the model said."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The model's answer to one request."""

    id: str
    model: str
    answer: Answer
    read: ReadAnswer
    decode: Decode
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def message(self) -> dict[str, Any]:
        """The message, as the client has it and sends it back."""
        calls = [
            {
                "id": f"call_{self.id}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for index, call in enumerate(self.read.calls)
        ]
        # A message of calls alone has no content.
        content = self.read.content if self.read.content or not calls else None
        return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}

    @property
    def finish_reason(self) -> str:
        """Why nothing more was said."""
        if is_cut(self.answer.finish):
            return "length"
        return "tool_calls" if self.read.calls else "stop"

    @property
    def usage(self) -> dict[str, int]:
        """Tokens that the model saw and said."""
        said, saw = len(self.answer.said), len(self.answer.context) - len(self.answer.said)
        return {"prompt_tokens": saw, "completion_tokens": said, "total_tokens": saw + said}

    def completion(self, log_probs: bool) -> dict[str, Any]:
        """The whole in one object."""
        choice = {
            "index": 0,
            "message": self.message,
            "finish_reason": self.finish_reason,
            "logprobs": self._log_probs() if log_probs else None,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage}

    def chunks(self, log_probs: bool, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The answer in the pieces of a stream. The model's answer is there whole when the first piece is sent."""
        head = self._head("chat.completion.chunk") | ({"usage": None} if include_usage else {})

        def chunk(delta: Mapping[str, Any], reason: str | None = None, said: Any = None) -> dict[str, Any]:
            return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": said}]}

        message = self.message
        yield chunk({"role": "assistant", "content": ""})
        yield chunk({"content": message["content"] or ""}, said=self._log_probs() if log_probs else None)
        for index, call in enumerate(message.get("tool_calls", ())):
            yield chunk({"tool_calls": [{"index": index, **call}]})
        yield chunk({}, self.finish_reason)
        if include_usage:
            yield {**head, "choices": [], "usage": self.usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _log_probs(self) -> dict[str, Any]:
        """The log-probs of every token that the model said, the one with which it ended too, whose text is empty."""
        tokens = self.answer.tokens
        return {
            "content": [
                self._token(id, log_prob)
                for id, log_prob in zip(tokens.ids.tolist(), tokens.log_probs.tolist(), strict=True)
            ],
            "refusal": None,
        }

    def _token(self, id: int, log_prob: float) -> dict[str, Any]:
        text = self.decode([id])
        # A part of a character is no text, and its bytes are not known here.
        known = None if "\ufffd" in text else list(text.encode("utf-8", "backslashreplace"))
        return {"token": text, "bytes": known, "logprob": log_prob, "top_logprobs": []}
