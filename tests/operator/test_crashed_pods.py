"""Pods whose container ends by itself: KubeRay replaces them at once, and the condition still says what happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulation import World, job_spec

from rljob_api.cluster import PERHAPS_MEMORY
from rljob_api.status import End
from rljob_operator.views import pod_view

KILLED = "OOMKilled, exit code 137"


def starting() -> World:
    world = World()
    world.look()
    world.kuberay()
    return world


def one_of(world: World, group: str) -> str:
    return min(name for name, pod in world.pods.items() if pod.group == group)


def message(world: World) -> str:
    return world.status.by_type["ClusterReady"].message


def test_a_pod_that_runs_out_of_memory_is_named_until_another_is_ready() -> None:
    world = starting()
    victim = one_of(world, "rollout")
    world.lose_pod(victim, message=KILLED)
    world.look()
    assert (world.value("ClusterReady"), world.reason("ClusterReady")) == ("False", "PodError")
    assert f"{victim}: {KILLED}" in message(world)
    # KubeRay has put another in its place, of which nothing is known yet.
    world.kuberay()
    assert victim not in world.pods
    world.look()
    assert world.reason("ClusterReady") == "PodError"
    assert f"{victim}: {KILLED}" in message(world)
    world.kubelet()
    world.look()
    assert (world.value("ClusterReady"), world.reason("ClusterReady")) == ("True", "PoolsReady")


def test_a_head_that_runs_out_of_memory_before_the_first_attempt_is_named() -> None:
    world = starting()
    victim = one_of(world, "head")
    world.lose_pod(victim, message=KILLED)
    world.look()
    assert world.reason("ClusterReady") == "PodError"
    assert f"{victim}: {KILLED}" in message(world)


def test_a_pod_that_was_taken_away_is_no_error_of_its_own() -> None:
    world = starting()
    world.lose_pod(one_of(world, "rollout"), disrupted=True, message="Error, exit code 143")
    world.look()
    assert world.reason("ClusterReady") == "WaitingForPods"


def training(**sections: object) -> World:
    world = World(spec=job_spec(**sections))
    world.settle(8)
    assert world.reason("Running") == "Training"
    return world


def test_a_pod_that_runs_out_of_memory_is_named_when_its_attempt_fails() -> None:
    world = training(retry={"limit": 0})
    victim = one_of(world, "trainer")
    world.lose_pod(victim, message=KILLED)
    world.look()
    # KubeRay has put another in its place before the driver has noticed.
    world.kuberay()
    assert victim not in world.pods
    world.end(world.running()[0], "failed", 1)
    world.settle(6)
    assert world.reason("Failed") == "RetryLimitExceeded"
    assert f"{victim}: {KILLED}" in world.status.by_type["Failed"].message
    assert f"{victim}: {KILLED}" in world.status.attempts[0].message


def test_an_attempt_names_each_crashed_pod_once_and_the_newest_three() -> None:
    world = training(retry={"limit": 0})
    victims = []
    for _ in range(5):
        victims.append(one_of(world, "rollout"))
        world.lose_pod(victims[-1], message=KILLED)
        world.look()
        world.look()
        world.kuberay()
        world.kubelet()
    message = world.status.attempts[0].message
    assert [victim for victim in victims if message.count(f"{victim}: {KILLED}") == 1] == victims[2:]


def test_of_many_pods_that_are_evicted_at_once_three_are_named_and_the_status_is_written_once() -> None:
    world = training(rollout={"replicas": 6, "maxReplicas": 8})
    evicted = [name for name, pod in world.pods.items() if pod.group == "rollout"][:5]
    for name in evicted:
        world.pods[name] = replace(
            world.pods[name], deleting_since=world.now, disrupted=True, message="Evicted: ephemeral storage exceeds 1Gi"
        )
    world.look()
    message = world.status.attempts[0].message
    assert message.count("was evicted: Evicted: ephemeral storage exceeds 1Gi") == 3
    for _ in range(3):
        world.look()
        assert world.status.attempts[0].message == message


def test_a_pod_that_is_taken_away_while_it_trains_did_not_crash() -> None:
    world = training(retry={"limit": 0})
    victim = one_of(world, "rollout")
    world.lose_pod(victim, message="Error, exit code 143")
    world.pods[victim] = replace(world.pods[victim], deleting_since=world.now)
    world.look()
    assert world.status.attempts[0].message == ""


GUESS = f"learner rank 1 died during update: its process crashed or was killed{PERHAPS_MEMORY}"


def fails_with_guess(world: World) -> str:
    """The first attempt's message when its driver has lost a rank and doesn't know why."""
    driver = world.running()[0]
    world.end(driver, "failed", 75)
    driver.end = End(kind="failed", reason=GUESS, exit_code=75, time=world.now)
    world.look()
    return world.status.attempts[0].message


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"disrupted": True, "disruption": "EvictionByEvictionAPI"}, "was evicted, as when its node is drained"),
        ({"disrupted": True}, "was evicted"),
        ({}, "was deleted"),
    ],
)
def test_a_trainer_pod_that_is_taken_away_is_told_as_such_and_not_as_memory(changes: dict[str, Any], told: str) -> None:
    world = training(retry={"limit": 1})
    victim = one_of(world, "trainer")
    world.pods[victim] = replace(world.pods[victim], deleting_since=world.now, **changes)
    world.look()
    world.look()
    message = fails_with_guess(world)
    assert message.count(victim) == 1
    assert message.endswith(f"lost pods: {victim} {told}")
    assert "memory" not in message
    assert world.status.attempts[0].counted is not changes.get("disrupted", False)


def test_a_rank_that_is_lost_with_all_pods_in_place_may_have_lacked_memory() -> None:
    assert fails_with_guess(training(retry={"limit": 1})) == GUESS


def test_pods_that_a_smaller_size_removes_are_no_loss() -> None:
    world = training()
    world.edit(rollout={"replicas": 1})
    world.look()
    world.drive()
    world.look()
    (victim,) = next(iter(world.clusters.values())).group("rollout").removing  # type: ignore[union-attr]
    world.pods[victim] = replace(world.pods[victim], deleting_since=world.now)
    world.look()
    assert world.status.attempts[0].message == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"disrupted": True, "disruption": "EvictionByEvictionAPI"}, "was evicted, as when its node is drained"),
        ({}, "was deleted"),
    ],
)
def test_a_head_that_is_taken_away_is_told_as_such(changes: dict[str, Any], told: str) -> None:
    world = training()
    head = one_of(world, "head")
    world.pods[head] = replace(world.pods[head], deleting_since=world.now, **changes)
    world.look()
    assert world.status.attempts[0].message == f"the head pod {head} {told}"


def test_the_view_of_an_evicted_pod_says_by_whom() -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    for conditions, disrupted in (([target], True), ([{**target, "status": "False"}], False)):
        view = pod_view({"metadata": {"name": "p"}, "status": {"phase": "Running", "conditions": conditions}})
        assert (view.disrupted, view.disruption) == (disrupted, "EvictionByEvictionAPI" if disrupted else "")


def test_the_view_of_a_pod_that_was_killed_for_its_memory_says_so() -> None:
    status = {
        "phase": "Failed",
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
        "containerStatuses": [{"name": "ray", "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}],
    }
    view = pod_view({"metadata": {"name": "p", "labels": {"ray.io/cluster": "job-c1"}}, "status": status})
    assert (view.ended, view.trouble, view.message) == (True, "crash", KILLED)
