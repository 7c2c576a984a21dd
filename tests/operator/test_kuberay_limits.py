"""What KubeRay would refuse is refused before, in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from simulation import SETTINGS, World, job_spec

from rljob_operator.kuberay_limits import problems
from rljob_operator.render import rendered


@pytest.fixture
def cluster() -> dict[str, Any]:
    import json

    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": job_spec()}
    return copy.deepcopy(rendered(json.dumps(job) + "\n", [], SETTINGS)[-1])


def test_what_we_make_is_fine(cluster: dict[str, Any]) -> None:
    assert problems(cluster) == []


def test_names(cluster: dict[str, Any]) -> None:
    cluster["metadata"]["name"] = "1" + "x" * 53
    assert len(problems(cluster)) == 2


def test_groups(cluster: dict[str, Any]) -> None:
    groups = cluster["spec"]["workerGroupSpecs"]
    groups[0]["replicas"] = groups[0]["maxReplicas"] + 1
    groups.append({**groups[1]})
    groups.append({**groups[1], "groupName": "headgroup"})
    found = problems(cluster)
    assert [any(word in line for line in found) for word in ("between", "two pools", "headgroup")] == [True] * 3


def test_tokens_need_a_new_ray(cluster: dict[str, Any]) -> None:
    cluster["spec"]["rayVersion"] = "2.51.9"
    assert "too old" in problems(cluster)[0]


def test_a_variable_that_comes_by_the_template_is_named_in_the_status_and_nothing_is_created() -> None:
    container = {"name": "ray", "env": [{"name": "REDIS_PASSWORD", "value": "x"}]}
    world = World(spec=job_spec(head={"pod": {"template": {"spec": {"containers": [container]}}}}))
    assert world.look().actions == ()
    assert world.reason("Accepted") == "InvalidSpec"
    assert "REDIS_PASSWORD" in world.status.by_type["Accepted"].message
