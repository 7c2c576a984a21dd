"""The protocols in which the endpoint speaks: each is another form of the same request and the same answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rljob_trainer.endpoint.chat_answer import ChatAnswer
from rljob_trainer.endpoint.chat_request import ChatRequest
from rljob_trainer.endpoint.refusals import RefusedError, unsupported

Body = dict[str, Any]


class Dialect(Protocol):
    """One protocol."""

    @property
    def path(self) -> str:
        """Where its requests are sent, behind the base URL."""
        ...

    def asked(self, body: Body) -> Body:
        """The request as ``chat_request`` takes it. Raises ``RefusedError`` for what that has no words for."""
        ...

    def whole(self, request: ChatRequest, answer: ChatAnswer) -> Body:
        """The answer in one object."""
        ...

    def events(self, request: ChatRequest, answer: ChatAnswer) -> Iterator[str]:
        """The answer as server-sent events."""
        ...

    def refused(self, error: RefusedError) -> Body:
        """What a client is told instead of an answer."""
        ...


class ChatCompletions:
    """OpenAI's Chat Completions."""

    path = "/chat/completions"

    def asked(self, body: Body) -> Body:
        return body

    def whole(self, request: ChatRequest, answer: ChatAnswer) -> Body:
        return answer.completion(request.log_probs)

    def events(self, request: ChatRequest, answer: ChatAnswer) -> Iterator[str]:
        for chunk in answer.chunks(request.log_probs, request.include_usage):
            yield server_sent(chunk)
        yield "data: [DONE]\n\n"

    def refused(self, error: RefusedError) -> Body:
        return error.body


def server_sent(data: Mapping[str, Any], name: str | None = None) -> str:
    """An event of a stream."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n"


def only(given: Mapping[str, Any], fields: frozenset[str], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Raises ``RefusedError`` for a field that is none of ``fields``, unless it has a value (of ``neutral``) that asks
    for nothing."""
    for name, value in given.items():
        if value is None or name in fields or (name in neutral and value in neutral[name]):
            continue
        raise unsupported(name, f"{name} is not supported here; remove it")
