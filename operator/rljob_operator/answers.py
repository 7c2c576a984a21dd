"""Reading what a training pod answers over HTTP. Nothing of it is trusted: bounded size, deadline, clean text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import aiohttp

LONGEST_ANSWER = 64 * 1024
ANSWER_SECONDS = 5.0
LONGEST_ESCAPE = len(r"\u0000")
# Escape sequences first, as a whole; then what is left of control characters and invisible direction marks.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
# What looks like a secret, in time linear in the text: a name with its value, a word that begins as keys do, a password
# in an address. The driver has masked the values it knows; this is for what it cannot know.
_SECRET = re.compile(
    r"""(?ix)
    (?P<name>
        (?<![\w-]) [\w-]*
        (?: [_-]key(?:[_-]?id)? | (?-i:Key) | (?<![a-z])api-?key | token | secret | passw(?:or)?d | passphrase
          | authorization | credentials? | signature | (?<![a-z])sig )
        ["']? \s* [:=] \s*
    )
    (?: (?P<quote>["']) (?:(?!(?P=quote))(?:[^\\]|\\.))* | (?P<scheme>(?:bearer|basic)\s+)? [^\s"',;&]+ )
    | (?P<bearer>\b(?:bearer|basic)\s+) [\w.~+/=-]{8,}
    | \b (?P<prefix>
        hf_ | sk- | gh[pousr]_ | github_pat_ | glpat- | nvapi- | gsk_ | xox[abeprs]-
          | (?-i:AIza) | (?-i:AKIA) | (?-i:ASIA) | (?-i:eyJ) )
      [\w.-]{8,}
    | (?P<begin>-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----) .*? (?: -----END\ [A-Z ]*KEY----- | \Z )
    | (?P<address>://[^/\s:@]*:) [^/\s@]+ (?P<at>@)
    """
)


_KEPT = ("name", "quote", "scheme", "bearer", "prefix", "begin", "address")


class AnswerError(Exception):
    """A pod did not answer, or not as it should. The message is safe to show.

    Attributes:
        refused: it does not take the operator's token.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


async def read(response: aiohttp.ClientResponse, limit: int = LONGEST_ANSWER) -> bytes:
    """The body, at most `limit` bytes.

    Raises:
        AnswerError: it is longer.
    """
    body = bytearray()
    async for chunk in response.content.iter_chunked(16 * 1024):
        body += chunk
        if len(body) > limit:
            raise AnswerError(f"the answer is longer than {limit} bytes")
    return bytes(body)


async def read_end(response: aiohttp.ClientResponse, size: int) -> bytes:
    """The last `size` bytes of the body, which may be of any length: no more than twice as many are kept."""
    end = bytearray()
    async for chunk in response.content.iter_chunked(16 * 1024):
        end += chunk
        if len(end) > 2 * size:
            del end[:-size]
    return bytes(end[-size:])


def end_of_text(end: bytes) -> str:
    """The text that stands last in a JSON object, of which the beginning may be missing.

    Raises:
        AnswerError: that is no such end.
    """
    text = end.decode(errors="replace").rstrip()
    if text.startswith("{"):
        try:
            *_, last = json.loads(text).values()
        except (ValueError, RecursionError) as error:
            raise AnswerError("the answer is not JSON") from error
        return last if isinstance(last, str) else ""
    text = text.removesuffix("}").rstrip()
    # It may begin in the middle of an escape sequence.
    for start in range(LONGEST_ESCAPE):
        try:
            return str(json.loads(f'"{text[start:]}'))
        except ValueError:
            continue
    raise AnswerError("the answer is not JSON")


async def read_json(response: aiohttp.ClientResponse, limit: int = LONGEST_ANSWER) -> Any:
    """The body as JSON with clean texts.

    Raises:
        AnswerError: it is too long or no JSON.
    """
    try:
        return clean_tree(json.loads(await read(response, limit)))
    except (ValueError, RecursionError) as error:
        raise AnswerError("the answer is not JSON") from error


def clean(text: str) -> str:
    """The text without control characters and escape sequences; line breaks become spaces."""
    return _CONTROL.sub("", text.replace("\n", " ").replace("\t", " ")).strip()


def clean_tree(value: Any) -> Any:
    """All texts in plain data cleaned, keys too."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [clean_tree(item) for item in value]
    if isinstance(value, dict):
        return {clean(name): clean_tree(item) for name, item in value.items()}
    return value


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without the given secrets and without what looks like one."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return _SECRET.sub(_without, text)


def _without(found: re.Match[str]) -> str:
    return "".join(found[group] or "" for group in _KEPT) + "***" + (found["at"] or "")


def last_lines(text: str, count: int, longest: int, secrets: Iterable[str] = ()) -> tuple[str, ...]:
    """The last lines that say something, cleaned, masked and cut to `longest` characters."""
    secrets = tuple(secrets)
    lines = [clean(masked(line, secrets)) for line in text.splitlines()]
    return tuple(line[:longest] for line in [line for line in lines if line][-count:])
