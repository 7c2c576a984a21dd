"""What CI says of its tests: every one counts for one folder, as quick or slow, beside the last record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timings

pytest_plugins = "pytester"

ENGINES, TOP, RUNS = "tests/trainer/rollout/test_pool.py", "tests/trainer/test_aside.py", "tests/runs/test_run.py"


def counted(tests: dict[str, list[Any]]) -> dict[str, Any]:
    return {"counts": {"passed": len(tests)}, "collecting": 5.0, "tests": tests}


@pytest.mark.parametrize(
    ("test", "folder"),
    [
        ("tests/trainer/rollout/test_pool.py::test_x[a/b]", "tests/trainer/rollout"),
        ("tests/trainer/world/sandbox/test_programs.py::test_x", "tests/trainer/world"),
        ("tests/trainer/test_aside.py::test_x", "tests/trainer"),
        ("tests/runs/test_run.py::test_x", "tests/runs"),
    ],
)
def test_a_test_counts_for_its_folder(test: str, folder: str) -> None:
    assert timings.folder_of(test) == folder


def test_quick_and_slow_tests_are_added_up_by_folder_beside_the_record() -> None:
    runs = [
        counted({f"{ENGINES}::a": [20.0, False], f"{ENGINES}::b": [30.4, True], f"{TOP}::c": [1.0, False]}),
        counted({f"{ENGINES}::d": [2.0, False], f"{RUNS}::e": [7.0, True]}),
    ]
    record = {"commit": "0123456789", "folders": {"tests/trainer/rollout": [[2, 21.0], [5, 99.0]]}}
    lines = [line.split() for line in timings.table(runs, record)]
    assert lines[0][-3:] == ["recorded", "at", "01234567"]
    assert lines[1:5] == [
        ["tests/runs", "–", "1", "7"],
        ["tests/trainer", "1", "1", "–"],
        ["tests/trainer/rollout", "2", "22", "1", "30", "2", "21", "5", "99"],
        ["start-up", "and", "collection", "10"],
    ]
    assert lines[6] == ["30.4", f"{ENGINES}::b"]


def test_stages_have_their_seconds_those_of_processors_and_how_their_tests_ended(tmp_path: Path) -> None:
    (tmp_path / "stages").write_text("install 3 100 400 0 1.0\ne2e-smoke 70 400 7400 2 1.5\n")
    for process in (10, 11):
        (tmp_path / f"e2e-smoke-{process}.json").write_text(json.dumps(counted({f"{TOP}::c": [1.0, False]})))
    lines = [line.split() for line in timings.gathered(tmp_path, {})]
    assert lines[1:4] == [
        ["install", "3", "3"],
        ["e2e-smoke", "70", "70", "2", "passed"],
        ["all", "stages", "73", "73"],
    ]
    assert ["tests/trainer", "2", "2", "–"] in lines
    kept = timings.recorded(tmp_path)
    assert (kept["seconds"], kept["processor_seconds"]) == (73, 73)
    assert kept["stages"] == {"install": [3, 3], "e2e-smoke": [70, 70]}
    assert kept["folders"] == {"tests/trainer": [[2, 2.0], [0, 0.0]]}


def test_each_test_has_what_was_done_since_the_one_before(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second whenever it is read: after collection, and for each of a test's parts."""
    pytester.makeconftest(
        """
        import itertools, slow, timings

        def pytest_addoption(parser):
            slow.add_options(parser)

        def pytest_configure(config):
            config.addinivalue_line("markers", "slow: as in pyproject.toml")
            timings.processor_clock = lambda: itertools.count(10).__next__
            timings.configure(config)
        """
    )
    pytester.makepyfile(
        test_it="""
        import pytest

        def test_quick(): ...

        @pytest.mark.slow(stands_for="test_quick")
        def test_again(): ...
        """
    )
    monkeypatch.setenv(timings.FOLDER, str(tmp_path / "times"))
    monkeypatch.setenv(timings.STAGE, "unit")
    monkeypatch.setattr(timings, "processor_clock", timings.processor_clock)  # put back what the conftest replaces
    pytester.inline_run("-p", "no:cacheprovider", "-p", "no:xdist")
    (written,) = (tmp_path / "times").glob("unit-*.json")
    assert json.loads(written.read_text()) == {
        "counts": {"passed": 2, "failed": 0, "error": 0, "skipped": 0},
        "collecting": 10,
        "tests": {"test_it.py::test_quick": [3, False], "test_it.py::test_again": [3, True]},
    }
