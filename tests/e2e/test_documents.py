"""The commands of docs/laptop.md, run as they stand there, one after the other."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from world import EXAMPLES, READER, World, program

pytestmark = pytest.mark.timeout(3600)
PAGE = Path(__file__).parents[2] / "docs" / "laptop.md"
STEPS = 150
"""The quick start's first steps: the page waits for its end."""
STEP_LINE = re.compile(rf"^ *\d+/{STEPS} ", re.MULTILINE)
"""How a line of the driver about a step begins."""


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
        if command.endswith("--replicas=2"):
            assert world.get("rlj", "quickstart")["spec"]["rollout"]["replicas"] == 2
    assert any(command.startswith("kubectl logs ") for command in said)
    assert "staleness" in said["kubectl explain rljob.spec.pipeline"]
    assert "Normal" in said["kubectl describe rlj quickstart"]
    assert said["kubectl get rlj quickstart -o jsonpath='{.status.checkpoint.uri}'"].startswith("pvc://results/runs/")
    (summary,) = (text for command, text in said.items() if "summary.json" in command)
    assert yaml.safe_load(summary)["steps"] == STEPS
    assert "<html" in (tmp_path / "report.html").read_text()
    assert not world.list("rlj")


def without_reader(_world: World, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The suite's namespace has the pod already."""
    kept = [document for document in documents if document["metadata"]["name"] != READER]
    assert len(kept) == len(documents) - 1
    return kept


def fitted(world: World, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The job with fewer steps, and with pods for the cluster under test."""
    (job,) = documents
    job["spec"]["stop"] = {"steps": STEPS}
    if world.settings.image:
        job["spec"]["image"] = world.settings.image
    for section in ("head", "rollout", "trainer"):
        job["spec"][section]["pod"] |= world.pod()
    return [job]
