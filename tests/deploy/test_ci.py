"""`.ci/run`: which stages run when one has failed, what it ends with, and what its last lines say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUPPORT = ["again.py", "processor_time.py", "slow.py", "timings.py", "unsteady.py", "verdict.py"]
STAGES = {
    "machine": 20,
    "install": 20,
    "test": 21,
    "pythons-test": 22,
    "runs-test": 23,
    "programs": 24,
    "integration": 25,
    "cluster-test": 26,
    "e2e-smoke": 27,
    "slow-tenth": 28,
}
MAKEFILE = """
cluster-down:
	@echo down >> ran
%:
	@echo $@ >> ran
	@case " $(FAIL) " in \
	*" $@:killed "*) echo "$@ is killed"; kill -9 $$PPID;; \
	*" $@:long "*) sleep 60;; \
	*" $@ "*) echo "$@ met an error"; exit 1;; esac
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its stages only say that they ran; those that the variable FAIL names fail."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("RLJOB_AGAIN", "RLJOB_TEST_TIMES", "MAKEFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(name, raising=False)
    checkout = tmp_path / "checkout"
    for file in (Path(".ci/run"), *(Path("tests/support") / name for name in SUPPORT)):
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, checkout / file)
    (checkout / "Makefile").write_text(MAKEFILE)
    for path, text in {
        ".venv/bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "deploy/testcluster/__main__.py": "import os; raise SystemExit('cluster' in os.environ['FAIL'].split())\n",
    }.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(text)
        (checkout / path).chmod(0o755)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=checkout, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], cwd=checkout, check=True)
    return checkout


def run(checkout: Path, fail: str) -> tuple[int, list[str], list[str]]:
    """Its exit code, what it printed, which stages ran."""
    environment = os.environ | {"FAIL": fail, "RLJOB_CI_LINE": str(checkout / "line")}
    ran = subprocess.run([checkout / ".ci" / "run"], env=environment, capture_output=True, text=True)
    return ran.returncode, ran.stdout.splitlines(), (checkout / "ran").read_text().split()


def test_a_green_one_runs_all_stages(checkout: Path) -> None:
    code, printed, ran = run(checkout, "")
    assert (code, [name for name in ran if name != "down"]) == (0, [*STAGES])
    assert ran.index("down") == ran.index("e2e-smoke") + 1
    assert not [line for line in printed if line.startswith(("FAILED", "UNSTEADY", "NOT RUN"))]
    line = json.loads((checkout / "line").read_text())
    assert (line["failed"], [*line["stages"]]) == ([], [*STAGES])


@pytest.mark.parametrize(
    ("fail", "not_run"),
    [
        ("test", set()),
        ("integration cluster-test", set()),
        ("e2e-smoke", set()),
        ("programs", {"integration", "cluster-test", "e2e-smoke", "slow-tenth"}),
        ("install", {*STAGES} - {"machine", "install"}),
        ("machine", {*STAGES} - {"machine"}),
    ],
)
def test_what_can_do_without_a_failed_stage_still_runs(checkout: Path, fail: str, not_run: set[str]) -> None:
    code, printed, ran = run(checkout, fail)
    assert code == STAGES[fail.split()[0]]
    assert {*STAGES} - {*ran} == not_run
    failed = fail.split()
    assert printed[-len(failed) :] == [f"FAILED stage {name}: {name} met an error" for name in failed]


def test_a_stage_whose_make_is_killed_has_failed(checkout: Path) -> None:
    """As where memory ends; by its code alone it looks like one that `timeout` has cut off."""
    code, printed, ran = run(checkout, "test:killed")
    assert (code, {*STAGES} - {*ran}) == (21, set())
    assert printed[-1] == "FAILED stage test: test is killed"
    assert not [line for line in printed if line.startswith("NOT RUN")]
    code, _, _ = run(checkout, "slow-tenth:killed")
    assert code == 28


def test_what_the_time_cuts_off_has_not_failed(checkout: Path) -> None:
    script = checkout / ".ci" / "run"
    text = script.read_text()
    assert "stage_in_time slow-tenth 60" in text
    script.write_text(text.replace("stage_in_time slow-tenth 60", "stage slow-tenth 2"))
    code, printed, ran = run(checkout, "slow-tenth:long")
    assert (code, {*STAGES} - {*ran}) == (0, set())
    assert "NOT RUN: slow-tenth to its end, for want of time" in printed
    assert json.loads((checkout / "line").read_text())["failed"] == []


def test_a_machine_without_clusters_says_what_was_not_run(checkout: Path) -> None:
    code, printed, ran = run(checkout, "cluster")
    assert (code, {*STAGES} - {*ran}) == (0, {"cluster-test", "e2e-smoke"})
    assert printed[-1].startswith("NOT RUN: the end-to-end cases, since this machine lets no cluster run")


def test_for_want_of_time_end_to_end_cases_and_the_tenth_are_not_run(checkout: Path) -> None:
    script = checkout / ".ci" / "run"
    script.write_text(script.read_text().replace("limit=5400", "limit=100"))
    code, printed, ran = run(checkout, "")
    assert (code, {*STAGES} - {*ran}) == (0, {"e2e-smoke", "slow-tenth"})
    assert printed[-2:] == [f"NOT RUN: {name}, for want of time" for name in ("e2e-smoke", "slow-tenth")]
