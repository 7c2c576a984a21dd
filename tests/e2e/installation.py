"""The operator's Helm release on the cluster under test, and what a person who runs the cluster does with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults import operator_pods
from world import RLJOB, World

CHART = Path(__file__).parents[2] / "charts" / "rljob-operator"


@dataclass
class Release:
    """The release as it was installed; its values are those to go back to."""

    world: World
    name: str
    namespace: str
    values: dict[str, Any] = field(default_factory=dict)

    def helm(self, *arguments: str, text: str | None = None) -> str:
        """Runs helm; fails the test with what helm said."""
        command = [_program(), *arguments, "--namespace", self.namespace]
        environment = os.environ | {"KUBECONFIG": self.world.kubeconfig}
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=180, env=environment)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout

    def install(self, chart: Path = CHART, **values: Any) -> None:
        """Installs the release, or upgrades it, with its values and these; returns when the new pods are ready."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(self.values | values, file)
            file.flush()
            self.helm("upgrade", "--install", self.name, str(chart), f"--values={file.name}")
        self.world.kubectl(
            *("rollout", "status", "deployment", "--namespace", self.namespace, "--selector", RLJOB, "--timeout=180s"),
            seconds=190,
        )

    def uninstall(self) -> None:
        """Removes the release; returns when its pods are gone."""
        self.helm("uninstall", self.name)
        self.world.until("the operator is gone", lambda: not operator_pods(self.world, RLJOB))


@contextmanager
def release(world: World) -> Iterator[Release]:
    """The operator's release; as it was when the context ends, whatever became of it."""
    found = json.loads(world.kubectl("get", "deployments", "--all-namespaces", "--selector", RLJOB, "-o", "json"))
    (deployment,) = found["items"]
    metadata = deployment["metadata"]
    made = Release(world, metadata["annotations"]["meta.helm.sh/release-name"], metadata["namespace"])
    made.values = json.loads(made.helm("get", "values", made.name, "--output", "json")) or {}
    try:
        yield made
    finally:
        made.install()


def _program() -> str:
    """helm: the installed one, or the one that the test cluster was built with."""
    installed = shutil.which("helm")
    if installed:
        return installed
    from testcluster.programs import ProgramMissingError, find

    try:
        return str(find(build=False, helm=True).path("helm"))
    except ProgramMissingError as problem:
        pytest.skip(f"the operator's release is changed with helm: {problem}")
