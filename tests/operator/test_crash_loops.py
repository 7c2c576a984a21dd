"""Pods that crash before the driver starts: once is nothing, and those that keep crashing end the attempt."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from simulation import SETTINGS, START, World, job_spec

from rljob_operator import actions as do
from rljob_operator.names import FIRST_CRASH_ANNOTATION
from rljob_operator.views import cluster_view, pod_view

KILLED = "OOMKilled, exit code 137"
EVERY_SECONDS = 2
"""KubeRay's: from a crash to the next pod."""


def starting(**sections: object) -> World:
    """A world whose first cluster is there, and its pods are not ready yet."""
    world = World(spec=job_spec(**sections))
    world.look()
    world.kuberay()
    return world


def message(world: World, kind: str) -> str:
    return world.status.by_type[kind].message


def crash(world: World, *groups: str, **what: Any) -> None:
    """The pods of these groups crash, and all others are ready."""
    for name in [pod.name for pod in world.pods.values() if pod.group in groups and not pod.ended]:
        world.lose_pod(name, **{"message": KILLED, **what})
        world.pods[name] = replace(world.pods[name], container="ray")
    world.kubelet()


def keep_crashing(world: World, *groups: str, seconds: float, every: float = EVERY_SECONDS, **what: Any) -> None:
    """That goes on for a while: everybody does their part."""
    until = world.now + timedelta(seconds=seconds)
    while world.now < until:
        crash(world, *groups, **what)
        world.look()
        world.kuberay()
        world.look()
        world.wait(every)


@pytest.mark.parametrize("group", ["head", "rollout", "trainer"])
def test_pods_that_keep_crashing_use_up_the_retries_and_the_job_says_which(group: str) -> None:
    world = starting(retry={"limit": 2, "backoffSeconds": 10})
    keep_crashing(world, group, seconds=600)
    assert world.reason("Failed") == "RetryLimitExceeded"
    assert f"-{group}-" in message(world, "Failed")
    assert f": container ray: {KILLED}" in message(world, "Failed")
    assert "3 failures since the last checkpoint, spec.retry.limit is 2" in message(world, "Failed")
    attempts = [(item.number, item.incarnation, item.reason, item.counted) for item in world.status.attempts]
    assert attempts == [(1, 1, "PodError", True), (2, 2, "PodError", True), (3, 3, "PodError", True)]
    assert (world.clusters, world.pods, world.submissions) == ({}, {}, [])


def test_a_start_fails_a_minute_after_its_first_crash_and_not_before() -> None:
    world = starting()
    keep_crashing(world, "head", seconds=SETTINGS.crash_loop_seconds)
    assert (world.status.attempts, list(world.clusters)) == ((), ["job-c1"])
    keep_crashing(world, "head", seconds=2 * EVERY_SECONDS)
    (attempt,) = world.status.attempts
    assert (attempt.started, attempt.ended) == (START, START + timedelta(seconds=62))
    assert attempt.message.startswith("pods have been crashing for 62 s and the driver cannot start: job-c1-head-")
    assert world.clusters == {}


def test_while_the_retry_pauses_there_are_no_pods_and_the_pause_doubles() -> None:
    world = starting(retry={"limit": 3, "backoffSeconds": 100, "maxBackoffSeconds": 600})
    pauses = []
    for number in (1, 2, 3):
        while len(world.status.attempts) < number:
            keep_crashing(world, "trainer", seconds=EVERY_SECONDS)
        failed = world.now
        assert world.reason("Running") == "BackingOff"
        assert KILLED in message(world, "Running")
        assert f"attempt {number + 1} starts in {100 * 2 ** (number - 1)} s" in message(world, "Running")
        world.settle(3, seconds=1)
        assert (world.clusters, world.pods) == ({}, {})
        assert (world.reason("Running"), world.reason("ClusterReady")) == ("BackingOff", "PodError")
        assert world.look().status is None
        while not world.clusters:
            world.wait(1)
            world.look()
        pauses.append((world.now - failed).total_seconds())
        assert world.reason("ClusterReady") == "CreatingCluster"
        world.kuberay()
    assert pauses == pytest.approx([100, 200, 400], abs=3)
    world.settle(8)
    assert (world.reason("Running"), world.submissions) == ("Training", [4])


@pytest.mark.slow(stands_for="[0]")
@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_an_operator_that_is_killed_again_and_again_counts_each_start_once(writes: int) -> None:
    world = starting(retry={"limit": 1, "backoffSeconds": 0})
    kills = itertools.cycle([writes, None, 0])
    for _ in range(400):
        crash(world, "head")
        world.look(next(kills))
        world.kuberay()
        world.look(next(kills))
        world.wait(EVERY_SECONDS)
    assert world.reason("Failed") == "RetryLimitExceeded"
    assert [(item.number, item.incarnation) for item in world.status.attempts] == [(1, 1), (2, 2)]
    assert world.status.failures == 2
    assert (world.clusters, world.pods) == ({}, {})


def test_a_single_crash_is_healed_and_forgotten() -> None:
    world = starting(retry={"limit": 0})
    keep_crashing(world, "trainer", seconds=EVERY_SECONDS)
    (cluster,) = world.clusters.values()
    assert cluster.first_crash == START
    world.settle(8)
    assert (world.reason("Running"), world.submissions, world.status.failures) == ("Training", [1], 0)


def test_pods_of_one_start_that_crash_once_each_are_no_loop() -> None:
    world = starting(retry={"limit": 0})
    crash(world, "rollout")
    world.look()
    # Made together with the engines' pods, but its image took long.
    world.wait(300)
    crash(world, "trainer")
    world.look()
    world.kuberay()
    world.settle(8)
    assert (world.reason("Running"), world.status.failures) == ("Training", 0)


def test_workers_that_crash_as_long_as_their_head_is_not_there_do_not_count() -> None:
    world = starting(retry={"limit": 0})
    for _ in range(200):
        for name in [pod.name for pod in world.pods.values() if pod.group != "head"]:
            world.lose_pod(name, message="Error, exit code 1")
        world.look()
        world.kuberay()
        world.wait(EVERY_SECONDS)
    (cluster,) = world.clusters.values()
    assert (cluster.first_crash, world.status.attempts) == (None, ())
    world.settle(8)
    assert (world.reason("Running"), world.submissions) == ("Training", [1])


@pytest.mark.parametrize("what", ["image", "config", "taken"])
def test_what_is_no_crash_waits_for_the_start_deadline(what: str) -> None:
    world = starting(retry={"limit": 0}, deadlines={"startSeconds": 600, "progressSeconds": 600})
    for _ in range(290):
        world.kubelet()
        for name, pod in world.pods.items():
            waits = replace(pod, ready=False)
            if pod.group == "trainer" and what == "image":
                world.pods[name] = replace(waits, trouble="image", message="ImagePullBackOff: no such image")
            elif pod.group == "trainer" and what == "config":
                world.pods[name] = replace(waits, trouble="crash", message="CreateContainerConfigError: no secret")
            elif pod.group == "trainer":
                world.pods[name] = replace(waits, ended=True, trouble="crash", message="Evicted", disrupted=True)
        world.look()
        world.kuberay()
        world.wait(EVERY_SECONDS)
    (cluster,) = world.clusters.values()
    assert (cluster.first_crash, world.status.attempts, world.value("Failed")) == (None, (), "False")


def test_a_driver_that_runs_goes_on_without_a_pod_that_keeps_crashing() -> None:
    world = World(spec=job_spec(rollout={"replicas": 2, "minReplicas": 1}, retry={"limit": 0}))
    world.settle(8)
    assert world.reason("Running") == "Training"
    keep_crashing(world, "rollout", seconds=600)
    (cluster,) = world.clusters.values()
    assert (cluster.first_crash, cluster.incarnation) == (None, 1)
    assert (world.reason("Running"), world.submissions, world.status.failures) == ("Training", [1], 0)


def test_pods_that_an_attempt_can_do_without_are_not_waited_for() -> None:
    world = starting(rollout={"replicas": 2, "minReplicas": 1}, retry={"limit": 0})
    for _ in range(60):
        world.kubelet()
        engine = max(name for name, pod in world.pods.items() if pod.group == "rollout")
        world.lose_pod(engine, message=KILLED)
        world.look()
        world.kuberay()
        world.wait(EVERY_SECONDS)
    assert (world.reason("Running"), world.submissions, world.status.failures) == ("Training", [1], 0)


def test_while_a_retry_pauses_pods_that_it_can_do_without_may_crash() -> None:
    world = World(spec=job_spec(rollout={"replicas": 2, "minReplicas": 1}, retry={"limit": 1, "backoffSeconds": 200}))
    world.settle(8)
    world.end(world.running()[0], "failed", 1)
    for _ in range(60):
        world.kubelet()
        world.lose_pod(max(name for name, pod in world.pods.items() if pod.group == "rollout"), message=KILLED)
        world.look()
        world.kuberay()
        world.wait(EVERY_SECONDS)
    assert (world.reason("Running"), world.status.incarnation) == ("BackingOff", 1)
    world.settle(30)
    assert (world.reason("Running"), world.submissions, world.status.failures) == ("Training", [1, 2], 1)


def test_pods_that_keep_crashing_between_two_attempts_end_the_second() -> None:
    world = World(spec=job_spec(retry={"limit": 1, "backoffSeconds": 5}))
    world.settle(8)
    # There was a first step: the deadline for the start would not end this.
    assert world.status.progress is not None
    assert world.status.progress.step > 0
    world.end(world.running()[0], "failed", 1)
    keep_crashing(world, "trainer", seconds=120)
    assert world.reason("Failed") == "RetryLimitExceeded"
    attempts = [(item.number, item.incarnation, item.reason) for item in world.status.attempts]
    assert attempts == [(1, 1, "DriverFailed"), (2, 1, "PodError")]


def test_a_crash_before_the_last_attempt_says_nothing_about_the_next_start() -> None:
    world = starting(retry={"limit": 1, "backoffSeconds": 10})
    keep_crashing(world, "trainer", seconds=EVERY_SECONDS)
    world.settle(8)
    world.wait(SETTINGS.crash_loop_seconds)
    # Somebody deletes the trainer's pod, so that there is one that was made long after the crash.
    world._end_pod(next(name for name, pod in world.pods.items() if pod.group == "trainer"))
    world.settle(2)
    world.end(world.running()[0], "failed", 1)
    world.look()
    keep_crashing(world, "trainer", seconds=EVERY_SECONDS)
    world.settle(8)
    assert (world.reason("Running"), world.submissions, world.status.failures) == ("Training", [1, 2], 1)


def test_crashes_far_apart_are_no_loop() -> None:
    world = starting(retry={"limit": 0}, deadlines={"startSeconds": 100_000, "progressSeconds": 100_000})
    keep_crashing(world, "trainer", seconds=20_000, every=SETTINGS.crash_memory_seconds + 1)
    assert (world.status.attempts, list(world.clusters)) == ((), ["job-c1"])


def test_slow_crashes_are_a_loop_at_the_third() -> None:
    world = starting(retry={"limit": 0})
    keep_crashing(world, "head", seconds=2 * 300, every=300)
    assert world.status.attempts == ()
    keep_crashing(world, "head", seconds=1)
    assert world.reason("Failed") == "RetryLimitExceeded"


def test_a_clock_that_was_an_hour_ahead_is_not_believed() -> None:
    world = starting(retry={"limit": 0})
    world.wait(3600)
    crash(world, "head")
    world.look()
    world.wait(-3600)
    world.kuberay()
    keep_crashing(world, "head", seconds=SETTINGS.crash_loop_seconds + 3 * EVERY_SECONDS)
    assert world.reason("Failed") == "RetryLimitExceeded"


def test_an_attempt_that_only_the_status_knows_of_fails_as_any_other() -> None:
    world = starting(retry={"limit": 0})
    world.kubelet()
    # Opened in the status, and the operator was killed before the cluster knew.
    world.look(1)
    assert [item.number for item in world.status.attempts] == [1]
    keep_crashing(world, "head", seconds=2 * SETTINGS.crash_loop_seconds)
    (attempt,) = world.status.attempts
    assert (attempt.reason, attempt.counted) == ("PodError", True)
    assert (world.reason("Failed"), world.submissions) == ("RetryLimitExceeded", [])


def test_a_job_may_be_suspended_and_mended_while_its_retry_pauses() -> None:
    world = starting(retry={"limit": 1, "backoffSeconds": 100})
    keep_crashing(world, "head", seconds=70)
    assert world.reason("Running") == "BackingOff"
    world.edit(suspend=True)
    world.settle(3)
    assert world.value("Suspended") == "True"
    world.edit(suspend=False, image="example.com/mended:1")
    world.settle(30)
    assert (world.reason("Running"), world.submissions, list(world.clusters)) == ("Training", [2], ["job-c2"])


def test_of_a_head_and_the_workers_that_crash_with_it_the_head_is_named() -> None:
    world = starting(retry={"limit": 0})
    keep_crashing(world, "head", "rollout", "trainer", seconds=90)
    assert "the driver cannot start: job-c1-head-" in message(world, "Failed")
    assert message(world, "Failed").count(KILLED) == 1


def test_what_is_noted_on_the_cluster_is_read_again() -> None:
    patch = do.cluster_patch(do.NoteFirstCrash("job-c1", 3, START))
    test, add = patch
    assert (test["op"], test["path"], test["value"]) == ("test", "/metadata/annotations/rljob.dev~1attempt", "3")
    assert (add["op"], add["path"]) == ("add", "/metadata/annotations/rljob.dev~1first-crash")
    view = cluster_view({"metadata": {"annotations": {FIRST_CRASH_ANNOTATION: add["value"]}}})
    assert view.first_crash == START
    assert cluster_view({"metadata": {"annotations": {FIRST_CRASH_ANNOTATION: "soon"}}}).first_crash is None


def test_ray_that_crashed_beside_a_living_sidecar_counts() -> None:
    def raw(crashed: str, alive: str) -> dict[str, Any]:
        statuses = [
            {"name": crashed, "state": {"terminated": {"reason": "Error", "exitCode": 3}}},
            {"name": alive, "state": {"running": {}}},
        ]
        labels = {"ray.io/cluster": "job-c1", "ray.io/group": "trainer"}
        return {
            "metadata": {"name": "p", "labels": labels},
            "status": {"phase": "Running", "containerStatuses": statuses},
        }

    noted = {}
    for crashed, alive in (("ray", "sidecar"), ("sidecar", "ray")):
        world = starting()
        world.kubelet()
        victim = next(name for name, pod in world.pods.items() if pod.group == "trainer")
        world.pods[victim] = pod_view(raw(crashed, alive))
        noted[crashed] = any(isinstance(action, do.NoteFirstCrash) for action in world.look().actions)
    assert noted == {"ray": True, "sidecar": False}
