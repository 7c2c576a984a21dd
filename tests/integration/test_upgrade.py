"""Helm's install, upgrade, rollback and uninstall on a real API server: CRD and chart change, jobs and key stay.

The older chart is the present one without some of its values and with a CRD that lacks a field. Nothing runs the
operator's pods here; what is looked at is what Helm and the API server do.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented import commands
from helm import CHART, Helm
from kube.control_plane import ApiCallError, ControlPlane
from world import PATIENCE_SECONDS, job_document

from rljob_operator.api_server import ApiServer
from rljob_operator.key_secret import KeySecret
from testcluster.programs import ProgramMissingError, find

JOBS = "/apis/rljob.dev/v1alpha1/namespaces/default/rljobs"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rljobs.rljob.dev"
NEW_FIELD = "ttlSecondsAfterFinished"
STRICT = "?fieldValidation=Strict"
KEYS = "rl-rljob-operator-keys"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def own_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane without our CRD: that is Helm's here."""
    try:
        programs = find(build=False)
    except ProgramMissingError as problem:
        pytest.fail(str(problem), pytrace=False)
    with ControlPlane(programs, tmp_path_factory.mktemp("upgrade")) as running:
        running.start_controllers()
        yield running


def older_chart(to: Path) -> Path:
    """A chart of some time ago."""
    shutil.copytree(CHART, to)
    about = yaml.safe_load((to / "Chart.yaml").read_text())
    (to / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "0.0.9"}))
    values = yaml.safe_load((to / "values.yaml").read_text())
    del values["trainingNetworkPolicy"], values["metrics"]["dashboard"], values["metrics"]["rules"]["quotaWait"]
    for name in ("nameOverride", "fullnameOverride", "podLabels", "podAnnotations", "extraEnv"):
        del values[name]
    del values["serviceAccount"]["create"], values["podSecurityContext"], values["securityContext"]
    (to / "values.yaml").write_text(yaml.safe_dump(values))
    (to / "values.schema.json").unlink()
    crd = yaml.load((to / "files" / "rljob.yaml").read_text(), Loader=yaml.CSafeLoader)
    (version,) = crd["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][NEW_FIELD]
    text = yaml.dump(crd, Dumper=yaml.CSafeDumper, sort_keys=False, width=10_000)
    # The form that the chart looks for.
    text = text.replace("metadata:\n  name: rljobs.rljob.dev\n", "metadata: {name: rljobs.rljob.dev}\n")
    (to / "files" / "rljob.yaml").write_text(text)
    return to


def untouched(job: dict[str, Any]) -> dict[str, Any]:
    """What no upgrade may change."""
    kept = ("uid", "generation", "resourceVersion")
    return {"spec": job["spec"], **{name: job["metadata"][name] for name in kept}}


def takes_new_field(plane: ControlPlane) -> bool:
    """Whether the server takes a job with the field that the older CRD lacks."""
    job = job_document("probe", **{NEW_FIELD: 60})
    try:
        plane.call("POST", f"{JOBS}{STRICT}&dryRun=All", job)
    except (ApiCallError, OSError) as error:
        if NEW_FIELD in str(error) or getattr(error, "code", 0) == 404:
            return False
        raise
    return True


def is_gone(plane: ControlPlane, path: str) -> bool:
    try:
        plane.call("GET", path)
    except ApiCallError as error:
        return error.code == 404
    return False


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits; the API server takes a moment to serve a changed CRD."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.2)


async def look_after_keys(plane: ControlPlane) -> None:
    async with ApiServer(plane.credentials()) as api:
        await KeySecret(api, "ops", KEYS, None).look()


def take_keys_along(plane: ControlPlane, namespace: str) -> None:
    """As the page on removal says, with the names of this test."""
    (shown,) = {item.text for item in commands() if item.text.startswith("kubectl get secret rljob-operator-keys")}
    names = {"rljob-operator-keys": KEYS, "namespace rljob": "namespace ops", "namespace ml": f"namespace {namespace}"}
    for name, here in names.items():
        shown = shown.replace(name, here)
    folder = plane.programs.path("kubectl").parent
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "KUBECONFIG": str(plane.kubeconfig)}
    plane.kubectl("create", "namespace", namespace)
    subprocess.run(["bash", "-o", "pipefail", "-c", shown], check=True, timeout=60, env=environment)


def test_jobs_and_key_outlive_upgrade_rollback_and_removal(own_plane: ControlPlane, tmp_path: Path) -> None:
    plane, helm = own_plane, Helm(own_plane, tmp_path / "home")
    helm("install", "rl", str(older_chart(tmp_path / "older")), "--create-namespace", "--set=image.tag=old")
    until(lambda: not is_gone(plane, f"{JOBS}?limit=1"), "jobs are served")
    assert not takes_new_field(plane)
    plane.call("POST", f"{JOBS}{STRICT}", job_document("kept"))
    job = untouched(plane.call("GET", f"{JOBS}/kept"))
    # The operator's, not the chart's: its own code makes it, as at its first start.
    secret = f"/api/v1/namespaces/ops/secrets/{KEYS}"
    asyncio.run(look_after_keys(plane))
    key = plane.call("GET", secret)["data"]["keys"]

    # The older chart's values as they are: the new names are missing among them.
    helm("upgrade", "rl", str(CHART), "--reuse-values")
    until(lambda: takes_new_field(plane), "the new field is taken")
    assert untouched(plane.call("GET", f"{JOBS}/kept")) == job
    assert plane.call("GET", secret)["data"]["keys"] == key, "tokens of running clusters derive from it"
    deployment = "/apis/apps/v1/namespaces/ops/deployments/rl-rljob-operator"
    pod = plane.call("GET", deployment)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"], "not among the older values, and not emptied either"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["image"] == "rljob/operator:old"
    assert "--operator-namespace=ops" in container["args"]
    assert "--no-network-policy" not in container["args"]

    helm("rollback", "rl", "1")
    until(lambda: not takes_new_field(plane), "the new field is refused again")
    assert untouched(plane.call("GET", f"{JOBS}/kept")) == job
    helm("upgrade", "rl", str(CHART), "--reset-values")
    until(lambda: takes_new_field(plane), "the new field is taken")

    helm("uninstall", "rl")
    with pytest.raises(ApiCallError, match="404"):
        plane.call("GET", deployment)
    assert untouched(plane.call("GET", f"{JOBS}/kept")) == job, "crds.keep"
    assert plane.call("GET", secret)["data"]["keys"] == key

    helm("install", "rl", str(CHART))
    assert untouched(plane.call("GET", f"{JOBS}/kept")) == job
    assert plane.call("GET", secret)["data"]["keys"] == key

    # Another namespace: the kept CRD says whose it is, until it is taken over; the keys come along as the docs say.
    helm("uninstall", "rl")
    take_keys_along(plane, "elsewhere")
    refused = helm.attempt("install", "rl", str(CHART), namespace="elsewhere")
    assert refused.returncode != 0
    assert "invalid ownership metadata" in refused.stderr
    helm("install", "rl", str(CHART), "--take-ownership", "--set=crds.keep=false", namespace="elsewhere")
    assert untouched(plane.call("GET", f"{JOBS}/kept")) == job
    assert plane.call("GET", secret.replace("/ops/", "/elsewhere/"))["data"]["keys"] == key

    helm("uninstall", "rl", namespace="elsewhere")
    until(lambda: is_gone(plane, CRD), "the CRD is gone")
