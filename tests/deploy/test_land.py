"""`make land`: a commit is tried in a clean clone, in the background, and has its verdict in the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import unsteady
import yaml

ROOT = Path(__file__).parents[2]
SUPPORT = ["again.py", "processor_time.py", "slow.py", "timings.py", "unsteady.py"]
FORGIVEN = {"test": "tests/a.py::test_a", "error": "E", "load": 1.0, "seed": "", "seconds": 2.0, "output": "0.log"}
CI = f"""#!/bin/sh
[ -z "$(git status --porcelain)" ] && git log -1 --format=%s && cat tracked
while [ ! -e "$HOME/go" ]; do sleep 0.05; done
mkdir -p "$RLJOB_AGAIN" && echo '{json.dumps(FORGIVEN)}' > "$RLJOB_AGAIN/unsteady.jsonl"
echo '{{"commit": "x", "failed": []}}' > "$RLJOB_CI_LINE"
exit "$(cat code)"
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small one, whose CI waits until it is let go."""
    monkeypatch.setenv("HOME", str(tmp_path))
    checkout = tmp_path / "checkout"
    for file in (Path("scripts/land.py"), *(Path("tests/support") / name for name in SUPPORT)):
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, checkout / file)
    (checkout / ".ci").mkdir()
    (checkout / ".ci" / "run").write_text(CI)
    (checkout / ".ci" / "run").chmod(0o755)
    (checkout / "tracked").write_text("as committed\n")
    git(checkout, "init", "-q")
    return checkout


def git(checkout: Path, *command: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *who, *command], cwd=checkout, check=True, capture_output=True, text=True).stdout


def commit(checkout: Path, code: int) -> str:
    (checkout / "code").write_text(f"{code}\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", f"ends with {code}")
    return git(checkout, "rev-parse", "HEAD").strip()


def land(checkout: Path, *options: str) -> str:
    command = [sys.executable, "scripts/land.py", *options]
    return subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout


def landed(checkout: Path, commit: str) -> str:
    """Its verdict, when what was begun has ended."""
    folder = Path(os.environ["HOME"]) / ".cache" / "rljob" / "land"
    while (folder / f"{commit}.pid").exists():
        time.sleep(0.05)
    assert (folder / f"{commit}.log").read_text().splitlines()[-1] == (folder / commit).read_text().strip()
    return land(checkout)


def test_a_commit_is_tried_in_a_clean_clone_and_is_green_or_red(checkout: Path, tmp_path: Path) -> None:
    good = commit(checkout, 0)
    (checkout / "tracked").write_text("changed since\n")
    begun = land(checkout)
    assert "not committed, so not tried:\n M tracked" in begun
    assert "under way" in land(checkout)
    (tmp_path / "go").touch()
    assert landed(checkout, good).splitlines()[-1].startswith(f"green: {good}, exit code 0")
    log = (tmp_path / ".cache" / "rljob" / "land" / f"{good}.log").read_text()
    assert log.startswith("ends with 0\nas committed\n")
    assert not (tmp_path / f"land-{good[:8]}").exists()
    (entry,) = yaml.safe_load((checkout / "tests" / "unsteady.yaml").read_text())
    assert (entry["test"], entry["count"]) == ("tests/a.py::test_a", 1)

    bad = commit(checkout, 21)
    land(checkout)
    assert landed(checkout, bad).startswith(f"red: {bad}, exit code 21")
    land(checkout, "--anew")
    assert landed(checkout, bad).startswith("red")
    runs = [json.loads(line) for line in (checkout / "benchmarks" / "ci" / "runs.jsonl").read_text().splitlines()]
    assert [run["code"] for run in runs] == [0, 21, 21]
    assert yaml.safe_load((checkout / "tests" / "unsteady.yaml").read_text())[0]["count"] == 3
    assert unsteady.HEAD in (checkout / "tests" / "unsteady.yaml").read_text()


def test_one_that_was_interrupted_is_begun_anew(checkout: Path, tmp_path: Path) -> None:
    tried = commit(checkout, 0)
    process = int(land(checkout).rpartition("kill -- -")[2])
    os.killpg(process, 9)
    (tmp_path / "go").touch()
    assert "log" in land(checkout)
    assert landed(checkout, tried).startswith("green")
