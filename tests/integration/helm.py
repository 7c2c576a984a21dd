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
    # The parser in C: the one in Python needs seconds for the CRD.
    return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]


class Helm:
    """Helm as administrator of a control plane, with a home of its own."""

    def __init__(self, plane: ControlPlane, home: Path) -> None:
        self._program = str(program())
        folders = {f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        self._environment = os.environ | folders | {"KUBECONFIG": str(plane.kubeconfig)}

    def __call__(self, *arguments: str, namespace: str = "ops") -> str:
        done = self.attempt(*arguments, namespace=namespace)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def attempt(self, *arguments: str, namespace: str = "ops") -> subprocess.CompletedProcess[str]:
        """A call that may be refused."""
        command = [self._program, *arguments, f"--namespace={namespace}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, env=self._environment)


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The only object of a kind."""
    (found,) = [document for document in documents if document["kind"] == kind]
    return found
