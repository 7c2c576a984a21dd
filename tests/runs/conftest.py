"""Makes this folder's own module importable, and ends what a failed test has left running."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.kills import runs

sys.path.insert(0, str(Path(__file__).parent))

from real_runs import Runner
from warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with Warm(tmp_path_factory.mktemp("home")) as forks:
        yield forks


@pytest.fixture(scope="session")
def warm_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with Warm(tmp_path_factory.mktemp("home"), vllm=True) as forks:
        yield forks


@pytest.fixture
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    vllm = request.node.get_closest_marker("vllm") is not None
    started = Runner(tmp_path, request.getfixturevalue("warm_vllm" if vllm else "warm"))
    yield started
    started.close()


@pytest.fixture
def two_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are killed train half of what the benchmark does: still more steps than there are kills and what they
    undo."""
    monkeypatch.setattr(runs, "EPOCHS", 2)


@pytest.fixture
def three_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where four are killed."""
    monkeypatch.setattr(runs, "EPOCHS", 3)
