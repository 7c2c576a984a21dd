"""What CI forgives: a test that failed among others and passes three times alone, and nothing else."""

from __future__ import annotations

import time
from datetime import date, timedelta
from pathlib import Path

import again
import processor_time
import pytest
import timings
import unsteady
import verdict

pytest_plugins = "pytester"

CONFTEST = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(again.__file__).parent)!r})
import again, timings, unsteady

unsteady.LIST = Path(__file__).with_name("unsteady.yaml")

def pytest_configure(config):
    config.addinivalue_line("markers", "integrity: as in pyproject.toml")
    again.configure(config)
    timings.configure(config)
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
    # What else is installed beside pytest takes a second to load, and no part in this.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    monkeypatch.setenv(timings.FOLDER, str(folder.parent))  # what they count is not CI's
    monkeypatch.setenv(again.FOLDER, str(folder))
    monkeypatch.setenv(again.BEGAN, str(time.time()))
    return folder


def run(pytester: pytest.Pytester, tests: str, workers: int = 0) -> pytest.RunResult:
    pytester.makepyfile(test_it=FLAKY + tests)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", str(workers))


def listed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *entries: unsteady.Entry) -> None:
    monkeypatch.setattr(unsteady, "LIST", pytester.path / "unsteady.yaml")
    unsteady.write(entries)


def test_one_that_fails_once_is_unsteady_and_its_stage_passes(pytester: pytest.Pytester, folder: Path) -> None:
    assert run(pytester, "def test_flaky(): fails('a', 1)\n", workers=2).ret == 0
    (forgiven,) = again.read(folder)
    assert (forgiven.test, forgiven.error) == ("test_it.py::test_flaky", "AssertionError: an unlucky moment")
    assert Path(forgiven.output).read_text().count("1 passed") == again.TIMES
    (folder.parent / "stages").write_text("test 9 0 0 0 1.5\n")
    (line,) = verdict.last_lines(folder.parent, [forgiven])
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
    ids=["broken", "unlucky again", "three", "integrity"],
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


DIES = "def test_{0}():\n    try: fails('{0}', 1)\n    except AssertionError: os._exit(3)\n"


def test_a_dead_worker_fails_its_test_and_two_end_the_stage(pytester: pytest.Pytester, folder: Path) -> None:
    assert run(pytester, DIES.format("a"), workers=1).ret == 0
    (forgiven,) = again.read(folder)
    assert forgiven.test == "test_it.py::test_a"
    result = run(pytester, DIES.format("b") + DIES.format("c") + "def test_d(): ...\n", workers=1)
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*maximum crashed workers reached: 1*"])
    assert len(again.read(folder)) == 1


def test_integrity_is_not_forgiven_where_its_worker_died(pytester: pytest.Pytester, folder: Path) -> None:
    assert run(pytester, "@pytest.mark.integrity\n" + DIES.format("a"), workers=1).ret == pytest.ExitCode.TESTS_FAILED
    assert again.read(folder) == []


def test_what_tests_left_running_is_ended_before_one_runs_again(
    pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        processor_time.own_group()
    except FileNotFoundError:
        pytest.skip("no control groups v1 here: what is left is not known")
    monkeypatch.setenv(timings.FOLDER, str(tmp_path))
    leaves = (
        "import subprocess, sys\n"
        "def test_a():\n"
        "    command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "    print(subprocess.Popen(command, start_new_session=True).pid, file=open('started', 'a'))\n"
        "    fails('a', 1)\n"
    )
    result = run(pytester, leaves, workers=1)
    result.stdout.fnmatch_lines(["ended what tests had left running: python*"])
    assert result.ret == 0
    started = [int(line) for line in (pytester.path / "started").read_text().split()]
    assert len(started) == 1 + again.TIMES
    assert not any(map(processor_time.runs, started))


def test_nothing_is_run_again_late_or_where_collection_failed(
    pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(pytester, "def test_a(): fails('a', 1)\nimport nothing_of_that_name\n").ret != 0
    monkeypatch.setenv(again.BEGAN, str(time.time() - again.LATEST_SECONDS - 1))
    result = run(pytester, "def test_a(): fails('a', 1)\n")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["not run again: this CI has run for 4000 s"])
    assert again.read(folder) == []


def test_who_is_listed_for_long_is_not_forgiven(
    pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = date.today() - timedelta(unsteady.DAYS + 1)
    listed(pytester, monkeypatch, unsteady.Entry("test_it.py::test_a", "an unlucky moment", since))
    result = run(pytester, "def test_a(): fails('a', 1)\n")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"not run again: test_it.py::test_a: it is listed since {since}, more than 14 days"])


def test_the_last_lines_name_stages_with_what_they_failed_with(tmp_path: Path) -> None:
    (tmp_path / "stages").write_text(
        "test 9 1 2 2 1.0\nruns-test 1 3 4 0 2.0\nintegration 5 4 6 2 1.5\ncluster-test 2 6 7 2 1\n"
        "slow-tenth 9 2 3 -1 1\n"
    )
    lint = "warning: x\nx.py:1: error: no such name\nFound 1 error\nmake: *** [Makefile:1: lint] Error 1\nE   later\n"
    (tmp_path / "test.log").write_text(lint.replace("make:", "make[1]:"))
    (tmp_path / "integration.log").write_text(
        "__ test_x __\nan error\n    assert 1 == 2\nE   assert 1 == 2\n\nFAILED x\n"
    )
    (tmp_path / "cluster-test.log").write_text("[gw0] linux\nworker 'gw0' crashed while running 'test_x'\n1 failed\n")
    assert verdict.last_lines(tmp_path, []) == [
        "FAILED stage test: x.py:1: error: no such name",
        "FAILED stage integration: assert 1 == 2",
        "FAILED stage cluster-test: worker 'gw0' crashed while running 'test_x'",
    ]


def test_the_line_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "stages").write_text("install 10 0 1000 0 3.0\ntest 30 1000 7000 2 1.0\n")
    line = verdict.line_of(tmp_path, [])
    assert (line["seconds"], line["processor_seconds"], line["load"]) == (40, 70, 1.5)
    assert (line["failed"], line["unsteady"]) == (["test"], [])
    assert line["stages"] == {"install": [10, 10], "test": [30, 60]}
