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
