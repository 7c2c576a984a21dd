"""What was made of a text before: later epochs look it up.

A run passes over its data many times (the published PPO recipe on GSM8K: 15 times), and chat templates and tokenising
are most of what reading a prompt costs. Results are kept by text, not by row: a row that was changed since is made
anew, and a row's other columns, which may be large, are not held.
"""

from __future__ import annotations

import sys
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_BYTES = 64 * 2**20
"""GSM8K with a chat template, ids in arrays, takes 12 MiB."""


class Kept(Generic[T]):
    """Values by text, until ``most_bytes`` are full. The values hold no others (strings, arrays).

    What came first stays: each epoch passes over all rows before it comes back to one, so that throwing out the oldest
    would find nothing at all in a data set that is a little too large.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._free = most_bytes
        self._values: dict[str, T] = {}

    def get(self, text: str) -> T | None:
        """What was kept for this text."""
        return self._values.get(text)

    def keep(self, text: str, value: T) -> T:
        """Remembers a value, if it fits. Returns it."""
        size = sys.getsizeof(text) + sys.getsizeof(value)
        if size <= self._free and text not in self._values:
            self._free -= size
            self._values[text] = value
        return value
