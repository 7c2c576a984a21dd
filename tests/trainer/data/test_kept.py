"""What was read of a row once is found again, within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_trainer.data.kept import KeptPrompts
from rljob_trainer.data.tokenisation import EncodedPrompt


def prompt(tokens: int = 3, **columns: Any) -> EncodedPrompt:
    return EncodedPrompt("a", tuple(range(1000, 1000 + tokens)), None, columns)


def test_what_was_kept_is_found_by_its_row() -> None:
    kept, first = KeptPrompts(), prompt()
    kept.keep(7, first)
    kept.keep(8, None)
    assert kept[7] is first
    assert (7 in kept, 8 in kept, 9 in kept) == (True, True, False)
    assert kept[8] is None
    with pytest.raises(KeyError):
        kept[9]


def test_what_came_first_stays_and_what_does_not_fit_is_not_kept() -> None:
    kept = KeptPrompts(most_bytes=100_000)
    for row in range(3):
        kept.keep(row, prompt(tokens=1000))  # 36,000 bytes and a little
    assert [row in kept for row in range(3)] == [True, True, False]
    kept.keep(3, prompt())
    assert 3 in kept


@pytest.mark.parametrize(
    "columns",
    [
        {"tests": "x" * 60_000},
        {"tests": {"inputs": ["x" * 30_000, "y" * 30_000]}},
        {"messages": [{"role": "user", "content": "x" * 60_000}]},
    ],
)
def test_what_else_is_in_a_row_counts(columns: dict[str, Any]) -> None:
    kept = KeptPrompts(most_bytes=100_000)
    kept.keep(0, prompt(**columns))
    kept.keep(1, prompt(**columns))
    assert (0 in kept, 1 in kept) == (True, False)


def test_what_is_kept_twice_takes_its_place_once() -> None:
    kept = KeptPrompts(most_bytes=100_000)
    for _ in range(10):
        kept.keep(0, prompt(tokens=1000))
    kept.keep(1, prompt(tokens=1000))
    assert 1 in kept
