"""Jobs whose pods can't run: the condition says why, in words, and the job goes on once the reason is gone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ledger import assert_every_prompt_once
from namespaces import default_image
from world import World

pytestmark = pytest.mark.timeout(900)
STEPS = {"steps": 3}
TOLD_SECONDS = 15
"""From `kubectl apply` until a job says that there is no room for it."""
OUT_OF_MEMORY = re.compile(r"engine \S+ is gone \(.*(out of memory|OOM)", re.DOTALL)
GPU = "rljob.test/gpu"
"""A resource that no node has until it says so, and that Ray takes for GPUs as it does with `nvidia.com/gpu`."""


def test_a_job_without_gpus_says_so_and_runs_once_there_are_some(world: World) -> None:
    pod = world.pod()
    pod["resources"]["limits"][GPU] = "1"
    world.apply(world.job_document("roomless", rollout={"pod": pod}, stop=STEPS))
    told = world.until_condition("roomless", "ClusterReady", "False", "Unschedulable", seconds=TOLD_SECONDS)
    assert "rollout" in told["message"]
    assert f"Insufficient {GPU}" in told["message"]
    assert shown_status(world, "roomless") == "Pending"
    node = world.pods("roomless", "head")[0]["spec"]["nodeName"]
    with gpus(world, node, 1):
        world.until_condition("roomless", "ClusterReady", "True")
        assert world.pods("roomless", "rollout")[0]["spec"]["nodeName"] == node
        world.until_finished("roomless")
    assert_every_prompt_once(world, "roomless", 3)


@contextmanager
def gpus(world: World, node: str, count: int) -> Iterator[None]:
    """A node says that it has GPUs, as a device plugin would have it say."""
    path = "/" + GPU.replace("/", "~1")

    def say(*operations: dict[str, str]) -> None:
        patch = json.dumps(operations)
        world.kubectl("patch", "node", node, "--subresource=status", "--type=json", "--patch", patch)

    say({"op": "add", "path": f"/status/capacity{path}", "value": str(count)})
    try:
        yield
    finally:
        say(*({"op": "remove", "path": f"/status/{kind}{path}"} for kind in ("capacity", "allocatable")))


def test_a_job_for_real_gpus_where_there_are_none_says_so(world: World) -> None:
    # What users write: a number, from which the resource follows.
    world.apply(world.job_document("gpuless", trainer={"gpusPerReplica": 1}, stop=STEPS))
    told = world.until_condition("gpuless", "ClusterReady", "False", "Unschedulable", seconds=TOLD_SECONDS)
    assert "trainer" in told["message"]
    assert "Insufficient nvidia.com/gpu" in told["message"]


def test_an_image_that_is_nowhere_is_named_until_there_is_another(world: World) -> None:
    image = "rljob.invalid/nobody:1"
    document = world.job_document("imageless", stop=STEPS)
    right = document["spec"].get("image") or default_image(world)
    document["spec"]["image"] = image
    world.apply(document)
    told = world.until_condition("imageless", "ClusterReady", "False", "ImageError")
    assert image in told["message"]
    assert shown_status(world, "imageless") == "Pending"
    assert "ImageError" in world.kubectl("describe", "rlj", "imageless")
    # As conditions.md says: an image may be changed while the job is suspended.
    merge = ("patch", "rlj", "imageless", "--type=merge", "--patch")
    world.kubectl(*merge, '{"spec": {"suspend": true}}')
    world.until_condition("imageless", "Suspended", "True")
    world.kubectl(*merge, json.dumps({"spec": {"image": right, "suspend": False}}))
    world.until_finished("imageless")
    # (The quick start also validates before its first step.)
    assert [line["step"] for line in world.metrics("imageless")] == [0, 1, 2, 3]
    assert_every_prompt_once(world, "imageless", 3)


def test_a_container_that_is_out_of_memory_is_named_and_tried_again(world: World) -> None:
    # Ray itself doesn't fit. KubeRay makes one pod after the other; after a minute of it an attempt has failed.
    rollout = {"pod": with_memory(world, "96Mi")}
    world.apply(
        world.job_document("cramped", rollout=rollout, stop=STEPS, retry={"limit": 1, "backoffSeconds": 1}),
    )
    told = world.until_condition("cramped", "ClusterReady", "False", "PodError")
    assert "OOMKilled" in told["message"]
    failed = world.until_condition("cramped", "Failed", "True", "RetryLimitExceeded", seconds=600)
    assert "OOMKilled" in failed["message"]
    assert shown_status(world, "cramped") == "RetryLimitExceeded"
    attempts = world.get("rlj", "cramped")["status"]["attempts"]
    assert [attempt["reason"] for attempt in attempts] == ["PodError", "PodError"]
    for attempt in attempts:
        assert "OOMKilled" in attempt["message"]
    world.until("nobody makes pods any more", lambda: not world.list("rayclusters"), seconds=30)
    assert_nothing_was_trained(world, "cramped")


def test_an_engine_that_is_out_of_memory_is_named(world: World) -> None:
    # Ray fits, and the engine in it doesn't.
    rollout = {"pod": with_memory(world, "500Mi")}
    retry = {"limit": 1, "backoffSeconds": 1}
    world.apply(world.job_document("tight", rollout=rollout, stop=STEPS, retry=retry))
    failed = world.until_condition("tight", "Failed", "True", "RetryLimitExceeded", seconds=600)
    assert OUT_OF_MEMORY.search(failed["message"])
    assert shown_status(world, "tight") == "RetryLimitExceeded"
    attempts = world.get("rlj", "tight")["status"]["attempts"]
    assert [attempt["reason"] for attempt in attempts] == ["DriverFailed", "DriverFailed"]
    for attempt in attempts:
        assert OUT_OF_MEMORY.search(attempt["message"])
        assert OUT_OF_MEMORY.search(world.driver_log("tight", attempt["attempt"]))
    assert_nothing_was_trained(world, "tight")


def shown_status(world: World, job: str) -> str:
    """The word that `kubectl get rlj` prints of a job."""
    header, row = world.kubectl("get", "rlj", job).splitlines()
    return dict(zip(header.split(), row.split(), strict=False))["STATUS"]


def assert_nothing_was_trained(world: World, job: str) -> None:
    """The volume has no step and no checkpoint of a job."""
    folder = world.state_folder(job)
    written = "'(' -name metrics.jsonl -not -empty ')' -o -name 'step-*'"
    assert world.in_results("bash", "-c", f"find {folder} {written} 2>/dev/null || true") == ""


def with_memory(world: World, limit: str) -> dict[str, Any]:
    """Pod settings with another limit of memory."""
    resources = {"requests": {"cpu": "50m", "memory": limit}, "limits": {"memory": limit}}
    return world.pod() | {"resources": resources, "sharedMemory": "32Mi"}
