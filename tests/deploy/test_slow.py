"""Which tests are slow, and that something quicker stands for each of them."""

from __future__ import annotations

import subprocess

import pytest
import slow

pytest_plugins = "pytester"

CONFTEST = """
import slow

def pytest_addoption(parser):
    slow.add_options(parser)

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: as in pyproject.toml")

def pytest_collection_modifyitems(config, items):
    slow.select(config, items)
"""
TESTS = """
import pytest

def test_quick(): ...

@pytest.mark.slow(stands_for="test_quick")
def test_again(): ...

@pytest.mark.slow(stands_for=["[a]", "test_quick"])
@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_cases(case): ...
"""
QUICK = {"test_quick", "test_cases[a]"}
SLOW = {"test_again", "test_cases[b]", "test_cases[c]"}


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it takes a second to load what has no part in this
    pytester.makeconftest(CONFTEST)
    return pytester


def ran(pytester: pytest.Pytester, *arguments: str) -> set[str]:
    result = pytester.inline_run("-p", "no:cacheprovider", *arguments)
    return {report.nodeid.rpartition("::")[2] for report in result.getreports("pytest_runtest_logreport")}


def test_slow_tests_run_when_all_do_or_when_they_are_named(run: pytest.Pytester) -> None:
    run.makepyfile(test_it=TESTS)
    assert ran(run) == QUICK
    assert ran(run, "--slow", "all") == QUICK | SLOW
    assert ran(run, "test_it.py::test_again") == {"test_again"}
    assert ran(run, "test_it.py::test_cases") == {"test_cases[a]", "test_cases[b]", "test_cases[c]"}
    assert ran(run, "test_it.py::test_cases[b]") == {"test_cases[b]"}


def test_every_commit_runs_about_a_tenth_of_them_and_another_one(run: pytest.Pytester) -> None:
    cases = 30
    run.makepyfile(
        test_it=f"""
        import pytest

        @pytest.mark.slow(stands_for="[0]")
        @pytest.mark.parametrize("case", range({cases}))
        def test_cases(case): ...
        """
    )
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=run.path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], cwd=run.path, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=run.path, check=True, capture_output=True, text=True)
    chosen = ran(run, "--slow", "tenth")
    names = {f"test_it.py::test_cases[{case}]" for case in range(1, cases)}
    assert {f"test_it.py::{name}" for name in chosen} == {n for n in names if slow.belongs(n, commit.stdout.strip())}
    # A share of a tenth, of 1,000 tests of 10 commits: 11 standard deviations on either side.
    share = sum(slow.belongs(str(test), str(commit)) for test in range(1000) for commit in range(10)) / 10_000
    assert 0.067 < share < 0.133


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("slow", "a slow test names what stands for it*"),
        ('slow("test_quick")', "a slow test names what stands for it*"),
        ('slow(stands_for="test_gone")', "test_it.py::test_gone, which stands for this slow test, is not there"),
        ('slow(stands_for="[d]")', "test_it.py::test_other[d], which stands for this slow test, is not there"),
        ('slow(stands_for="test_again")', "test_it.py::test_again, which stands for this slow test, is slow, too"),
        ('slow(stands_for="test_else.py::test_gone")', "test_else.py::test_gone, which * is not there"),
        ('slow(stands_for="test_there.py::test_gone")', "test_there.py::test_gone, which * is not there"),
    ],
)
def test_a_slow_test_for_which_nothing_quick_stands_fails(run: pytest.Pytester, mark: str, said: str) -> None:
    run.makepyfile(test_it=f"{TESTS}\n@pytest.mark.{mark}\ndef test_other(): ...\n", test_there="def test_one(): ...")
    result = run.runpytest_inprocess("-p", "no:cacheprovider", "test_it.py")
    result.assert_outcomes(passed=len(QUICK), errors=1, deselected=len(SLOW))
    result.stdout.fnmatch_lines([said.replace("[", "[[]")])


def test_what_stands_for_it_may_be_in_a_file_that_is_not_collected(run: pytest.Pytester) -> None:
    run.makepyfile(
        test_it='import pytest\n@pytest.mark.slow(stands_for="test_there.py::test_one")\ndef test_other(): ...\n',
        test_there="def test_one(): ...",
    )
    assert ran(run, "test_it.py") == set()
