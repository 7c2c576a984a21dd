"""The HTTP server of the endpoint: every episode has an address and a key of its own on the loopback device.

    async with serving_endpoint() as endpoint:
        with endpoint.open(voice, sampling, chat, read_calls, own_seconds=600) as episode:
            ...  # an agent talks to episode.client.base_url

    POST BASE/chat/completions    one answer, whole or as a stream of server-sent events
    POST BASE/responses           the same in the form of OpenAI's Responses
    POST BASE/messages            and of Anthropic's Messages
    GET  BASE/models              the model there is

Keys are compared in constant time. A key that is none gets 401, that of an episode that has ended 410; neither is tried
again by OpenAI's clients.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from rljob_trainer.endpoint.chat_answer import ReadCalls
from rljob_trainer.endpoint.chat_request import chat_request
from rljob_trainer.endpoint.dialects import ChatCompletions, Dialect
from rljob_trainer.endpoint.messages import AnthropicMessages
from rljob_trainer.endpoint.refusals import RefusedError
from rljob_trainer.endpoint.responses import Responses
from rljob_trainer.endpoint.served import MODEL, ClientSettings, ServedEpisode
from rljob_trainer.episodes.conversation import ChatFormat
from rljob_trainer.episodes.play import Voice
from rljob_trainer.episodes.requests import SamplingSettings
from rljob_trainer.errors import RLJobError

LOOPBACK = "127.0.0.1"
_LARGEST_BODY = 64 << 20
_BACKLOG = 1024
"""Connections that wait to be taken: many agents begin at once."""
_ENDED = 16384
"""So many episodes that have ended are remembered, to say so to whoever still asks."""
_NO_KEY = "none"
_CLIENT_CLOSED_REQUEST = 499
_DIALECTS: Sequence[Dialect] = (ChatCompletions(), Responses(), AnthropicMessages())
_OF_STREAMS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_log = logging.getLogger(f"{__name__}.http")


class EndpointError(RLJobError):
    """The endpoint cannot be served."""


class Endpoint:
    """The episodes that can be asked, by their names."""

    def __init__(self) -> None:
        self._open: dict[str, ServedEpisode] = {}
        self._ended: dict[str, str] = {}
        """The keys of those that have ended, the oldest first."""
        self._address = ""
        self._noted: set[str] = set()
        """Fields of requests whose word was said not to count: once is enough for a run."""

    def at(self, port: int) -> None:
        """The server listens there."""
        self._address = f"http://{LOOPBACK}:{port}"

    @contextmanager
    def open(
        self, voice: Voice, sampling: SamplingSettings, chat: ChatFormat, read_calls: ReadCalls, *, own_seconds: float
    ) -> Iterator[ServedEpisode]:
        """An episode that can be asked inside of the context. ``own_seconds``: of its agent, while it does not wait for
        the model."""
        name, key = secrets.token_hex(8), f"sk-{secrets.token_urlsafe(32)}"
        client = ClientSettings(f"{self._address}/{name}/v1", key)
        episode = ServedEpisode(name, client, voice, sampling, chat, read_calls, own_seconds)
        self._open[name] = episode
        try:
            yield episode
        finally:
            del self._open[name]
            episode.own_time.stop()
            self._ended[name] = key
            if len(self._ended) > _ENDED:
                del self._ended[next(iter(self._ended))]

    def application(self) -> web.Application:
        """The routes; ``serving_endpoint`` puts them on a port."""
        app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[_telling])
        app.add_routes(
            [
                *(
                    web.post("/{episode}/v1" + dialect.path, functools.partial(self._answer, dialect))
                    for dialect in _DIALECTS
                ),
                web.get("/{episode}/v1/models", self._models),
                web.get("/{episode}/v1/models/{model}", self._model),
            ]
        )
        return app

    def _asked(self, request: web.Request) -> ServedEpisode:
        """The episode that a request is for. Raises ``RefusedError`` for one without its key."""
        name = request.match_info["episode"]
        kind, _, said = request.headers.get("Authorization", "").partition(" ")
        given = said.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        episode = self._open.get(name)
        key = episode.client.api_key if episode is not None else self._ended.get(name, _NO_KEY)
        same = hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode())
        if not same or key == _NO_KEY:
            raise RefusedError("the API key does not belong to this episode", status=401, code="invalid_api_key")
        if episode is None:
            raise RefusedError("the episode has ended", status=410, code="episode_ended")
        return episode

    async def _answer(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        try:
            return await self._answered(dialect, http)
        except RefusedError as error:
            return _refused(error, dialect.refused(error))

    async def _answered(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        episode = self._asked(http)
        body = await http.read()
        try:
            given = json.loads(body)
        except (ValueError, RecursionError) as problem:
            raise RefusedError(f"the body is not JSON: {problem}") from problem
        if not isinstance(given, dict):
            raise RefusedError("the body is not a JSON object")
        request = chat_request(dialect.asked(given), MODEL, episode.sampling)
        self._note(request.not_taken)
        digest = hashlib.sha256(dialect.path.encode() + body).digest()
        asked = episode.repeats.find(http.headers, digest)
        if asked is None:
            asked = episode.repeats.keep(http.headers, digest, episode.ask(request))
        try:
            # Whoever asked may be gone before the answer is there; it is the episode's all the same.
            answer = await asyncio.shield(asked.answer)
        except RefusedError:
            episode.repeats.forget(http.headers, asked)
            raise
        response: web.StreamResponse
        if request.stream:
            # The status is that of the answer, since it is there before the first event.
            response = web.StreamResponse(headers=_OF_STREAMS)
            await response.prepare(http)
            await response.write("".join(dialect.events(request, answer)).encode())
        else:
            response = web.json_response(dialect.whole(request, answer))
            await response.prepare(http)
        await response.write_eof()
        asked.heard = http.transport is not None and not http.transport.is_closing()
        return response

    def _note(self, not_taken: Mapping[str, str]) -> None:
        for name, instead in not_taken.items():
            if name not in self._noted:
                self._noted.add(name)
                _log.warning("an agent asks for %s (logged once per run)", instead)

    async def _models(self, http: web.Request) -> web.StreamResponse:
        self._asked(http)
        return web.json_response({"object": "list", "data": [_MODEL]})

    async def _model(self, http: web.Request) -> web.StreamResponse:
        self._asked(http)
        name = http.match_info["model"]
        if name != MODEL:
            raise RefusedError(f"the model {name!r} does not exist here", status=404, code="model_not_found")
        return web.json_response(_MODEL)


_MODEL: Mapping[str, Any] = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rljob"}


@asynccontextmanager
async def serving_endpoint() -> AsyncIterator[Endpoint]:
    """Serves on a free port of the loopback device while the context lasts. Raises ``EndpointError``."""
    endpoint = Endpoint()
    runner = web.AppRunner(
        endpoint.application(), access_log=None, handle_signals=False, shutdown_timeout=1.0, logger=_log
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, LOOPBACK, 0, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise EndpointError(
                f"cannot serve an endpoint for agents on {LOOPBACK} ({error.strerror or error})"
            ) from error
        endpoint.at(runner.addresses[0][1])
        yield endpoint
    finally:
        await runner.cleanup()


@web.middleware
async def _telling(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in the form of OpenAI's API."""
    try:
        return await handler(request)
    except RefusedError as refused:
        return _refused(refused, refused.body)
    except web.HTTPException as error:
        told = f"{request.method} {request.path}: {error.reason}"
        return web.json_response(RefusedError(told).body, status=error.status)
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise
        # The client has gone: nobody reads this, and aiohttp would log what is raised with a traceback.
        return web.Response(status=_CLIENT_CLOSED_REQUEST)
    except Exception:  # noqa: BLE001  an agent is told in its own language, and the log has the rest
        _log.exception("a request of an agent failed")
        body = RefusedError("the endpoint failed; see the driver's log", kind="server_error").body
        return web.json_response(body, status=500, headers={"x-should-retry": "false"})


def _refused(error: RefusedError, body: Mapping[str, Any]) -> web.Response:
    headers = {"x-should-retry": "false"} if error.status >= 500 else None
    return web.json_response(body, status=error.status, headers=headers)
