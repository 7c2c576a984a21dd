"""From the first `kubectl apply` of a job to its deletion, and two jobs at once."""

from __future__ import annotations

from typing import Any

import pytest
from ledger import assert_every_prompt_once
from world import RESULTS, World

pytestmark = pytest.mark.timeout(1500)
FOREVER = 100_000
KINDS = ("pods", "rayclusters", "services", "configmaps", "secrets", "networkpolicies")
"""What the operator and KubeRay make for a job."""


def test_a_deleted_job_leaves_nothing_but_its_results_and_another_goes_on_from_them(world: World) -> None:
    never: dict[str, Any] = {"validation": {"every": FOREVER, "atStart": False}}
    before = _objects(world)
    world.apply(world.job_document("first", stop={"steps": FOREVER}, **never))
    world.until_condition("first", "CheckpointAvailable", "True")
    folder = world.state_folder("first")
    assert _objects(world) > before
    world.kubectl("delete", "rlj", "first", "--timeout=60s", seconds=70)
    world.until("all that belongs to the job is gone", lambda: _objects(world) == before)
    reached = _newest_checkpoint(world, folder)
    assert reached >= 5

    # A job of the same name goes on from there when it is told to, in a folder of its own.
    steps = reached + 10
    restore = {"from": f"pvc://{RESULTS}/{folder}"}
    world.apply(world.job_document("first", stop={"steps": steps}, restore=restore, **never))
    world.until_finished("first")
    assert world.state_folder("first") != folder
    assert [line["step"] for line in world.metrics("first")] == list(range(reached + 1, steps + 1))
    assert_every_prompt_once(world, "first", steps)
    assert _newest_checkpoint(world, folder) == reached, "what was restored from is left as it was"


def test_two_jobs_side_by_side_do_not_meet(world: World) -> None:
    steps = {"left": 12, "right": 18}
    for name, last in steps.items():
        validation = {"every": FOREVER, "atStart": False}
        world.apply(world.job_document(name, stop={"steps": last}, validation=validation, seed=last))
    for name in steps:
        world.until_condition(name, "ClusterReady", "True")
        pods = world.pods(name)
        assert [pod["metadata"]["labels"]["ray.io/cluster"] for pod in pods] == [f"{name}-c1"] * 3
        assert {pod["metadata"]["labels"]["rljob.dev/role"] for pod in pods} == {"head", "rollout", "trainer"}
    for name, last in steps.items():
        job = world.until_finished(name)
        assert [attempt["reason"] for attempt in job["status"]["attempts"]] == ["Completed"]
        assert [line["step"] for line in world.metrics(name)] == list(range(1, last + 1))
        assert_every_prompt_once(world, name, last)


def _objects(world: World) -> set[str]:
    return {
        f"{kind}/{item['metadata']['name']}"
        for kind in KINDS
        for item in world.list(kind)
        if item["metadata"]["name"] not in ("kube-root-ca.crt", "reader")
    }


def _newest_checkpoint(world: World, folder: str) -> int:
    return int(world.in_results("ls", f"{folder}/checkpoints").split()[-1].removeprefix("step-"))
