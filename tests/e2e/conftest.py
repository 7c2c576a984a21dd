"""A fresh namespace for the session on the cluster of KUBECONFIG; what a failed test leaves is gathered in a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gathering import gather
from namespaces import fresh_namespace
from world import Settings, World

LOGS = Path(os.environ.get("RLJOB_E2E_LOGS", "e2e-logs"))


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
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    made = getattr(item, "funcargs", {}).get("world")
    if report.when in ("setup", "call") and report.failed and isinstance(made, World):
        folder = LOGS / item.name
        gather(made, folder)
        report.sections.append(("where to look", f"everything the cluster says is in {folder}"))
    return report
