"""Who lives on which GPU, on Ray with GPUs that it only believes in: one node, and two."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import yaml
from tiny_job import copy_job

from rljob_api import load_jobs, resolve
from rljob_api.cluster import ROLE_LABEL, ROLLOUT, TRAINER
from rljob_trainer.driver.engines import engine_options, learner_options
from rljob_trainer.learner.bundles import reserve
from rljob_trainer.pools.size import engine_count

Place = tuple[str, tuple[str, ...]]
"""A node and the GPUs on it."""


def stand_in() -> Any:
    """Ray's class of a process that stands where a rank or an engine would."""

    class Process:
        def place(self) -> Place:
            # What torch and vLLM go by.
            return ray.get_runtime_context().get_node_id(), tuple(os.environ["CUDA_VISIBLE_DEVICES"].split(","))

    return ray.remote(Process)


@pytest.fixture(scope="module", params=[1, 2], ids=["one node", "two nodes"])
def nodes(request: pytest.FixtureRequest, forked_workers: None) -> Iterator[int]:
    """Four GPUs for the trainer, on one node or two, and as many for engines of their own."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="rljob-gpus-", dir="/tmp")  # paths of sockets have to be short
    cluster = Cluster(initialize_head=False)
    try:
        with patch.dict(os.environ, RAY_TMPDIR=folder):
            Path(folder, "ray").mkdir()
            gpus = 4 // request.param
            roles = [(TRAINER, gpus)] * request.param + [(ROLLOUT, 4)]
            for role, count in roles:
                cluster.add_node(
                    num_cpus=10,
                    num_gpus=count,
                    labels={ROLE_LABEL: role},
                    env_vars={"OMP_NUM_THREADS": "1"},
                    temp_dir=folder,
                    include_dashboard=False,
                    # As in our pods.
                    no_monitor=True,
                    include_log_monitor=False,
                )
            ray.init(address=cluster.address, log_to_driver=False)
        yield request.param
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def places(placement: str, tensor: int) -> tuple[list[Place], list[Place]]:
    """Where four ranks and the engines of a job live, engines of ``tensor`` GPUs each."""
    separate = placement == "separate"
    rollout: dict[str, Any] = {"engine": "vllm", "maxResponseTokens": 3, "parallelism": {"tensor": tensor}}
    if separate:
        rollout |= {"replicas": 4 // tensor, "gpusPerReplica": tensor}
    sections = {"placement": placement, "trainer": {"gpusPerReplica": 4}, "rollout": rollout}
    [job] = load_jobs(yaml.safe_dump(copy_job(**sections)))
    spec = resolve(job).spec
    assert engine_count(spec) == 4 // tensor
    asked = learner_options(spec, by_role=True)
    bundles = asyncio.run(reserve(4, asked.bundle, 60.0, asked.nodes, together=asked.together))
    assert bundles is not None
    process = stand_in()
    ranks = [process.options(**asked.resources, **bundles.options(rank)).remote() for rank in range(4)]
    where = ray.get([rank.place.remote() for rank in ranks], timeout=60)
    # As LearnerGroup does.
    bundles = replace(bundles, devices=tuple(gpu for _, (gpu,) in where))
    engines = [
        process.options(**engine_options(spec, True, None if separate else bundles, f"{number}.1")).remote()
        for number in range(4 // tensor)
    ]
    try:
        where += ray.get([engine.place.remote() for engine in engines], timeout=60)
    finally:
        for actor in [*ranks, *engines]:
            ray.kill(actor)
        bundles.free()
    return where[:4], where[4:]


def devices(where: list[Place]) -> list[tuple[str, str]]:
    return [(node, gpu) for node, gpus in where for gpu in gpus]


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_colocated_engine_has_the_gpus_of_its_ranks_in_their_order_and_no_two_ranks_share_one(
    nodes: int, tensor: int
) -> None:
    ranks, engines = places("colocated", tensor)
    assert len(set(devices(ranks))) == 4
    # vLLM's worker w takes the w-th of the GPUs that its engine sees.
    assert devices(engines) == devices(ranks)
    assert all(len(gpus) == tensor for _, gpus in engines)
    # Ranks 0 and 1 are one shard group where there are two nodes, 2 and 3 the other.
    assert [ranks[0][0] == node for node, _ in ranks] == [True, True, nodes == 1, nodes == 1]


@pytest.mark.parametrize("tensor", [1, 2])
def test_separate_engines_have_gpus_of_their_own_together_on_a_node(nodes: int, tensor: int) -> None:
    ranks, engines = places("separate", tensor)
    assert len(set(devices(ranks))) == len(set(devices(engines))) == 4
    assert all(len(gpus) == tensor for _, gpus in engines)
    assert not {node for node, _ in ranks} & {node for node, _ in engines}
    assert [ranks[0][0] == node for node, _ in ranks] == [True, True, nodes == 1, nodes == 1]
