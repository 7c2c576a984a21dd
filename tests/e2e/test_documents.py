"""The commands of docs/laptop.md, run as they stand there, one after the other."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from ledger import assert_every_prompt_once
from resumes import assert_resumed
from world import EXAMPLES, READER, World, program

# More than the page's own waits together: the one that takes too long is to say so.
pytestmark = pytest.mark.timeout(4500)
PAGE = Path(__file__).parents[2] / "docs" / "laptop.md"
STEP_LINE = re.compile(r"^ *\d+/\d+ ", re.MULTILINE)
"""How a line of the driver about a step begins."""
SCALE = re.compile(r"^kubectl scale .* --replicas=(\d+)$")
LEARNED = 0.9
"""Share of held-out additions that the quick start gets right at its end, with every seed."""


def commands(page: Path) -> list[str]:
    """The kubectl commands in a page's blocks of shell, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.startswith("kubectl ")]


def test_the_laptop_page_holds(world: World, tmp_path: Path) -> None:
    for name, change in (("storage.yaml", without_reader), ("quickstart.yaml", fitted)):
        copy = tmp_path / "examples" / "cluster" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        documents = list(yaml.safe_load_all((EXAMPLES / "cluster" / name).read_text()))
        copy.write_text(yaml.safe_dump_all(change(world, documents)))
    # A user's kubectl: it has a default namespace.
    config = tmp_path / "kubeconfig"
    config.write_text(world.kubectl("config", "view", "--raw", "--flatten"))
    environment = os.environ | {"KUBECONFIG": str(config)}
    environment["PATH"] = f"{Path(program()).parent}:{environment['PATH']}"

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3600
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout

    def shows_a_step(command: str) -> bool:
        return STEP_LINE.search(run(command)) is not None

    said = {}
    for command in ["kubectl config set-context --current --namespace=" + world.namespace, *commands(PAGE)]:
        said[command] = run(command)
        if command.startswith("kubectl logs "):
            # The job is running before its first step is done; until then the log has Ray's own lines alone.
            world.until("the head's log has a step of the driver", partial(shows_a_step, command))
        if scaled := SCALE.match(command):
            size = int(scaled[1])
            world.until(f"the rollout pool has {size} pods", partial(has_size, world, "quickstart", size))
        if "condition=Finished" in command:
            # On the page the job goes afterwards.
            assert_ended_well(world, "quickstart")
    assert any(command.startswith("kubectl wait ") and "condition=Finished" in command for command in said)
    assert any(command.startswith("kubectl logs ") for command in said)
    assert "staleness" in said["kubectl explain rljob.spec.pipeline"]
    header, row = said["kubectl get rlj"].splitlines()
    assert header.split()[:3] == ["NAME", "STATUS", "STEP"]
    assert row.split()[:2] == ["quickstart", "Training"]
    _, *pods = said["kubectl get pods --selector rljob.dev/job=quickstart"].splitlines()
    assert [line.split()[1:3] for line in pods] == [["1/1", "Running"]] * 3
    events = said["kubectl describe rlj quickstart"].partition("\nEvents:")[2].splitlines()
    # A table: type, reason, age, who says it, and a sentence.
    told = {tuple(line.split()[:2]) for line in events if len(line.split()) > 5}
    assert told >= {("Normal", "PoolsReady"), ("Normal", "Training")}
    checkpoint = said["kubectl get rlj quickstart -o jsonpath='{.status.checkpoint.uri}'"]
    assert checkpoint.startswith("pvc://results/runs/")
    (text,) = (text for command, text in said.items() if "summary.json" in command)
    summary = json.loads(text)
    assert summary["outcome"] == "succeeded"
    ((quantity, exact),) = (item for item in summary["validation"]["held-out"].items() if item[0].startswith("mean@"))
    assert exact["last"]["value"] >= LEARNED, f"{quantity} of the held-out set is {exact}"
    assert "<html" in (tmp_path / "report.html").read_text()
    # By its time to live: the page deletes nothing. What it wrote stays.
    assert not any(command.startswith("kubectl delete ") for command in said)
    assert not world.list("rlj")
    assert "ledger.sqlite" in world.in_results("ls", checkpoint.removeprefix("pvc://results/")).split()


def has_size(world: World, job: str, size: int) -> bool:
    """As many rollout pods are wanted, there and ready."""
    pool = world.get("rlj", job)["status"]["pools"]["rollout"]
    return [pool["desired"], pool["replicas"], pool["ready"]] == [size] * 3


def assert_ended_well(world: World, name: str) -> None:
    """The pods are given back at once, training went on where it was paused, and every prompt was trained once."""
    world.until("the RayCluster is gone", lambda: not world.list("rayclusters"), seconds=30)
    assert world.condition(name, "Succeeded")["status"] == "True", world.condition(name, "Failed")["message"]
    steps = world.metrics(name)[-1]["step"]
    # The reward ends the job after a step whose successor may have begun.
    assert_resumed(world, name, assert_every_prompt_once(world, name, steps, may_be_open=True))


def without_reader(_world: World, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The suite's namespace has the pod already."""
    kept = [document for document in documents if document["metadata"]["name"] != READER]
    assert len(kept) == len(documents) - 1
    return kept


def fitted(world: World, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The job with pods for the cluster under test; all else is the example's."""
    (job,) = documents
    if world.settings.image:
        job["spec"]["image"] = world.settings.image
    for section in ("head", "rollout", "trainer"):
        job["spec"][section]["pod"] |= world.pod()
    return [job]
