"""The driver's HTTP side among clients that mean no good, or have never heard of HTTP."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

import pytest

from rljob_api.status import DriverStatus, Pools, RolloutStatus, TrainerStatus
from rljob_trainer.control import http as service
from rljob_trainer.control.http import Answers, Listening, serving

TOKEN = "0123456789abcdef"
ASK = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
BODY_OF_NO_CHUNKS = (
    f"PUT /v1/desired HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
)


def answers() -> Answers:
    pools = Pools(rollout=RolloutStatus(desired=1, ready=1), trainer=TrainerStatus(desired=1, ready=1))
    status = DriverStatus(generation=1, attempt=1, time=datetime.now(UTC), pools=pools)
    return Answers(lambda: status, lambda: "rljob_x 1.0\n", lambda desired: None)


async def said(port: int, request: bytes) -> bytes:
    """Everything that is answered until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_connections_that_say_nothing_keep_nobody_from_an_answer() -> None:
    async with serving(Listening(0, token=TOKEN), answers()) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        assert (await said(port, ASK)).startswith(b"HTTP/1.1 200")
        ended = [reader for reader, _ in idle if reader.at_eof() or reader.exception() is not None]
        assert len(idle) - len(ended) <= service._MOST_CONNECTIONS + service._BACKLOG
        for _, writer in idle:
            writer.close()


async def test_a_connection_that_says_little_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_CONNECTION_SECONDS", 0.2)
    async with serving(Listening(0, token=TOKEN), answers()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost:")
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


@pytest.mark.parametrize(
    "request_text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n",
        b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 10_000 + b"\r\n\r\n",
        b"PUT /v1/desired HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        BODY_OF_NO_CHUNKS.encode(),
    ],
    ids=["tls", "no colon", "version 9", "many headers", "long header", "length", "chunks"],
)
async def test_a_malformed_request_is_refused_without_a_word_in_the_log(
    request_text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(Listening(0, token=TOKEN), answers()) as port:
            answer = await said(port, request_text)
            assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 431")), answer
            assert b"Traceback" not in answer
            assert (await said(port, ASK)).startswith(b"HTTP/1.1 200")
    assert [record.getMessage() for record in caplog.records if record.name != "asyncio"] == []
