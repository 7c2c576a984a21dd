"""Jobs whose pods can't run: the condition says why, in words, and the job goes on once the reason is gone."""

from __future__ import annotations

import pytest
from world import World

pytestmark = pytest.mark.timeout(900)
STEPS = {"steps": 3}


def test_a_job_without_room_says_so_and_runs_once_there_is_some(world: World) -> None:
    label = "rljob.dev/e2e-room"
    pod = world.pod() | {"nodeSelector": {label: world.namespace}}
    world.apply(world.job_document("roomless", rollout={"pod": pod}, stop=STEPS))
    told = world.until_condition("roomless", "ClusterReady", "False", "Unschedulable", seconds=60)
    assert "rollout" in told["message"]
    node = world.pods("roomless", "head")[0]["spec"]["nodeName"]
    world.kubectl("label", "node", node, f"{label}={world.namespace}")
    try:
        world.until_condition("roomless", "ClusterReady", "True")
        assert world.pods("roomless", "rollout")[0]["spec"]["nodeName"] == node
    finally:
        world.kubectl("label", "node", node, f"{label}-")


def test_an_image_that_is_nowhere_is_named(world: World) -> None:
    image = "rljob.invalid/nobody:1"
    world.apply(world.job_document("imageless", image=image, stop=STEPS))
    told = world.until_condition("imageless", "ClusterReady", "False", "ImageError")
    assert image in told["message"]
