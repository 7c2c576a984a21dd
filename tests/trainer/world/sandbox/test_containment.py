"""What each mode contains: the attempts of the folder beside this, run for real, against the table of docs/sandbox.md.

    PYTHONPATH=tests/support .venv/bin/python tests/trainer/world/sandbox/test_containment.py

writes the table anew, from what became of them on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import restricted_pod
from sandbox_attempts import ENDED, NOTHING, REFUSED, THROUGH, names, what
from sandbox_places import why_not

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs/sandbox.md"
BEGIN, END = "<!-- attempts: written by test_containment.py -->\n", "<!-- end of attempts -->\n"
COLUMNS = ("namespaces", "landlock", "landlock, one user", "none, one user")
"""In the last two, job and programs have one user without any capability, as in a restricted pod."""
CONTAINED = (REFUSED, NOTHING, ENDED)
MAY_DIFFER = {
    "keys",
    "bpf",
    "userfaultfd",
    "io_uring",
    "perf_event",
    "vsock",
    "other_numbers",
    "open_by_handle",
    "clock",
}
"""What other kernels allow anybody, or nobody, without a sandbox."""


@cache
def outcomes(column: str) -> dict[str, tuple[str, str]]:
    """For each attempt the cell and what it said. Skips where this machine does not have what the column is about."""
    mode, _, one_user = column.partition(", ")
    if one_user:
        reason = restricted_pod.why_not()
        if reason:
            pytest.skip(reason)
        said = restricted_pod.run_restricted([mode])
    else:
        reason = why_not("namespaces" if mode == "namespaces" else "landlock")
        if reason:
            pytest.skip(reason)
        if mode == "landlock" and os.geteuid() != 0:
            pytest.skip("needs root: the workers have users of their own")
        script = ROOT / "tests/support/sandbox_attempts.py"
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "trainer")}
        command = [sys.executable, script, mode]
        said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, tuple[str, str]] = json.loads(said)
    return found


def written() -> dict[str, dict[str, str]]:
    """The page's table: for each attempt the cells by column."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(rows[0][2:]) == COLUMNS
    return {row[1].strip("`"): dict(zip(COLUMNS, row[2:], strict=True)) for row in rows[2:]}


def table() -> str:
    lines = ["| | attempt | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for name in names():
        cells = [outcomes(column)[name][0] for column in COLUMNS]
        lines.append(f"| {what(name)} | `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_every_attempt_is_in_the_table_and_there_are_enough() -> None:
    assert sorted(written()) == names()
    assert len(names()) >= 40
    text = PAGE.read_text()
    assert all(f"| {what(name)} | `{name}` |" in text for name in names())


WITHOUT_A_SANDBOX = pytest.param(COLUMNS[-1], marks=pytest.mark.slow(stands_for="[landlock, one user]"))


@pytest.mark.parametrize("column", [*COLUMNS[:-1], WITHOUT_A_SANDBOX])
def test_the_table_says_what_became_of_the_attempts(column: str) -> None:
    found, page = outcomes(column), written()
    differences = {}
    for name, (cell, said) in found.items():
        promised = page[name][column]
        same = (cell == THROUGH) == (promised == THROUGH) and cell in (*CONTAINED, THROUGH)
        # Another machine, or one that runs this at a lower priority, may refuse everybody more.
        elsewhere = column.startswith("none") and (name in MAY_DIFFER or cell in CONTAINED)
        if not same and not elsewhere:
            differences[name] = (promised, cell, said)
    assert not differences


def test_an_attempt_that_nothing_holds_gets_through() -> None:
    """Most of them: an attempt that fails without a sandbox says nothing about one."""
    page = written()
    through = [name for name in names() if page[name]["none, one user"] == THROUGH]
    assert len(through) >= 40


def test_a_restricted_pod_has_landlock_and_is_told_why_it_has_no_namespaces() -> None:
    reason = restricted_pod.why_not() or why_not("landlock")
    if reason:
        pytest.skip(reason)
    namespaces, landlock, none = json.loads(restricted_pod.run_restricted(["available"]))
    assert landlock is None
    assert none is None
    assert "bwrap" in namespaces, "not there, or without permission"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
