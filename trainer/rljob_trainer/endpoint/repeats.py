"""Requests that a client sends once more because it has not heard the answer.

That two bodies are equal says nothing: an agent may well ask the same twice, and wants two answers. So an answer is
given again only where the client says that it repeats itself: with an ``Idempotency-Key``, or with the number of its
retry, as OpenAI's clients do (``x-stainless-retry-count``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_trainer.endpoint.chat_answer import ChatAnswer
from rljob_trainer.endpoint.refusals import RefusedError, invalid

KEY = "Idempotency-Key"
RETRY = "x-stainless-retry-count"


@dataclass(slots=True, eq=False)
class RepeatableRequest:
    """A request and its answer, or the answer to come."""

    body: bytes
    """A digest."""
    answer: asyncio.Task[ChatAnswer]
    retries: int = 0
    heard: bool = False
    """The answer was sent to the end, as far as the server knows."""


@dataclass(slots=True)
class Repeats:
    """What was asked in one episode."""

    _by_key: dict[str, RepeatableRequest] = field(default_factory=dict)
    _by_body: dict[bytes, list[RepeatableRequest]] = field(default_factory=dict)

    def find(self, headers: Mapping[str, str], body: bytes) -> RepeatableRequest | None:
        """The request that this one repeats; None: it is new. ``body`` is a digest. Raises ``RefusedError`` for a key
        that was another request's, and a count that is none."""
        key = headers.get(KEY)
        if key is not None:
            asked = self._by_key.get(key)
            if asked is not None and asked.body != body:
                raise RefusedError(
                    f"the {KEY} {key!r} was used for another request", status=422, code="idempotency_key_reused"
                )
            return asked
        count = headers.get(RETRY, "0")
        if not count.isascii() or not count.isdigit():
            raise invalid(RETRY, f"{RETRY} must be a number, not {count!r}")
        if int(count) == 0:
            return None
        # Of several that were equal: one whose retry this may be, rather one whose answer was lost, the latest.
        open_ones = [asked for asked in self._by_body.get(body, ()) if asked.retries < int(count)]
        if not open_ones:
            return None
        lost = [asked for asked in open_ones if not asked.heard]
        found = (lost or open_ones)[-1]
        found.retries = int(count)
        return found

    def keep(self, headers: Mapping[str, str], body: bytes, answer: asyncio.Task[ChatAnswer]) -> RepeatableRequest:
        """Remembers a new request."""
        asked = RepeatableRequest(body, answer)
        if (key := headers.get(KEY)) is not None:
            self._by_key[key] = asked
        else:
            self._by_body.setdefault(body, []).append(asked)
        return asked

    def forget(self, headers: Mapping[str, str], asked: RepeatableRequest) -> None:
        """A request that was refused has no answer to repeat: another attempt is asked again."""
        if (key := headers.get(KEY)) is not None:
            self._by_key.pop(key, None)
        elif asked in (kept := self._by_body.get(asked.body, [])):
            kept.remove(asked)
