"""Pods that are not made, or find no node: the status names what holds them back, and a refusal has a deadline."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from simulation import SETTINGS, World, job_spec

from rljob_operator.views import cluster_view, pod_view, trimmed_cluster, trimmed_pod

# As KubeRay 1.6.2 writes them into the condition ReplicaFailure: a line with the reason, then the API server's words.
QUOTA = (
    "FailedCreateWorkerPod",
    'FailedCreateWorkerPod\npods "job-c1-rollout-worker-8xk2p" is forbidden: exceeded quota: team-a, '
    "requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8",
)
UNBOUNDED = (
    "FailedCreateHeadPod",
    'FailedCreateHeadPod\npods "job-c1-head-7dk2x" is forbidden: failed quota: team-a: must specify limits.cpu for: '
    "ray",
)
SECURITY = (
    "FailedCreateHeadPod",
    'FailedCreateHeadPod\npods "job-c1-head-7dk2x" is forbidden: violates PodSecurity "restricted:latest": '
    'hostPath volumes (volume "data"), runAsNonRoot != true (pod must set securityContext.runAsNonRoot=true)',
)
WEBHOOK = (
    "FailedCreateHeadPod",
    'FailedCreateHeadPod\nadmission webhook "images.example.com" denied the request: only images of '
    "registry.example.com",
)
HICCUP = ("FailedCreateHeadPod", "FailedCreateHeadPod\netcdserver: request timed out")


def starting(**sections: Any) -> World:
    world = World(spec=job_spec(**sections))
    world.look()
    return world


def refuse(world: World, problem: tuple[str, str] | None) -> None:
    """KubeRay says that the API server does not take its pods, or that all is well again."""
    conditions = []
    if problem is not None:
        reason, message = problem
        now = world.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [
            {
                "type": "ReplicaFailure",
                "status": "True",
                "reason": reason,
                "message": message,
                "lastTransitionTime": now,
            }
        ]
    raw = {"metadata": {"name": "a", "namespace": "b", "uid": "c"}, "status": {"conditions": conditions}}
    view = cluster_view(trimmed_cluster(raw))
    for name, cluster in world.clusters.items():
        world.clusters[name] = replace(
            cluster, problem=view.problem, problem_since=view.problem_since, refused=view.refused
        )


def message(world: World, kind: str = "ClusterReady") -> str:
    return world.status.by_type[kind].message


@pytest.mark.parametrize(
    ("problem", "reason", "words"),
    [
        (QUOTA, "QuotaRefused", "exceeded quota: team-a, requested: requests.nvidia.com/gpu=1"),
        (UNBOUNDED, "QuotaRefused", "failed quota: team-a: must specify limits.cpu for: ray"),
        (SECURITY, "PodSecurityRefused", 'violates PodSecurity "restricted:latest": hostPath volumes (volume "data")'),
        (WEBHOOK, "PodsRefused", "denied the request: only images of registry.example.com"),
    ],
)
def test_pods_that_the_api_server_refuses_are_named_with_a_warning(
    problem: tuple[str, str], reason: str, words: str
) -> None:
    world = starting()
    world.quota = 0
    refuse(world, problem)
    decision = world.look()
    assert (world.value("ClusterReady"), world.reason("ClusterReady")) == ("False", reason)
    assert words in message(world)
    assert "\n" not in message(world)
    (event,) = [event for event in decision.events if event.reason == reason]
    assert event.kind == "Warning"
    assert words in event.message
    # The room is there: it goes on by itself.
    world.quota = None
    refuse(world, None)
    world.settle(6)
    assert world.reason("Running") == "Training"


def test_an_api_server_that_stumbles_refuses_nothing() -> None:
    world = starting()
    refuse(world, HICCUP)
    world.look()
    assert world.reason("ClusterReady") == "WaitingForPods"
    assert "etcdserver: request timed out" in message(world)


def test_a_refusal_is_named_although_other_pods_of_the_job_wait_for_something_else() -> None:
    world = starting()
    world.quota = 2
    world.kuberay()
    refuse(world, QUOTA)
    world.look()
    assert world.reason("ClusterReady") == "QuotaRefused"
    assert "exceeded quota: team-a" in message(world)


def test_a_job_whose_pods_are_refused_from_the_beginning_fails_after_the_start_deadline() -> None:
    world = starting(deadlines={"startSeconds": 600})
    world.quota = 0
    refuse(world, QUOTA)
    world.settle(2)
    world.wait(600)
    world.look()
    assert world.reason("Failed") == "StartDeadlineExceeded"
    assert "exceeded quota: team-a" in message(world, "Failed")


def test_a_job_whose_pods_are_refused_later_on_fails_after_that_time_too() -> None:
    world = starting(deadlines={"startSeconds": 600})
    world.settle(6)
    world.wait(5000)
    assert world.reason("Running") == "Training"
    # The head is lost, and there is no quota any more for its successor.
    world.quota = 0
    world.lose_pod(next(pod.name for pod in world.pods.values() if pod.group == "head"))
    world.settle(4)
    refuse(world, QUOTA)
    refused = world.now
    world.settle(2)
    assert world.reason("ClusterReady") == "QuotaRefused"
    world.now = refused + timedelta(seconds=599)
    world.look()
    assert world.value("Failed") == "False"
    world.wait(1)
    world.look()
    assert world.reason("Failed") == "QuotaRefused"
    assert "for 600 s" in message(world, "Failed")
    assert "exceeded quota: team-a" in message(world, "Failed")


def test_engines_that_are_refused_do_not_end_a_job_that_trains() -> None:
    world = starting(deadlines={"startSeconds": 600})
    world.settle(6)
    world.edit(rollout={"replicas": 4})
    world.quota = len(world.pods)
    world.settle(2)
    refuse(world, QUOTA)
    world.settle(3)
    world.wait(5000)
    world.settle(3)
    assert world.reason("Running") == "Training"
    assert (world.value("ClusterReady"), world.reason("ClusterReady")) == ("True", "QuotaRefused")


def pod(**parts: Any) -> dict[str, Any]:
    labels = {"ray.io/cluster": "job-c1", "ray.io/group": "trainer", "ray.io/node-type": "worker"}
    return {
        "metadata": {
            "name": "job-c1-trainer-1",
            "namespace": "space",
            "uid": "u",
            "labels": labels,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"schedulerName": "default-scheduler"},
        "status": {"phase": "Pending"},
        **parts,
    }


def with_trainer(world: World, raw: dict[str, Any]) -> World:
    """The world's trainer pod is this one; all others are ready."""
    world.kuberay()
    world.kubelet()
    name = next(pod.name for pod in world.pods.values() if pod.group == "trainer")
    world.pods[name] = replace(pod_view(trimmed_pod(raw)), name=name, created=world.pods[name].created)
    return world


def test_a_scheduler_that_nobody_is_is_named_after_half_a_minute() -> None:
    world = with_trainer(starting(), pod(spec={"schedulerName": "my-scheduler"}))
    created = world.now
    decision = world.look()
    assert world.reason("ClusterReady") == "WaitingForPods"
    assert decision.requeue_after is not None
    assert decision.requeue_after <= SETTINGS.scheduler_seconds
    world.now = created + timedelta(seconds=SETTINGS.scheduler_seconds)
    decision = world.look()
    assert (world.value("ClusterReady"), world.reason("ClusterReady")) == ("False", "SchedulerMissing")
    assert "the scheduler my-scheduler has not handled the pod for 30 s" in message(world)
    assert ("Warning", "SchedulerMissing") in [(event.kind, event.reason) for event in decision.events]


@pytest.mark.parametrize(
    "raw",
    [
        pod(spec={"schedulerName": "my-scheduler", "nodeName": "node-1"}),
        pod(
            spec={"schedulerName": "my-scheduler"},
            status={"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]},
        ),
    ],
)
def test_a_pod_with_a_node_only_starts(raw: dict[str, Any]) -> None:
    world = with_trainer(starting(), raw)
    world.wait(600)
    world.look()
    assert world.reason("ClusterReady") == "WaitingForPods"


def test_scheduling_gates_are_named() -> None:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates",
    }
    gates = [{"name": "example.com/checked"}, {"name": "example.com/paid"}]
    raw = pod(spec={"schedulingGates": gates}, status={"phase": "Pending", "conditions": [condition]})
    world = with_trainer(starting(), raw)
    decision = world.look()
    assert world.reason("ClusterReady") == "SchedulingGated"
    assert "waits for its scheduling gates example.com/checked, example.com/paid" in message(world)
    assert ("Warning", "SchedulingGated") in [(event.kind, event.reason) for event in decision.events]


def test_a_gate_of_kueues_is_a_wait_for_quota() -> None:
    world = starting(queueName="team-a")
    with_trainer(
        world,
        pod(
            spec={"schedulingGates": [{"name": "kueue.x-k8s.io/elastic-job"}]},
            status={
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}],
            },
        ),
    )
    world.queue = replace(world.queue, known=True, message="waits for quota: insufficient unused quota")
    world.look()
    assert world.reason("ClusterReady") == "WaitingForQuota"
