"""The list of tests that CI has forgiven: short, young, and of tests that there are."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import hunt
import pytest
import unsteady
from unsteady import Entry

ROOT = Path(__file__).parents[2]
TODAY = date(2026, 3, 31)
KNOWN = Entry("tests/a.py::test_a", "AssertionError", date(2026, 3, 1), cause="it looked too early", passes=59)


def test_the_list_is_short_and_its_tests_exist() -> None:
    entries = unsteady.read()
    assert len({entry.test for entry in entries}) == len(entries) <= unsteady.MOST
    for entry in entries:
        file, name = entry.test.partition("[")[0].split("::", 1)
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / file).read_text(), entry.test


def test_what_is_forgiven_stands_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsteady, "LIST", tmp_path / "unsteady.yaml")
    unsteady.write(unsteady.forgiven([], "tests/a.py::test_a[x: 'y']", "E: it's so", TODAY))
    entry = Entry("tests/a.py::test_a[x: 'y']", "E: it's so", TODAY)
    assert unsteady.read() == [entry]
    again = unsteady.forgiven(unsteady.read(), entry.test, "another", TODAY + timedelta(3))
    assert again == [replace(entry, count=2)]


def test_a_test_is_forgiven_for_fourteen_days_and_a_full_list_takes_no_other() -> None:
    entry = replace(KNOWN, since=TODAY)
    assert unsteady.refused([entry], entry.test, TODAY + timedelta(14)) == ""
    assert "since 2026-03-31, more than 14 days" in unsteady.refused([entry], entry.test, TODAY + timedelta(15))
    full = [replace(entry, test=f"tests/a.py::test_{number}") for number in range(10)]
    assert unsteady.refused(full[:9], "tests/a.py::test_x", TODAY) == ""
    assert unsteady.refused(full, "tests/a.py::test_x", TODAY) == "10 others are listed in tests/unsteady.yaml"
    assert unsteady.refused(full, "tests/a.py::test_3", TODAY) == ""


def test_sixty_passes_under_load_with_a_named_cause_take_it_off() -> None:
    assert unsteady.hunted([KNOWN], KNOWN.test, passed=1, failed=0) == []
    assert unsteady.hunted([KNOWN], KNOWN.test, passed=1, failed=1) == [replace(KNOWN, passes=0)]
    assert unsteady.hunted([KNOWN], "tests/a.py::test_other", passed=60, failed=0) == [KNOWN]
    unknown = replace(KNOWN, cause="", passes=0)
    assert unsteady.hunted([unknown], KNOWN.test, passed=60, failed=0) == [unknown]
    assert unsteady.forgiven([KNOWN], KNOWN.test, "again", TODAY) == [replace(KNOWN, count=2, passes=0)]


def test_a_hunt_reads_what_pytest_says() -> None:
    printed = """
FAILED in the middle of an output
PASSED tests/a.py::test_a[x y]
FAILED tests/a.py::test_b - AssertionError: assert 1 == 2
ERROR tests/a.py::test_c - RuntimeError: no - not that
FAILED tests/a.py::test_d
1 failed, 1 passed
"""
    assert dict(hunt.outcomes(printed)) == {
        "tests/a.py::test_a[x y]": None,
        "tests/a.py::test_b": "AssertionError: assert 1 == 2",
        "tests/a.py::test_c": "RuntimeError: no - not that",
        "tests/a.py::test_d": "without a word",
    }
