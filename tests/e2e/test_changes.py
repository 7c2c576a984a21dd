"""Running jobs are resized and suspended: training goes on as if nothing had happened."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from ledger import assert_every_prompt_once
from resumes import assert_resumed
from undisturbed import FOREVER, assert_undisturbed, endless
from world import World

pytestmark = pytest.mark.timeout(1500)
RESULTS_OF_A_STEP = ("reward/mean", "actor/grad_norm", "response/length/mean")
"""Numbers of a step that depend on every token and every weight before it, and on no clock."""
HAS_LEFT = re.compile(r"engine \S+ on (\S+) has left")
"""How the driver says that an engine has handed back what it had begun."""


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def started(pods: Iterable[dict[str, Any]]) -> set[tuple[str, str]]:
    """Pods, and when the containers that run in them began."""
    return {
        (pod["metadata"]["uid"], container["state"]["running"]["startedAt"])
        for pod in pods
        for container in pod["status"]["containerStatuses"]
    }


@pytest.mark.smoke
def test_rollout_replicas_grow_and_shrink_while_training_goes_on(world: World) -> None:
    world.apply(endless(world, "scaled"))
    world.until_condition("scaled", "Running", "True", "Training")
    world.until_step("scaled", 3)
    before = world.pods("scaled")
    first = names(world.pods("scaled", "rollout"))

    world.kubectl("scale", "rlj/scaled", "--replicas=3")
    world.until_condition("scaled", "Resizing", "True")
    world.until("three engines generate", lambda: engines(world, "scaled") == 3)
    world.until_step("scaled", world.step("scaled") + 5)
    grown = names(world.pods("scaled", "rollout"))
    assert len(grown) == 3
    assert grown > first

    with world.watching("rayclusters") as seen:
        world.kubectl("scale", "rlj/scaled", "--replicas=1")
        world.until("one pod is left", lambda: len(world.pods("scaled", "rollout")) == 1)
        world.until_condition("scaled", "Resizing", "False", "AtSize")
        world.until_step("scaled", world.step("scaled") + 5)
    # Exactly the pods that had been drained, and were named for it, are gone; nothing was lost or started anew.
    (left,) = names(world.pods("scaled", "rollout"))
    named = {pod for cluster in seen for pod in removed_by_name(cluster)}
    assert named == grown - {left}
    assert set(HAS_LEFT.findall(world.driver_log("scaled", attempt=1))) == named
    assert started(world.pods("scaled")) == started(pod for pod in before if pod["metadata"]["name"] not in named)
    assert world.get("rlj", "scaled")["status"]["pools"]["rollout"]["desired"] == 1

    assert_undisturbed(world, "scaled")
    # An engine that is drained hands its samples back; the driver calls one lost that goes without.
    assert "is lost" not in world.driver_log("scaled", attempt=1)


def removed_by_name(cluster: dict[str, Any]) -> list[str]:
    """The pods that a RayCluster's spec names as those to go."""
    found: list[str] = []
    for group in cluster["spec"]["workerGroupSpecs"]:
        found += (group.get("scaleStrategy") or {}).get("workersToDelete") or []
    return found


def engines(world: World, job: str) -> int:
    """How many engines generate, as the driver reports."""
    return int(world.get("rlj", job)["status"]["progress"].get("enginesReady", 0))


@pytest.mark.smoke
def test_a_suspended_job_goes_on_where_it_was_and_ends_the_same(world: World) -> None:
    steps = 60
    common: dict[str, Any] = {"stop": {"steps": steps}, "validation": {"every": FOREVER, "atStart": False}}
    world.apply(world.job_document("paused", **common))
    world.until_condition("paused", "Running", "True", "Training")
    world.until_step("paused", 3)
    reached = world.suspend("paused")["status"]["checkpoint"]["step"]
    assert (world.pods("paused"), world.list("rayclusters")) == ([], [])
    assert 3 <= reached < steps, "the job ended before it was suspended"
    saved = world.in_results("ls", f"{world.state_folder('paused')}/checkpoints").split()
    assert saved[-1] == f"step-{reached:08}"

    # The same job without a pause, in the meantime.
    world.apply(world.job_document("straight", **common))
    world.until_finished("straight")
    world.kubectl("patch", "rlj", "paused", "--type=merge", "--patch", '{"spec": {"suspend": false}}')
    job = world.until_finished("paused")
    assert len(job["status"]["attempts"]) == 2

    assert_every_prompt_once(world, "straight", steps)
    assert_resumed(world, "paused", assert_every_prompt_once(world, "paused", steps))
    paused, straight = world.metrics("paused"), world.metrics("straight")
    assert [line["step"] for line in paused] == list(range(1, steps + 1))
    for ours, theirs in zip(paused, straight, strict=True):
        assert {name: ours[name] for name in RESULTS_OF_A_STEP} == {name: theirs[name] for name in RESULTS_OF_A_STEP}
    # The final state is the same to the bit: weights and optimizers.
    assert checksums(world, "paused", steps) == checksums(world, "straight", steps)


def checksums(world: World, job: str, step: int) -> str:
    """Of the files that hold weights and optimizers in a checkpoint, by name."""
    folder = f"{world.state_folder(job)}/checkpoints/step-{step:08}/learner"
    sums = world.in_results("bash", "-c", f"cd {folder} && sha256sum *.distcp")
    assert sums
    return sums
