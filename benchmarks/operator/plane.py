"""A fresh API server for each measurement, with both CRDs and nobody else on it: no KubeRay, no garbage collection."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.environments import ROOT
from rljob_api.crd import rendered

# The control plane of the integration tests, and the programs that it runs.
sys.path.insert(0, str(ROOT / "tests" / "integration"))
sys.path.insert(0, str(ROOT / "deploy"))

from kube.control_plane import ControlPlane, die_with_parent
from operator_process import OperatorProcess

from testcluster.programs import find

NAMESPACE = "bench"
__all__ = ["NAMESPACE", "ControlPlane", "OperatorProcess", "die_with_parent", "fresh_plane"]


@contextmanager
def fresh_plane() -> Iterator[tuple[ControlPlane, Path]]:
    """An empty control plane with a namespace, and a folder for whoever works on it."""
    programs = find(build=False)
    with tempfile.TemporaryDirectory() as folder, ControlPlane(programs, Path(folder) / "plane", lean=False) as plane:
        clusters = next(path for path in programs.crds if path.name == "ray.io_rayclusters.yaml")
        plane.install_crds(clusters.read_bytes(), rendered().encode())
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        yield plane, Path(folder)
