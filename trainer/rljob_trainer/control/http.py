"""The driver's HTTP side: status and metrics for whoever may know, commands for whoever has the token.

    GET /v1/status    DriverStatus as JSON
    GET /metrics      Prometheus' text format
    PUT /v1/desired   Desired as JSON; answers with the status

With a token every call needs it (`Authorization: Bearer ...`). Without one, as `rljob run` may serve on the loopback
device, there are no commands. Bodies are bounded in size and time, and read as JSON into a strict model. A connection
serves one request and lasts for seconds; when there are many, the oldest has to go.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from pydantic import ValidationError

from rljob_api.status import DESIRED_PATH, LARGEST_BODY, METRICS_PATH, STATUS_PATH, Desired, DriverStatus
from rljob_trainer.control.standing import shown
from rljob_trainer.control.steering import WishError, WrongAttemptError
from rljob_trainer.errors import RLJobError
from rljob_trainer.telemetry.prometheus import CONTENT_TYPE

LOOPBACK = "127.0.0.1"
_BODY_SECONDS = 10.0
_CONNECTION_SECONDS = 20.0
_MOST_CONNECTIONS = 64
_BACKLOG = 16
"""Connections that are taken at once, before any of them can be closed."""
_HEADERS = 32
_HEADER_BYTES = 2048
_SHORTEST_TOKEN = 16


_OF_CLIENTS = (HttpProcessingError, web.RequestPayloadError)
"""What is wrong with a request is told to who sent it, not to whoever reads the log."""
_log = logging.getLogger(f"{__name__}.http")
_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _OF_CLIENTS)))


class ServiceError(RLJobError):
    """The service cannot be offered as asked for."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the service passes on. ``take`` raises ``WrongAttemptError`` and ``WishError``."""

    status: Callable[[], DriverStatus]
    metrics: Callable[[], str]
    take: Callable[[Desired], None]


@dataclass(frozen=True, slots=True)
class Listening:
    """Where to serve. ``port`` 0: any free one. ``token`` None: only on the loopback device, and no commands."""

    port: int
    host: str = LOOPBACK
    token: str | None = None
    farewell: float = 0.0
    """Seconds to go on serving after the end, until somebody has read how the run ended. Who polls every few seconds
    would otherwise find nobody, and never hear of the last steps."""

    def __post_init__(self) -> None:
        if self.token is None and self.host != LOOPBACK:
            raise ServiceError(f"serving on {self.host} requires a token, because other machines can connect")
        if self.token is not None and len(self.token) < _SHORTEST_TOKEN:
            raise ServiceError(f"the token has only {len(self.token)} characters; use at least {_SHORTEST_TOKEN}")


def read_token(file: Path) -> str:
    """The token in a file; white space around it doesn't count. Raises ``ServiceError``."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServiceError(f"cannot read the token from {file}: {error}") from error


@asynccontextmanager
async def serving(listening: Listening, answers: Answers) -> AsyncIterator[int]:
    """Serves while the context lasts; gives the port. Raises ``ServiceError`` when it is taken."""
    told = asyncio.Event()
    app = application(listening.token, answers, told)
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=1.0,
        logger=_log,
        max_headers=_HEADERS,
        max_line_size=_HEADER_BYTES,
        max_field_size=_HEADER_BYTES,
    )
    await runner.setup()
    assert runner.server is not None
    door = _Door(runner.server)
    server: asyncio.Server | None = None
    try:
        try:
            server = await asyncio.get_running_loop().create_server(
                door.enter, listening.host, listening.port, backlog=_BACKLOG
            )
        except OSError as error:
            raise ServiceError(
                f"cannot serve on {listening.host}:{listening.port} ({error.strerror or error}); choose another port"
            ) from error
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            with suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), listening.farewell)
    finally:
        if server is not None:
            server.close()
        await runner.cleanup()


class _Door:
    """Lets connections in, each for a while and not too many at a time."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._inside: dict[web.RequestHandler, None] = {}
        """In the order in which they came."""

    def enter(self) -> web.RequestHandler:
        """The protocol of a new connection."""
        if len(self._inside) >= _MOST_CONNECTIONS:
            connected = [other for other in self._inside if other.transport is not None]
            # Who has closed the connection meanwhile has no transport any more.
            for other in connected[: len(self._inside) - _MOST_CONNECTIONS + 1]:
                self._leave(other)
        protocol = self._server()
        self._inside[protocol] = None
        asyncio.get_running_loop().call_later(_CONNECTION_SECONDS, self._leave, protocol)
        return protocol

    def _leave(self, protocol: web.RequestHandler) -> None:
        self._inside.pop(protocol, None)
        if protocol.transport is not None:
            protocol.transport.abort()


def application(token: str | None, answers: Answers, told: asyncio.Event | None = None) -> web.Application:
    """The routes; ``serving`` puts them on a port. ``told`` is set once the end of the run has been read."""

    async def status(request: web.Request) -> web.StreamResponse:
        return _status(answers, told)

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(body=answers.metrics().encode(), headers={"Content-Type": CONTENT_TYPE})

    async def desire(request: web.Request) -> web.StreamResponse:
        if token is None:
            return _refused(403, "this driver serves without a token, so it accepts no commands")
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = await request.read()
            desired = Desired.model_validate_json(body)
        except web.RequestPayloadError as error:
            return _refused(400, f"cannot read the body: {error}")
        except TimeoutError:
            return _refused(408, f"the body did not arrive within {_BODY_SECONDS:.0f} s")
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            return _refused(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        try:
            answers.take(desired)
        except WrongAttemptError as error:
            return _refused(409, str(error))
        except WishError as error:
            return _refused(422, str(error))
        return _status(answers, told)

    app = web.Application(client_max_size=LARGEST_BODY, middlewares=[] if token is None else [_asking_for(token)])
    app.on_response_prepare.append(_last_of_its_connection)
    app.add_routes([web.get(STATUS_PATH, status), web.get(METRICS_PATH, metrics), web.put(DESIRED_PATH, desire)])
    return app


async def _last_of_its_connection(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Connection"] = "close"  # a client that is not told might send its next request into it
    response.force_close()


def _asking_for(token: str) -> Middleware:
    wanted = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        said = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(said, wanted):
            return web.Response(status=401, text="a valid token is required\n", headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return check


def _status(answers: Answers, told: asyncio.Event | None) -> web.Response:
    status = answers.status()
    if told is not None and status.end is not None:
        told.set()
    return web.Response(body=shown(status).encode(), content_type="application/json")


def _refused(code: int, why: str) -> web.Response:
    return web.Response(status=code, text=f"{why}\n")
