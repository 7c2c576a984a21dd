"""Texts that cannot be written as UTF-8: a Python string may hold lone surrogates, a file or a message may not.

They come from JSON (``"\\ud83d"`` without its other half), from programs that cut a text between two UTF-16 units, and
from whatever a reward function returns or raises. One rule holds everywhere: a data row or a job file with one is
refused with its place; a text that a function or a model made is written with each one as its escape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def writable(text: str) -> str:
    """``text`` with each lone surrogate as its escape: the six characters ``\\ud800`` stand for U+D800."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def lone_surrogate(text: str) -> str | None:
    """The escape of the first lone surrogate of a text, None when it has none."""
    if text.isascii():
        return None
    found = _SURROGATE.search(text)
    return None if found is None else f"\\u{ord(found[0]):04x}"


def surrogate_within(value: Any, path: str = "") -> tuple[str, str] | None:
    """Path and escape of the first lone surrogate in a nested value (maps, lists, texts), None when it has none.

    The path is that of ``data.columns``: ``messages[0].content``.
    """
    if isinstance(value, str):
        escape = lone_surrogate(value)
        return None if escape is None else (path, escape)
    if isinstance(value, Mapping):
        for key, entry in value.items():
            place = f"{path}.{writable(str(key))}" if path else writable(str(key))
            if escape := lone_surrogate(str(key)):
                return place, escape
            if found := surrogate_within(entry, place):
                return found
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            if found := surrogate_within(entry, f"{path}[{index}]"):
                return found
    return None
