"""Makes this folder's own module importable, and ends what a failed test has left running."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from real_runs import Runner
from warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with Warm(tmp_path_factory.mktemp("home")) as forks:
        yield forks


@pytest.fixture
def runner(tmp_path: Path, warm: Warm) -> Iterator[Runner]:
    started = Runner(tmp_path, warm)
    yield started
    started.close()
