"""What a failed test leaves: everything that the cluster, both operators, Ray and the jobs have said, in one folder."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from faults import kind_cluster, own_cluster
from world import KUBERAY, READER, RESULTS, RLJOB, Settings, World, program

LINES = "--tail=2000"
RAY_LOGS = "cd /tmp/ray/session_latest/logs && tail -n 300 -- *.log *.out *.err 2>/dev/null"
PROBLEMS = "not-gathered.txt"

_begun: set[Path] = set()


def gather_namespace(world: World, folder: Path) -> None:
    """Writes into a folder named like the namespace: objects, events, logs of pods and of Ray, the small files of runs.

    What can't be had is said in its place, or in a file of such problems; nothing is raised for it. What is there
    already stays: it was gathered nearer to the failure.
    """
    _begin(folder)
    place = folder / world.namespace
    if place.exists():
        return
    for part in (_objects, _pods_of_namespace, _results):
        _attempt(folder, part, world, place)


def gather_cluster(folder: Path) -> None:
    """Writes what is the same for all namespaces: nodes, operators, helm's release, and what the nodes' programs said.

    As with `gather_namespace`, nothing is raised.
    """
    _begin(folder)
    world = World("default", Settings())
    for part in (_nodes, _system_pods, _helm_release, _test_cluster, _kind):
        _attempt(folder, part, world, folder / "cluster")


def _begin(folder: Path) -> None:
    """What an earlier session left there goes; what this one has gathered stays."""
    if folder not in _begun:
        shutil.rmtree(folder, ignore_errors=True)
        _begun.add(folder)


def _attempt(folder: Path, part: Callable[[World, Path], None], world: World, place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
        part(world, place)
    # What the test failed of is to be told, not this. pytest's own exception: the test's time may be up meanwhile.
    except (Exception, pytest.fail.Exception) as problem:  # noqa: BLE001
        with suppress(OSError), (folder / PROBLEMS).open("a") as file:
            file.write(f"{part.__name__.strip('_')} of {world.namespace}: {type(problem).__name__}: {problem}\n")


def _objects(world: World, folder: Path) -> None:
    for name, arguments in {
        "rljobs.txt": ["describe", "rlj"],
        "rljobs.yaml": ["get", "rlj", "-o", "yaml"],
        "rayclusters.yaml": ["get", "rayclusters", "-o", "yaml"],
        "pods.txt": ["describe", "pods"],
        "claims.txt": ["describe", "pvc"],
        "events.txt": ["get", "events", "--sort-by=.lastTimestamp"],
    }.items():
        (folder / name).write_text(_said(world, *arguments))


def _pods_of_namespace(world: World, folder: Path) -> None:
    for pod in _pods(world, "--namespace", world.namespace):
        _logs(world, pod, folder)
        name = pod["metadata"]["name"]
        if "ray.io/cluster" in pod["metadata"].get("labels", {}):
            (folder / f"{name}.ray.log").write_text(_said(world, "exec", name, "--", "bash", "-c", RAY_LOGS))


def _system_pods(world: World, folder: Path) -> None:
    """Those of both operators, wherever they are, and of Kubernetes."""
    selections = [("--all-namespaces", "--selector", selector) for selector in (RLJOB, KUBERAY)]
    for selection in [*selections, ("--namespace", "kube-system")]:
        for pod in _pods(world, *selection):
            place = folder / pod["metadata"]["namespace"]
            place.mkdir(exist_ok=True)
            name, of = pod["metadata"]["name"], ("--namespace", pod["metadata"]["namespace"])
            (place / f"{name}.txt").write_text(_said(world, "describe", "pod", name, *of))
            _logs(world, pod, place)


def _logs(world: World, pod: dict[str, Any], folder: Path) -> None:
    """What a pod's containers said, and before they were started again."""
    name, of = pod["metadata"]["name"], ("--namespace", pod["metadata"]["namespace"])
    logs = ("logs", name, *of, LINES, "--prefix")
    # A container that has not begun is an error, which must not keep the others from being read.
    (folder / f"{name}.log").write_text(_said(world, *logs, "--all-containers", "--ignore-errors"))
    for container in restarted(pod):
        text = _said(world, *logs, f"--container={container}", "--previous")
        (folder / f"{name}.{container}.previous.log").write_text(text)


def restarted(pod: dict[str, Any]) -> list[str]:
    """The containers of a pod that are not the first ones of their name."""
    status = pod.get("status", {})
    known = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return [container["name"] for container in known if container.get("restartCount")]


def _results(world: World, folder: Path) -> None:
    """What this session's runs have written, but for their weights. The volume keeps earlier sessions' too."""
    # `-path` instead of a start in that folder: where no run has written yet there is nothing to find, and no error.
    own = ("-size", "-2048k", "-path", f"./runs/{world.namespace}/*")
    no_weights = ("-not", "-path", "*/learner/*", "-not", "-path", "*/start/*")
    for name in world.in_results("find", ".", "-type", "f", *own, *no_weights).splitlines():
        file = folder / RESULTS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        # One by one and encoded: the reader's image may have neither tar nor Python, and ledgers are no text.
        encoded = _said(world, "exec", READER, "--", "base64", name)
        try:
            file.write_bytes(base64.b64decode(encoded))
        except ValueError:
            file.write_text(encoded)


def _nodes(world: World, folder: Path) -> None:
    (folder / "nodes.txt").write_text(_said(world, "describe", "nodes"))
    (folder / "pods.txt").write_text(_said(world, "get", "pods", "--all-namespaces", "-o", "wide"))
    (folder / "volumes.txt").write_text(_said(world, "get", "pv"))


def _helm_release(world: World, folder: Path) -> None:
    """The operator's: the values that were given, and what the chart made of them."""
    helm = _helm()
    if helm is None:
        return
    text = world.kubectl("get", "deployments", "--all-namespaces", "--selector", RLJOB, "-o", "json")
    for deployment in json.loads(text)["items"]:
        metadata = deployment["metadata"]
        release = metadata.get("annotations", {}).get("meta.helm.sh/release-name", metadata["name"])
        for what in ("values", "manifest"):
            said = _run([helm, "get", what, release, "--namespace", metadata["namespace"]])
            (folder / f"helm-{release}-{what}.yaml").write_text(without_secrets(said))


def without_secrets(manifest: str) -> str:
    """A manifest but for its Secrets: these folders are shown around, and the chart's key opens every job."""
    return "".join(f"---\n{document}" for document in _documents(manifest) if document and not _is_secret(document))


def _documents(manifest: str) -> Iterator[str]:
    lines: list[str] = []
    for line in manifest.splitlines(keepends=True):
        if line.rstrip() == "---":
            yield "".join(lines)
            lines = []
        else:
            lines.append(line)
    yield "".join(lines)


def _is_secret(document: str) -> bool:
    return any(line.rstrip() == "kind: Secret" for line in document.splitlines())


def _helm() -> str | None:
    """helm: the installed one, or the one that the test cluster was built with."""
    installed = shutil.which("helm")
    if installed:
        return installed
    from testcluster.programs import ProgramMissingError, find

    try:
        return str(find(build=False, helm=True).path("helm"))
    except ProgramMissingError:
        return None


def _test_cluster(world: World, folder: Path) -> None:
    """On the test cluster: the logs of what carries it, and of each node's programs."""
    cluster = own_cluster(world)
    if cluster is None:
        return
    places = {"hub": cluster.folder / "log"} | {node.name: node.logs for node in cluster.nodes}
    for name, logs in places.items():
        if logs.exists():
            shutil.copytree(logs, folder / "nodes" / name, dirs_exist_ok=True)


def _kind(world: World, folder: Path) -> None:
    """On kind: its own collection, of every node."""
    name = kind_cluster(world)
    if name:
        said = _run(["kind", "export", "logs", str(folder / "kind"), "--name", name], seconds=180)
        (folder / "kind.txt").write_text(said)


def _pods(world: World, *selection: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(world.kubectl("get", "pods", *selection, "-o", "json"))["items"]
    return found


def _said(world: World, *arguments: str) -> str:
    return _run([program(), "--namespace", world.namespace, *arguments])


def _run(command: Sequence[str], seconds: float = 30) -> str:
    """What a command said, whether it went well or not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"`{' '.join(command)}` gave no answer within {seconds:.0f} s\n"
    return done.stdout + done.stderr
