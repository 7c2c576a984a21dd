"""The real Helm: the chart rendered, and installed as an administrator would."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube.control_plane import ControlPlane

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


class Helm:
    """Helm as administrator of a control plane, with a home of its own."""

    def __init__(self, plane: ControlPlane, home: Path) -> None:
        self._program = str(program())
        folders = {f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        self._environment = os.environ | folders | {"KUBECONFIG": str(plane.kubeconfig)}

    def __call__(self, *arguments: str) -> str:
        command = [self._program, *arguments, "--namespace=ops"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=self._environment)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
        return done.stdout


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The only object of a kind."""
    (found,) = [document for document in documents if document["kind"] == kind]
    return found
