"""Which Python `make` takes: one that runs, not one whose name is on the path."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "requirements" / "python.sh"
RUNS, REFUSES = "exit 0", "echo 'command not found' >&2; exit 127"


def program(path: Path, line: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def found(folder: Path, *versions: str) -> str:
    """What is printed where the path has nothing but ``folder`` and the system's own programs."""
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(["sh", SCRIPT, *versions], env=environment, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def managed(tmp_path: Path) -> Path:
    """pyenv's folder of versions, and its shim, which refuses a version that isn't chosen."""
    program(tmp_path / "pyenv", f"echo '{tmp_path / 'pyenv root'}'")
    program(tmp_path / "python3.98", REFUSES)
    return tmp_path / "pyenv root" / "versions"


def test_the_first_version_that_runs_is_taken(tmp_path: Path) -> None:
    program(tmp_path / "python3.98", REFUSES)
    python = program(tmp_path / "python3.97", RUNS)
    assert found(tmp_path, "3.99", "3.98", "3.97") == str(python)


def test_a_shim_that_refuses_is_passed_over_for_the_newest_version_that_pyenv_has(
    managed: Path, tmp_path: Path
) -> None:
    program(managed / "3.98.9/bin/python3", RUNS)
    newest = program(managed / "3.98.10/bin/python3", RUNS)
    program(managed / "3.98.11/bin/python3", REFUSES)
    program(managed / "3.97.20/bin/python3", RUNS)
    assert found(tmp_path, "3.98") == str(newest)


def test_a_machine_without_one_gets_none(managed: Path, tmp_path: Path) -> None:
    assert found(tmp_path, "3.99", "3.98") == ""
