"""What CI says about its own time: every test counts for one folder, and budgets that are exceeded are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timings

ROOT = Path(__file__).parents[2]
LIMITS = {"tests/trainer": 1, "tests/trainer/rollout": 20}


def counted(tests: dict[str, float], **changes: Any) -> dict[str, Any]:
    return {
        "wall": 30.0,
        "workers": 2,
        "start": 5.0,
        "counts": {"passed": len(tests)},
        "tests": tests,
        "set-up": {},
    } | changes


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "budgets", lambda: LIMITS)


@pytest.mark.parametrize(
    ("test", "folder"),
    [
        ("tests/trainer/rollout/test_pool.py::test_x[a/b]", "tests/trainer/rollout"),
        ("tests/trainer/rollouts/test_pool.py::test_x", "tests/trainer"),
        ("tests/trainer/test_actor_deaths.py::test_x", "tests/trainer"),
        ("tests/elsewhere/deep/test_x.py::test_x", "tests/elsewhere/deep"),
    ],
)
def test_a_test_counts_for_the_deepest_folder_that_has_a_budget(test: str, folder: str) -> None:
    assert timings.folder_of(test, LIMITS) == folder


def test_every_folder_of_tests_has_a_budget_and_every_budget_a_folder() -> None:
    limits = timings.budgets()
    folders = {str(file.parent.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}
    assert {timings.folder_of(f"{folder}/test_x.py", limits) for folder in folders} <= limits.keys()
    assert [folder for folder in limits if not (ROOT / folder).is_dir()] == []


@pytest.mark.usefixtures("limits")
def test_runs_are_added_up_and_the_time_without_a_test_is_shown() -> None:
    slow, quick, top = (
        "tests/trainer/rollout/a.py::slow",
        "tests/trainer/rollout/a.py::quick",
        "tests/trainer/b.py::top",
    )
    lines = timings.table([counted({slow: 20.0, quick: 5.0}, **{"set-up": {slow: 8.0}}), counted({top: 1.0})])
    assert [line.split() for line in lines[1:5]] == [
        ["tests/trainer/rollout", "25", "8", "20", "over", "its", "budget"],
        ["tests/trainer", "1", "0", "1"],
        ["start-up", "and", "collection", "10"],
        # Two workers for 25 s in each of two runs, less the 26 s of tests.
        ["workers", "between", "and", "after", "tests", "74"],
    ]
    assert [line.split() for line in lines[6:]] == [["20.0", "8.0", slow], ["5.0", "0.0", quick], ["1.0", "0.0", top]]


@pytest.mark.usefixtures("limits")
def test_stages_have_their_wall_time_and_the_tests_of_all_their_runs(tmp_path: Path) -> None:
    (tmp_path / "stages").write_text("install 3 100 500 400 800\ne2e-smoke 70 400 800 1400 800\n")
    for process in (10, 11):
        (tmp_path / f"e2e-smoke-{process}.json").write_text(json.dumps(counted({"tests/trainer/b.py::top": 1.0})))
    lines = timings.gathered(tmp_path)
    assert [line.split() for line in lines[1:4]] == [
        ["install", "3", "50%"],
        ["e2e-smoke", "70", "100%", "2", "passed"],
        ["all", "stages", "73"],
    ]
    assert ["tests/trainer", "2", "0", "1", "over", "its", "budget"] in [line.split() for line in lines]
