"""One job on both sides: as an RLJob, or as a plain RayJob with the same pods and program."""

from __future__ import annotations

import json
import re
from typing import Any

from namespaces import default_image
from world import World

from benchmarks.cluster import plain_rayjob

LOADED = re.compile(r"the learner was ready after ([0-9.]+) s, the engines after ([0-9.]+) s")
"""How the driver says it."""


def apply(world: World, job: dict[str, Any], *, plain: bool, backoff_limit: int = 0) -> None:
    """``backoff_limit``: how often KubeRay begins a plain RayJob anew."""
    documents = [job]
    if plain:
        image = world.settings.image or default_image(world)
        documents = plain_rayjob.documents(job, world.namespace, image, backoff_limit)
    world.apply(*documents)


def state_folder(world: World, name: str, *, plain: bool) -> str:
    """Where the job keeps its state on the results volume."""
    return f"runs/{world.namespace}/{name}-{plain_rayjob.UID}" if plain else world.state_folder(name)


def steps(world: World, folder: str) -> list[dict[str, Any]]:
    """What the job wrote about its steps; none while there is no such file."""
    text = world.in_results("bash", "-c", f"cat {folder}/metrics.jsonl 2>/dev/null || true")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def began(world: World, folder: str) -> float:
    """When the driver of the present attempt had read its job; 0 before the first one has."""
    return float(world.in_results("bash", "-c", f"stat --format=%.Y {folder}/job.yaml 2>/dev/null || echo 0"))


def loaded(world: World, folder: str) -> tuple[float, float]:
    """Seconds that the learner and the engines took to start in the first attempt."""
    log = world.in_results("cat", f"{folder}/logs/attempt-1.log")
    found = LOADED.search(log)
    if found is None:
        raise RuntimeError(f"the driver's log doesn't say how long learner and engines took to start: {log[-500:]}")
    return float(found[1]), float(found[2])


def remove(world: World, name: str, *, plain: bool) -> None:
    """Deletes the job and waits until its pods are gone."""
    world.kubectl("delete", "rayjob" if plain else "rlj", name, "--timeout=120s", seconds=130)
    world.until("its pods are gone", lambda: not world.list("pods", "rljob.dev/job"))
