"""Tests that say again, at length, what a quicker one says, and which of them a pytest runs.

    @pytest.mark.slow(stands_for="test_of_one_step")         the test of that name, in the same file
    @pytest.mark.slow(stands_for="tests/runs/test_run.py::test_it")                  in another one
    @pytest.mark.slow(stands_for="[two ranks]")              all cases of a function but this one

``stands_for`` names the quicker test that stands for the slow one, or several of them; which these are, they are not
slow themselves, so a mark may be put on a whole function, or as ``pytestmark`` on a whole file. What is named must be
there and quick: the slow test fails otherwise, whether it was to run or not.

`make test`, `make runs-test` and `make integration` leave slow tests out. CI ends with a tenth of them alone, another
one for each commit (``--slow tenth``), and `make everything` runs all. One that is asked for by its id runs in any
case.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

CHOICES = ("none", "tenth", "all")
SHARE = 10
"""One slow test in so many belongs to a commit."""


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--slow", choices=CHOICES, default="none", help="which slow tests run (tests/support/slow.py)")


def stand_ins(item: pytest.Item) -> tuple[str, ...]:
    """Ids of the tests, or functions, that stand for an item; none where it says something of its own."""
    mark = item.get_closest_marker("slow")
    if mark is None:
        return ()
    named = mark.kwargs.get("stands_for", ())
    file, function = _function(item.nodeid).split("::", 1)
    return tuple(_whole(name, file, function) for name in ([named] if isinstance(named, str) else named))


def _whole(name: str, file: str, function: str) -> str:
    if name.startswith("["):
        return f"{file}::{function}{name}"
    return name if "::" in name else f"{file}::{name}"


def _function(test: str) -> str:
    return test.partition("[")[0]


def is_slow(item: pytest.Item) -> bool:
    """Whether it is marked, and is not what stands for others."""
    marked = item.get_closest_marker("slow") is not None
    return marked and not {item.nodeid, _function(item.nodeid)} & {*stand_ins(item)}


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves in ``items`` what ``config`` asks for. A slow test that nothing quicker stands for stays, and fails."""
    slow = {item.nodeid: item for item in items if is_slow(item)}
    which = config.getoption("slow")
    if which == "all":
        kept = {item.nodeid for item in items}
    elif which == "tenth":
        commit = _commit(config.rootpath)
        kept = {test for test in slow if belongs(test, commit)}
    else:
        asked = {argument for argument in config.args if "::" in argument}
        kept = {item.nodeid for item in items if item.nodeid not in slow}
        kept |= {test for test in slow if {test, _function(test)} & asked}
    for test, problem in _without(config, items, slow):
        kept.add(test)
        slow[test].setup = partial(pytest.fail, problem, pytrace=False)  # type: ignore[method-assign]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def belongs(test: str, commit: str) -> bool:
    """Whether a slow test is among the tenth that a commit's CI runs."""
    return int.from_bytes(hashlib.sha256(f"{commit} {test}".encode()).digest()[:8], "big") % SHARE == 0


def _commit(checkout: Path) -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def _without(
    config: pytest.Config, items: list[pytest.Item], slow: Mapping[str, pytest.Item]
) -> Iterator[tuple[str, str]]:
    """Slow tests that nothing quicker stands for, and why. Of a file that is not collected whole, only the functions
    are known."""
    parts = tuple(argument.partition("::")[0] for argument in config.args if "::" in argument)
    by_file: dict[str, set[str]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], set()).add(item.nodeid)
    for test, item in slow.items():
        if not stand_ins(item):
            yield test, "a slow test names what stands for it: slow(stands_for=...)"
        for name in stand_ins(item):
            file = name.partition("::")[0]
            if file in by_file and not file.endswith(parts):
                cases = {other for other in by_file[file] if name in (other, _function(other))}
                there, quick = bool(cases), bool(cases - slow.keys())
            else:
                there = quick = _function(name).partition("::")[2] in functions(config.rootpath / file)
            if not quick:
                yield test, f"{name}, which stands for this slow test, {'is slow, too' if there else 'is not there'}"


def functions(file: Path) -> set[str]:
    """Names of a file's tests; none where there is no file."""
    text = file.read_text() if file.exists() else ""
    return set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))
