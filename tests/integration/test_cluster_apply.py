"""`make cluster-apply` on a real API server takes examples/cluster, also when all of it is there already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kube.control_plane import ControlPlane

from testcluster.__main__ import main
from testcluster.building import MOUNTED_IMAGE, ROOT
from testcluster.layout import Cluster

EXAMPLES = ROOT / "examples" / "cluster"
CORE = "/api/v1/namespaces/default"
JOB = "/apis/rljob.dev/v1alpha1/namespaces/default/rljobs/quickstart"
CLAIMS = [f"{CORE}/persistentvolumeclaims/{name}" for name in ("results", "environment")]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def folder(plane: ControlPlane) -> Iterator[Path]:
    """Of a test cluster, to `testcluster`: the control plane keeps its kubeconfig where a cluster does."""
    Cluster(plane.folder, workers=0, api_port=0, programs=plane.programs).save()
    yield plane.folder
    for path in (JOB, f"{CORE}/pods/reader", *CLAIMS):
        plane.call("DELETE", path)


def test_the_quick_start_is_applied_with_pods_that_mount_the_checkout(plane: ControlPlane, folder: Path) -> None:
    files = [str(EXAMPLES / name) for name in ("storage.yaml", "quickstart.yaml")]
    for _ in ("once", "and again"):
        assert main([f"--folder={folder}", "apply", *files]) == 0
    spec = plane.call("GET", JOB)["spec"]
    for section in ("head", "rollout", "trainer"):
        assert [mount["mountPath"] for mount in spec[section]["pod"]["volumeMounts"]] == [str(ROOT)]
    (container,) = plane.call("GET", f"{CORE}/pods/reader")["spec"]["containers"]
    assert container["image"] == MOUNTED_IMAGE
