"""A fresh namespace for the session on the cluster of KUBECONFIG; what a failed test leaves is gathered in a folder."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import ENVIRONMENT, RESULTS, Settings, World, claim, program, reader

LOGS = Path(os.environ.get("RLJOB_E2E_LOGS", "e2e-logs"))
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    if "KUBECONFIG" not in os.environ:
        pytest.fail("KUBECONFIG isn't set: `make e2e` starts the test cluster and sets it", pytrace=False)
    settings = Settings()
    made = World(f"rljob-e2e-{secrets.token_hex(3)}", settings)
    made.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": made.namespace, "labels": RESTRICTED}})
    try:
        made.apply(claim(RESULTS, settings.storage_class, "ReadWriteMany"))
        if settings.mounts_environment:
            made.apply(claim(ENVIRONMENT, settings.environment_class, "ReadOnlyMany"))
            made.kubectl("wait", f"pvc/{ENVIRONMENT}", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
            volume = made.get("pv", made.get("pvc", ENVIRONMENT)["spec"]["volumeName"])
            made.environment_path = volume["metadata"]["annotations"]["rljob.dev/path"]
        made.apply(reader(settings.image or default_image(made)))
        made.kubectl("wait", "pod/reader", "--for=condition=Ready", "--timeout=120s", seconds=130)
        yield made
    finally:
        made.kubectl("delete", "rlj", "--all", "--wait=false")
        made.kubectl("delete", "namespace", made.namespace, "--timeout=180s", seconds=190)


def default_image(world: World) -> str:
    """The trainer image that the operator was installed with."""
    found = json.loads(
        world.kubectl("get", "deployments", "-A", "-l", "app.kubernetes.io/name=rljob-operator", "-o", "json")
    )
    arguments = found["items"][0]["spec"]["template"]["spec"]["containers"][0]["args"]
    (image,) = [item.partition("=")[2] for item in arguments if item.startswith("--default-image=")]
    return str(image)


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
    if report.when == "call" and report.failed and isinstance(made, World):
        folder = LOGS / item.name
        gather(made, folder)
        report.sections.append(("where to look", f"everything the cluster says is in {folder}"))
    return report


def gather(world: World, folder: Path) -> None:
    """Writes what kubectl knows: objects, events, and the logs of every pod of the namespace and of both operators."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, arguments in {
        "rljobs.txt": ["describe", "rlj"],
        "rayclusters.yaml": ["get", "rayclusters", "-o", "yaml"],
        "pods.txt": ["describe", "pods"],
        "events.txt": ["get", "events", "--sort-by=.lastTimestamp"],
        "nodes.txt": ["describe", "nodes"],
    }.items():
        (folder / name).write_text(_said(world, *arguments))
    logs = ("logs", "--all-containers", "--tail=2000", "--prefix")
    for pod in world.list("pods"):
        name = pod["metadata"]["name"]
        (folder / f"{name}.log").write_text(_said(world, *logs, name))
    for name in ("rljob-operator", "kuberay-operator"):
        selector = f"app.kubernetes.io/name in ({name},{name.removesuffix('-operator')})"
        for line in _said(world, "get", "pods", "-A", "-l", selector, "--no-headers").splitlines():
            namespace, pod = line.split()[:2]
            text = _said(world, *logs, "--namespace", namespace, pod)
            (folder / f"{namespace}-{pod}.log").write_text(text)


def _said(world: World, *arguments: str) -> str:
    command = [program(), "--namespace", world.namespace, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr
