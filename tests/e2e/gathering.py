"""What a failed test leaves: everything that the cluster, both operators, Ray and the job have said, in one folder."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

from faults import nodes_folder
from world import KUBERAY, READER, RESULTS, RLJOB, World, program

LINES = "--tail=2000"
RAY_LOGS = "cd /tmp/ray/session_latest/logs && tail -n 300 -- *.log *.out *.err 2>/dev/null"


def gather(world: World, folder: Path) -> None:
    """Writes objects, events, logs of pods, of operators and of Ray, the small files of each run, and, on the test
    cluster, the logs of the nodes' programs. What can't be had is said in its place; nothing is raised for it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, arguments in {
        "rljobs.txt": ["describe", "rlj"],
        "rljobs.yaml": ["get", "rlj", "-o", "yaml"],
        "rayclusters.yaml": ["get", "rayclusters", "-o", "yaml"],
        "pods.txt": ["describe", "pods"],
        "events.txt": ["get", "events", "--sort-by=.lastTimestamp"],
        "nodes.txt": ["describe", "nodes"],
    }.items():
        (folder / name).write_text(_said(world, *arguments))
    logs = ("logs", "--all-containers", LINES, "--prefix")
    for pod in _said(world, "get", "pods", "-o", "name").split():
        name = pod.rpartition("/")[2]
        (folder / f"{name}.log").write_text(_said(world, *logs, pod))
        if _said(world, "get", pod, "-o", "jsonpath={.metadata.labels.ray\\.io/cluster}"):
            (folder / f"{name}.ray.log").write_text(_said(world, "exec", pod, "--", "bash", "-c", RAY_LOGS))
    for selector in (RLJOB, KUBERAY):
        listed = _said(world, "get", "pods", "--all-namespaces", "--selector", selector, "--no-headers")
        for line in listed.splitlines():
            namespace, pod, *_ = line.split()
            text = _said(world, *logs, "--namespace", namespace, pod)
            (folder / f"{namespace}-{pod}.log").write_text(text)
    _gather_results(world, folder / RESULTS)
    nodes = nodes_folder(world)
    for node in sorted(nodes.iterdir()) if nodes is not None else ():
        shutil.copytree(node / "log", folder / "nodes" / node.name, dirs_exist_ok=True)


def _gather_results(world: World, folder: Path) -> None:
    """What this session's runs have written, but for their weights. The volume keeps earlier sessions' too."""
    # `-path` instead of a start in that folder: where no run has written yet there is nothing to find, and no error.
    own = ("-size", "-2048k", "-path", f"./runs/{world.namespace}/*")
    no_weights = ("-not", "-path", "*/learner/*", "-not", "-path", "*/model/*")
    small = ("find", ".", "-type", "f", *own, *no_weights)
    folder.mkdir()
    for name in _said(world, "exec", READER, "--", *small).splitlines():
        # One by one and encoded: the reader's image may have neither tar nor Python, and ledgers are no text.
        encoded = _said(world, "exec", READER, "--", "base64", name)
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            file.write_bytes(base64.b64decode(encoded))
        except ValueError:
            file.write_text(encoded)


def _said(world: World, *arguments: str) -> str:
    command = [program(), "--namespace", world.namespace, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "kubectl gave no answer within 60 s\n"
    return done.stdout + done.stderr
