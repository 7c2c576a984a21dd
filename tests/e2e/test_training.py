"""RLJobs whose pools are apart train to the end in real pods under the real KubeRay: what is on the volume says so."""

from __future__ import annotations

from typing import Any

import pytest
from ledger import assert_every_prompt_once
from world import World

pytestmark = pytest.mark.timeout(900)
CHARACTERS = {"contextLength": 32, "tokenizer": {"characters": "0123456789+="}}


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
