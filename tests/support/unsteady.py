"""Tests that have failed among others and passed alone: `tests/unsteady.yaml`, a short list that has to become empty.

`make land` enters what its CI has forgiven (``again``). An entry is forgiven for 14 days from its first time, in which
somebody finds the cause and mends it; where ten are listed no other test is. `make hunt` counts how often a test has
passed under load since its cause was named, and takes it off the list after 60 times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import yaml

LIST = Path(__file__).parents[1] / "unsteady.yaml"
MOST, DAYS, PASSES = 10, 14, 60
HEAD = """# Tests that CI has forgiven, what they first failed with, how often, since when: tests/support/unsteady.py.
# Whoever finds out why writes it at `cause`; `make hunt TEST=... TIMES=60` then takes the test off the list.
"""


@dataclass(frozen=True)
class Entry:
    """A test on the list."""

    test: str
    error: str
    """What it failed with the first time."""
    since: date
    cause: str = ""
    """In a sentence; empty while nobody knows."""
    count: int = 1
    """How often it was forgiven."""
    passes: int = 0
    """How often it has passed under load since its cause was named."""


def read() -> list[Entry]:
    return [Entry(**entry) for entry in yaml.safe_load(LIST.read_text()) or ()] if LIST.exists() else []


def write(entries: Iterable[Entry]) -> None:
    listed = [asdict(entry) for entry in entries]
    LIST.write_text(HEAD + yaml.safe_dump(listed, sort_keys=False, width=120, allow_unicode=True))


def refused(entries: Iterable[Entry], test: str, today: date) -> str:
    """Why a test is not forgiven; empty where it may be."""
    listed = {entry.test: entry for entry in entries}
    if test not in listed:
        return f"{MOST} others are listed in tests/unsteady.yaml" if len(listed) >= MOST else ""
    since = listed[test].since
    return f"it is listed since {since}, more than {DAYS} days" if (today - since).days > DAYS else ""


def forgiven(entries: Iterable[Entry], test: str, error: str, today: date) -> list[Entry]:
    """The list after a test was."""
    listed = {entry.test: entry for entry in entries}
    seen = listed.get(test)
    listed[test] = replace(seen, count=seen.count + 1, passes=0) if seen else Entry(test, error, today)
    return [*listed.values()]


def hunted(entries: Iterable[Entry], test: str, passed: int, failed: int) -> list[Entry]:
    """The list after a test has run under load so many times: passes count once the cause is named, and from the last
    failure on."""
    after = []
    for entry in entries:
        if entry.test == test and entry.cause:
            entry = replace(entry, passes=0 if failed else entry.passes + passed)
        if entry.passes < PASSES:
            after.append(entry)
    return after
