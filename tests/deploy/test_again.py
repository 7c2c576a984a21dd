"""What CI forgives: a test that failed among others and passes three times alone, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import again
import pytest
import verdict

pytest_plugins = "pytester"

CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(again.__file__).parent)!r})
import again

def pytest_configure(config):
    config.addinivalue_line("markers", "integrity: as in pyproject.toml")
    again.configure(config)
"""
FLAKY = """
import os, pathlib, pytest

def fails(name, times):
    "The first so many times."
    seen = pathlib.Path(__file__).with_name(name)
    count = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("x" * (count + 1))
    assert count >= times, "an unlucky moment"

def test_sound(): ...
"""


@pytest.fixture
def folder(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytester.makeconftest(CONFTEST)
    folder = tmp_path / "times" / "again"
    folder.mkdir(parents=True)
    monkeypatch.setenv(again.FOLDER, str(folder))
    monkeypatch.setenv(again.BEGAN, str(time.time()))
    return folder


def run(pytester: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_it=FLAKY + tests)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *(options or ("-n", "2")))


def test_one_that_fails_once_is_unsteady_and_its_stage_passes(pytester: pytest.Pytester, folder: Path) -> None:
    result = run(pytester, "def test_flaky(): fails('a', 1)\n")
    assert result.ret == 0
    (forgiven,) = again.read(folder)
    assert (forgiven.test, forgiven.error) == ("test_it.py::test_flaky", "AssertionError: an unlucky moment")
    assert "an unlucky moment" in (folder / "unsteady-0.log").read_text()
    (folder.parent / "stages").write_text("test 9 0 0 0\n")
    (line,) = verdict.lines(folder.parent)
    assert line.startswith("UNSTEADY test_it.py::test_flaky: AssertionError: an unlucky moment (load ")


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("def test_broken(): fails('a', 99)\n", "again, alone, 1 of 3: test_it.py::test_broken: FAILED"),
        ("def test_hardly(): fails('a', 2)\n", "again, alone, 1 of 3: test_it.py::test_hardly: FAILED"),
        (
            "".join(f"def test_{name}(): fails('{name}', 1)\n" for name in "abc"),
            "not run again: 3 tests of this CI have failed, and 2 may",
        ),
        (
            "@pytest.mark.integrity\ndef test_bits(): fails('a', 1)\n",
            "not run again: test_it.py::test_bits is of integrity, which has to hold each time",
        ),
    ],
    ids=["broken", "again unlucky", "three of them", "integrity"],
)
def test_what_is_not_forgiven(pytester: pytest.Pytester, folder: Path, tests: str, said: str) -> None:
    result = run(pytester, tests)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([said])
    assert again.read(folder) == []


def test_two_in_all_stages(pytester: pytest.Pytester, folder: Path) -> None:
    assert run(pytester, "def test_a(): fails('a', 1)\ndef test_b(): fails('b', 1)\n").ret == 0
    assert len(again.read(folder)) == 2
    assert run(pytester, "def test_c(): fails('c', 1)\n").ret == pytest.ExitCode.TESTS_FAILED


def test_a_dead_worker_fails_its_test_and_two_end_the_stage(pytester: pytest.Pytester, folder: Path) -> None:
    dies = "def test_{0}():\n    try: fails('{0}', 1)\n    except AssertionError: os._exit(3)\n"
    assert run(pytester, dies.format("a")).ret == 0
    (forgiven,) = again.read(folder)
    assert forgiven.test == "test_it.py::test_a"
    result = run(pytester, dies.format("b") + dies.format("c"), "-n", "2", "--max-worker-restart", "1")
    assert result.ret != 0
    assert len(again.read(folder)) == 1


def test_nothing_is_run_again_late_or_where_collection_failed(
    pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(pytester, "def test_a(): fails('a', 1)\nimport nothing_of_that_name\n").ret != 0
    monkeypatch.setenv(again.BEGAN, str(time.time() - again.LATEST_SECONDS - 1))
    result = run(pytester, "def test_a(): fails('a', 1)\n")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["not run again: this CI has run for 4000 s"])
    assert again.read(folder) == []


def test_failed_stages_are_named_with_what_they_failed_with(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    (tmp_path / "stages").write_text("lint 3 0 1 2\ntest 9 1 2 2\nslow-tenth 9 2 3 124\nruns-test 1 3 4 0\n")
    (tmp_path / "lint.log").write_text("x.py:1: error: no such name\nmake: *** [lint] Error 1\n")
    (tmp_path / "test.log").write_text("__ test_x __\n\n    assert 1 == 2\nE   assert 1 == 2\n\nFAILED x\nmake: ...\n")
    assert verdict.lines(tmp_path) == [
        "FAILED stage lint: x.py:1: error: no such name",
        "FAILED stage test: assert 1 == 2",
    ]
