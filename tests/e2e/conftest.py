"""A fresh namespace for the session on the cluster of KUBECONFIG; what a failed test leaves is gathered in a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import namespaces
from gathering import gather_cluster, gather_namespace
from namespaces import LIVE, fresh_namespace
from world import Settings, World

LOGS = Path(os.environ.get("RLJOB_E2E_LOGS", "e2e-logs"))

_told: list[BaseException] = []
"""What tests failed of so far. A session's fixture that failed fails each test with the same object."""


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    if "KUBECONFIG" not in os.environ:
        pytest.fail("KUBECONFIG isn't set: `make e2e` starts the test cluster and sets it", pytrace=False)
    with fresh_namespace(Settings()) as made:
        yield made


@pytest.fixture(autouse=True)
def no_jobs_left(world: World) -> Iterator[None]:
    """Each test ends with its jobs and pods gone: they would take the next one's memory."""
    yield
    world.kubectl("delete", "rlj", "--all", "--timeout=120s", seconds=130)
    world.until("the pods of the test are gone", lambda: not world.list("pods", "rljob.dev/job"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """A namespace that ends because a test fails in it, or because it can't be made, is looked at before."""

    def look(world: World, problem: BaseException) -> None:
        if not isinstance(problem, (KeyboardInterrupt, GeneratorExit, pytest.skip.Exception)):
            gather_namespace(world, LOGS / item.name)

    namespaces.on_failure = look
    try:
        return (yield)
    finally:
        namespaces.on_failure = namespaces.ignore


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed and call.excinfo is not None and "KUBECONFIG" in os.environ:
        # A test that has failed may fail once more while its jobs are removed.
        folder = LOGS / (f"{item.name}-teardown" if report.when == "teardown" else item.name)
        problem = call.excinfo.value
        if not any(problem is told for told in _told):
            _told.append(problem)
            for world in [*LIVE]:
                gather_namespace(world, folder)
            gather_cluster(folder)
            report.sections.append(("where to look", f"everything the cluster says is in {folder}"))
    return report
