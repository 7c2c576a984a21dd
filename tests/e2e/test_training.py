"""RLJobs that train to the end in real pods under the real KubeRay: what kubectl shows, and what is on the volume."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ledger import assert_every_prompt_once
from world import World

pytestmark = pytest.mark.timeout(900)
CHARACTERS = {"contextLength": 32, "tokenizer": {"characters": "0123456789+="}}


@pytest.mark.smoke
def test_a_job_trains_in_pods_and_leaves_its_results(world: World) -> None:
    world.apply(world.job_document("short", stop={"steps": 6}, validation={"every": 3, "atStart": False}))
    world.until_condition("short", "ClusterReady", "True")
    roles = {role: world.pods("short", role) for role in ("head", "rollout", "trainer")}
    assert {role: len(pods) for role, pods in roles.items()} == {"head": 1, "rollout": 1, "trainer": 1}
    # Ray runs whatever it is sent: a policy keeps others away from the job's pods.
    policy = world.get("networkpolicy", "short-pods")["spec"]
    assert (policy["podSelector"], policy["policyTypes"]) == ({"matchLabels": {"rljob.dev/job": "short"}}, ["Ingress"])

    job = world.until_finished("short")
    assert world.step("short") == 6
    assert [attempt["attempt"] for attempt in job["status"]["attempts"]] == [1]
    assert job["status"]["checkpoint"]["step"] == 6

    # The cluster is given back; the results stay.
    world.until("the RayCluster is gone", lambda: not world.list("rayclusters"), seconds=30)
    files = world.in_results("ls", "-R", world.state_folder("short"))
    assert {"report.html", "summary.json", "metrics.jsonl", "checkpoints:"} <= {
        name.rpartition("/")[2] for name in files.split()
    }
    summary = json.loads(world.in_results("cat", f"{world.state_folder('short')}/summary.json"))
    assert summary["steps"] == 6
    assert_every_prompt_once(world, "short", 6)

    # What the docs show.
    header, row = world.kubectl("get", "rlj", "short").splitlines()
    assert header.split()[:3] == ["NAME", "STATUS", "STEP"]
    assert row.split()[:3] == ["short", "Completed", "6"]

    # A time to live may be set at any time. What the job has written outlives it.
    folder = world.state_folder("short")
    world.kubectl("patch", "rlj", "short", "--type=merge", "--patch", '{"spec": {"ttlSecondsAfterFinished": 1}}')
    world.until("the job is gone", lambda: not world.list("rlj"), seconds=60)
    assert "report.html" in world.in_results("ls", folder).split()


@pytest.mark.parametrize(
    "pipeline",
    [
        {"mode": "oneStepOff"},
        pytest.param(
            {"mode": "fullyAsync", "requireBatches": 4, "staleness": {"maxAge": 2}, "partialRollout": "keepCache"},
            marks=pytest.mark.smoke,
        ),
    ],
    ids=lambda pipeline: str(pipeline["mode"]),
)
def test_generation_and_training_overlap_on_different_nodes(world: World, pipeline: dict[str, Any]) -> None:
    name = pipeline["mode"].lower()
    trainer = {"pod": apart_from_engines(world)}
    stop = {"steps": 20}
    validation = {"every": 20, "atStart": False}
    world.apply(world.job_document(name, pipeline=pipeline, trainer=trainer, stop=stop, validation=validation))
    lines = assert_pools_are_apart_until_the_end(world, name)
    assert [line["step"] for line in lines] == list(range(1, 21))
    # Weights have travelled from pod to pod after each step, and both sides think the same of the same tokens.
    assert [line["progress/version"] for line in lines] == list(range(1, 21))
    compared = [line["mismatch/log_prob/mean"] for line in lines if "mismatch/log_prob/mean" in line]
    assert compared
    assert max(compared) < 1e-3
    assert_every_prompt_once(world, name, 20, may_be_open=True)
    # Samples are older than the weights that they train, and never older than was promised.
    oldest = max(line["age/max"] for line in lines)
    assert 0 < oldest <= pipeline.get("staleness", {"maxAge": 1})["maxAge"]


def test_vllm_generates_in_a_pod_of_its_own(world: World) -> None:
    # Heads of fewer than 32 numbers are too small for vLLM on a CPU.
    model = {"random": {"hiddenSize": 64, "layers": 2, "heads": 2, **CHARACTERS}}
    world.apply(
        world.job_document(
            "fast",
            model=model,
            rollout={"engine": "vllm"},
            trainer={"pod": apart_from_engines(world)},
            stop={"steps": 5},
            validation={"every": 5, "atStart": False},
        )
    )
    lines = assert_pools_are_apart_until_the_end(world, "fast")
    assert [line["step"] for line in lines] == list(range(1, 6))
    assert_every_prompt_once(world, "fast", 5)
    # What trainer and engine think of the same tokens is the same, after weights have travelled between the pods.
    assert max(line["mismatch/log_prob/mean"] for line in lines) < 1e-3


def apart_from_engines(world: World) -> dict[str, Any]:
    """Pod settings of ranks that are on another node than engines."""
    beside = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"rljob.dev/role": "rollout"}}}
    return world.pod() | {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [beside]}}}


def assert_pools_are_apart_until_the_end(world: World, name: str) -> list[dict[str, Any]]:
    """The job's engine and rank are on different nodes, and it ends well. Returns what it wrote of its steps."""
    world.until_condition(name, "ClusterReady", "True")
    (engine,), (rank,) = world.pods(name, "rollout"), world.pods(name, "trainer")
    assert engine["spec"]["nodeName"] != rank["spec"]["nodeName"]
    world.until_finished(name)
    return world.metrics(name)
