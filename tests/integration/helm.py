"""The chart, rendered by the real Helm."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from testcluster.programs import ProgramMissingError, find

CHART = Path(__file__).parents[2] / "charts" / "rljob-operator"


def program() -> Path:
    """Helm; the test fails in one line where it isn't built."""
    try:
        return find(build=False, helm=True).path("helm")
    except ProgramMissingError as problem:
        pytest.fail(str(problem), pytrace=False)


def call(helm: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(helm), *arguments], capture_output=True, text=True, timeout=60)


def render(helm: Path, *arguments: str, namespace: str = "default") -> list[dict[str, Any]]:
    """The objects that the chart makes."""
    done = call(helm, "template", "rl", str(CHART), "--namespace", namespace, *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The only object of a kind."""
    (found,) = [document for document in documents if document["kind"] == kind]
    return found
