"""A judge that is played: an HTTP server on the loopback device that says what a test tells it to, in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from loopback_site import on_loopback

_SECTION = re.compile(r"\[(\w+) ([0-9a-f]{16})\]\n(.*?)\n\[/\1 \2\]", re.DOTALL)


def sections(body: dict[str, Any]) -> dict[str, str]:
    """The texts of a question, by their names."""
    return {name: text for name, _, text in _SECTION.findall(body["messages"][-1]["content"])}


def completion(text: str | None, *, tokens: int | None = 100, finish: str = "stop") -> web.Response:
    """A chat completion that says ``text``."""
    usage = (
        {}
        if tokens is None
        else {"usage": {"prompt_tokens": tokens - 1, "completion_tokens": 1, "total_tokens": tokens}}
    )
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}
    return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], **usage})


Answer = Callable[[web.Request, dict[str, Any], int], Awaitable[web.StreamResponse]]
"""What is said to a request, with its body, which is the so-manyeth (from 0)."""


class PlayedJudge:
    """What was asked, and where."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@asynccontextmanager
async def playing(answer: Answer, port: int = 0) -> AsyncIterator[PlayedJudge]:
    """A judge that answers as ``answer`` says; port 0: one that is free."""
    judge = PlayedJudge(port)

    async def handle(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        judge.asked.append(body)
        judge.headers.append(dict(request.headers))
        return await answer(request, body, len(judge.asked) - 1)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    async with on_loopback(app, port) as judge.port:
        yield judge


def saying(*texts: str | None, tokens: int | None = 100) -> Answer:
    """Says these one after the other, the last for ever."""

    async def answer(request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
        return completion(texts[min(number, len(texts) - 1)], tokens=tokens)

    return answer


def first(*others: Answer, then: Answer) -> Answer:
    """One answer each, then the same for ever."""

    async def answer(request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
        return await (others[number] if number < len(others) else then)(request, body, number)

    return answer


def status(code: int, text: str = "no", headers: dict[str, str] | None = None) -> Answer:
    """An answer with this status."""

    async def answer(request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
        return web.Response(status=code, text=text, headers=headers)

    return answer


async def hanging(request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
    """Takes the question and says nothing."""
    await asyncio.sleep(3600)
    raise AssertionError("unreachable")


async def closing_at_once(request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
    """Closes the connection without an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()
