"""One request to an OpenAI-compatible endpoint, and what its answer means: an answer, a refusal, or try again later.

The key goes into the header of the request and nowhere else: what the endpoint says is told without it, and a redirect,
which would carry it to somebody else, is a refusal.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import aiohttp

from rljob_trainer.errors import JobFileError
from rljob_trainer.rewards.judge.transport import AwayError, JudgeAnswer, JudgeRefusedError, QuestionError
from rljob_trainer.texts import writable
from rljob_trainer.waits import NEVER, Clock

if TYPE_CHECKING:
    from rljob_api.spec.judge import JudgeSpec

_LARGEST = 1 << 20
"""Bytes of an answer; what sends more is no judge."""
_SHOWN = 300
_LATER = frozenset({408, 409, 425, 429})
_OF_THE_QUESTION = frozenset({400, 413, 422})
"""What may be wrong with one question: it is longer than the judge's context, say."""


class JudgeEndpoint:
    """Open from ``open`` to ``close``."""

    concurrency = 16
    answered_at = NEVER

    def __init__(self, judge: JudgeSpec, place: str) -> None:
        """``place``: the path in the job file. Raises ``JobFileError`` when the environment has no key."""
        assert judge.base_url is not None
        assert judge.model is not None
        self.name = f"the judge {judge.model} at {judge.base_url}"
        self.model = judge.model
        self._url = f"{judge.base_url.rstrip('/')}/chat/completions"
        self._seconds = judge.request_seconds
        self._connections = judge.concurrency or self.concurrency
        self._key = None if judge.api_key_env is None else _key(judge.api_key_env, place)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Connects to nobody yet."""
        # No cookies: an endpoint that tells its replicas apart by them would get all questions to one.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={} if self._key is None else {"Authorization": f"Bearer {self._key}"},
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, body: Mapping[str, Any], seed: int, deadline: Clock) -> JudgeAnswer:
        """``seed``: not every endpoint takes one, and none is sent. Raises ``AwayError``, ``JudgeRefusedError`` and
        ``QuestionError``."""
        assert self._session is not None, "the endpoint is not open"
        # Never 0, which aiohttp takes for "no limit".
        seconds = max(0.001, min(self._seconds, deadline() - asyncio.get_running_loop().time()))
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.post(
                self._url, json=dict(body), allow_redirects=False, timeout=timeout
            ) as response:
                data = await _body(response)
                status, retry_after = response.status, response.headers.get("Retry-After")
        except TimeoutError:
            raise AwayError(f"no answer within {round(seconds, 1):g} s") from None
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise AwayError(self._shown(f"{type(error).__name__}: {error}")) from None
        if status == 200:
            return self._said(data)
        problem = f"status {status}: {self._shown(_message(data))}"
        if status in _OF_THE_QUESTION:
            raise QuestionError(problem)
        if status in _LATER or status >= 500:
            raise AwayError(problem, _seconds(retry_after))
        raise JudgeRefusedError(problem)

    def take_counts(self) -> dict[str, float]:
        return {}

    def _said(self, data: bytes) -> JudgeAnswer:
        try:
            answer = json.loads(data)
            choice = answer["choices"][0]
            text = choice["message"]["content"]
            cut = choice.get("finish_reason") == "length"
            counted = (answer.get("usage") or {}).get("total_tokens")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise AwayError(f"its answer is not a chat completion: {self._shown(_message(data))}") from None
        tokens = counted if isinstance(counted, int) and counted >= 0 else None
        return JudgeAnswer(writable(text) if isinstance(text, str) else "", cut, tokens)

    def _shown(self, text: str) -> str:
        """What others say, on one line, without the key."""
        if self._key is not None:
            text = text.replace(self._key, "***")
        return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


async def _body(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > _LARGEST:
            raise AwayError(f"its answer has more than {_LARGEST} bytes")
    return bytes(data)


def _message(data: bytes) -> str:
    """The message of an error in OpenAI's form, else what there is."""
    text = data[:65536].decode("utf-8", "replace").strip()
    try:
        told = json.loads(text)
        return str(told["error"]["message"] if isinstance(told["error"], dict) else told["error"])
    except (ValueError, RecursionError, LookupError, TypeError):
        return text or "(nothing)"


def _seconds(retry_after: str | None) -> float | None:
    """What the header Retry-After says in seconds: it is a number of seconds, or a date (RFC 9110, section 10.2.3)."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _key(variable: str, place: str) -> str:
    key = os.environ.get(variable, "").strip()
    where = f"{place}.judge.apiKeyEnv: the environment variable {variable} of the driver"
    if not key:
        raise JobFileError(f"{where} is not set; set it (on a cluster in spec.head.pod.env, from a Secret)")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise JobFileError(f"{where} cannot be sent in a header; set it to the key and nothing else")
    return key
