"""Prompts of rows that were read in an earlier epoch.

A run passes over its data many times (the published PPO recipe on GSM8K: 15 times). Reading, rendering and tokenising a
row takes some 70 us, and although a thread does it, the event loop of the same process loses most of that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rljob_trainer.data.tokenisation import EncodedPrompt

MOST_BYTES = 128 * 2**20
"""GSM8K's training questions with their answers and a chat template take 33 MiB."""

_TOKEN_BYTES = 36
"""An integer and its place in a tuple."""


class KeptPrompts:
    """Prompts by row (of all sources together), until ``most_bytes`` are full. None is kept too: the row is dropped.

    What came first stays: each epoch passes over all rows before it comes back to one, so that throwing out the oldest
    would find nothing at all in a data set that is a little too large.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._free = most_bytes
        self.full = False
        """Whether a prompt did not fit."""
        self._prompts: dict[int, EncodedPrompt | None] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._prompts

    def __getitem__(self, row: int) -> EncodedPrompt | None:
        """Raises ``KeyError`` for a row that is not kept."""
        return self._prompts[row]

    def keep(self, row: int, prompt: EncodedPrompt | None) -> None:
        """Remembers a row's prompt, if it fits."""
        if row in self._prompts:
            return
        size = _bytes_of(prompt)
        if size <= self._free:
            self._free -= size
            self._prompts[row] = prompt
        else:
            self.full = True


def _bytes_of(prompt: EncodedPrompt | None) -> int:
    """About what it holds."""
    if prompt is None:
        return _TOKEN_BYTES
    return _TOKEN_BYTES * len(prompt.token_ids) + sys.getsizeof(prompt.text) + _nested_bytes(prompt.columns)


def _nested_bytes(value: Any) -> int:
    """Bytes of a cell, or a whole row, with all that is in it."""
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    return sys.getsizeof(value) + sum(map(_nested_bytes, parts))
