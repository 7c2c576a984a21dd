"""Running jobs are resized, suspended and lose their trainer: training goes on as if nothing had happened."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from ledger import assert_every_prompt_once
from resumes import assert_resumed
from undisturbed import FOREVER, assert_undisturbed, endless
from world import COMPLETED, ON_THE_WAY, TRAINING, World, story

pytestmark = pytest.mark.timeout(1500)
RESULTS_OF_A_STEP = ("reward/mean", "actor/grad_norm", "response/length/mean")
"""Numbers of a step that depend on every token and every weight before it, and on no clock."""
PACED = """import time

def paced(response: str, answer: str) -> float:
    time.sleep(0.004)
    return sum(map(str.__eq__, response, answer)) / len(answer)
"""
"""Two workers take a second for a step's 512 samples, so that a job of 40 steps is still at work when a busy machine
comes to disturb it."""
HAS_LEFT = re.compile(r"engine \S+ on (\S+) has left")
"""How the driver says that an engine has handed back what it had begun."""


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def started(pods: Iterable[dict[str, Any]]) -> set[tuple[str, str]]:
    """Pods, and when the containers that run in them began."""
    return {
        (pod["metadata"]["uid"], container["state"]["running"]["startedAt"])
        for pod in pods
        for container in pod["status"]["containerStatuses"]
    }


@pytest.mark.smoke
def test_rollout_replicas_grow_and_shrink_while_training_goes_on(world: World) -> None:
    world.apply(endless(world, "scaled"))
    world.until_condition("scaled", "Running", "True", "Training")
    world.until_step("scaled", 3)
    before = world.pods("scaled")
    first = names(world.pods("scaled", "rollout"))

    world.kubectl("scale", "rlj/scaled", "--replicas=3")
    world.until_condition("scaled", "Resizing", "True")
    world.until("three engines generate", lambda: engines(world, "scaled") == 3)
    world.until_step("scaled", world.step("scaled") + 5)
    grown = names(world.pods("scaled", "rollout"))
    assert len(grown) == 3
    assert grown > first

    with world.watching("rayclusters") as seen:
        world.kubectl("scale", "rlj/scaled", "--replicas=1")
        world.until("one pod is left", lambda: len(world.pods("scaled", "rollout")) == 1)
        world.until_condition("scaled", "Resizing", "False", "AtSize")
        world.until_step("scaled", world.step("scaled") + 5)
    # Exactly the pods that had been drained, and were named for it, are gone; nothing was lost or started anew.
    (left,) = names(world.pods("scaled", "rollout"))
    named = {pod for cluster in seen for pod in removed_by_name(cluster)}
    assert named == grown - {left}
    assert set(HAS_LEFT.findall(world.driver_log("scaled", attempt=1))) == named
    assert started(world.pods("scaled")) == started(pod for pod in before if pod["metadata"]["name"] not in named)
    assert world.get("rlj", "scaled")["status"]["pools"]["rollout"]["desired"] == 1

    assert_undisturbed(world, "scaled")
    # An engine that is drained hands its samples back; the driver calls one lost that goes without.
    assert "is lost" not in world.driver_log("scaled", attempt=1)


def removed_by_name(cluster: dict[str, Any]) -> list[str]:
    """The pods that a RayCluster's spec names as those to go."""
    found: list[str] = []
    for group in cluster["spec"]["workerGroupSpecs"]:
        found += (group.get("scaleStrategy") or {}).get("workersToDelete") or []
    return found


def engines(world: World, job: str) -> int:
    """How many engines generate, as the driver reports."""
    return int(world.get("rlj", job)["status"]["progress"].get("enginesReady", 0))


@pytest.mark.smoke
def test_a_job_that_was_suspended_and_lost_its_trainer_ends_as_one_that_was_left_alone(world: World) -> None:
    steps = 40
    common: dict[str, Any] = {
        "stop": {"steps": steps},
        "validation": {"every": FOREVER, "atStart": False},
        "retry": {"backoffSeconds": 1},
        "code": [{"configMap": "paced"}],
        "reward": {"functions": [{"type": "custom", "function": "paced:paced"}], "workers": 2},
    }
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "paced"}, "data": {"paced.py": PACED}}
    world.apply(code, world.job_document("disturbed", **common))
    world.until_condition("disturbed", "Running", "True", "Training")
    world.until_step("disturbed", 3)
    reached = world.suspend("disturbed")["status"]["checkpoint"]["step"]
    assert (world.pods("disturbed"), world.list("rayclusters")) == ([], [])
    assert 3 <= reached < steps, "the job ended before it was suspended"
    saved = world.in_results("ls", f"{world.state_folder('disturbed')}/checkpoints").split()
    assert saved[-1] == f"step-{reached:08}"

    with world.watching("rlj") as seen:
        world.kubectl("patch", "rlj", "disturbed", "--type=merge", "--patch", '{"spec": {"suspend": false}}')
        # The same job, left alone, in the meantime.
        world.apply(world.job_document("straight", **common))
        world.until_condition("straight", "ClusterReady", "True")
        assert_pods_are_for_their_job_alone(world, "straight")
        world.until_step("disturbed", reached + 1)
        (trainer,) = world.pods("disturbed", "trainer")
        world.kubectl("delete", "pod", trainer["metadata"]["name"], "--grace-period=0", "--force")
        straight, disturbed = world.until_finished("straight"), world.until_finished("disturbed")
    assert_one_attempt_left_its_results(world, straight, steps)
    # Weights are lost with the trainer: the next attempt goes on from the last checkpoint, on the same cluster.
    assert [attempt["reason"] for attempt in disturbed["status"]["attempts"]] == [
        "Suspended",
        "DriverFailed",
        "Completed",
    ]
    assert disturbed["status"]["incarnation"] == straight["status"]["incarnation"] + 1
    told = story(seen, "disturbed", "Running", without=ON_THE_WAY)
    assert told == [("False", "Suspended"), TRAINING, ("False", "BackingOff"), TRAINING, COMPLETED]
    assert_resumed(world, "disturbed", assert_every_prompt_once(world, "disturbed", steps))

    ours, theirs = world.metrics("disturbed"), world.metrics("straight")
    assert [line["step"] for line in ours] == list(range(1, steps + 1))
    for one, other in zip(ours, theirs, strict=True):
        assert {name: one[name] for name in RESULTS_OF_A_STEP} == {name: other[name] for name in RESULTS_OF_A_STEP}
    # The final state is the same to the bit: weights and optimizers.
    assert checksums(world, "disturbed", steps) == checksums(world, "straight", steps)

    # A time to live may be set at any time. What the job has written outlives it.
    folder = world.state_folder("straight")
    world.kubectl("patch", "rlj", "straight", "--type=merge", "--patch", '{"spec": {"ttlSecondsAfterFinished": 1}}')
    world.until("the job is gone", lambda: "straight" not in names(world.list("rlj")), seconds=60)
    assert "report.html" in world.in_results("ls", folder).split()


def assert_pods_are_for_their_job_alone(world: World, job: str) -> None:
    """There is one pod of each role, and a policy that keeps others away: Ray runs whatever it is sent."""
    roles = {role: world.pods(job, role) for role in ("head", "rollout", "trainer")}
    assert {role: len(pods) for role, pods in roles.items()} == {"head": 1, "rollout": 1, "trainer": 1}
    policy = world.get("networkpolicy", f"{job}-pods")["spec"]
    assert (policy["podSelector"], policy["policyTypes"]) == ({"matchLabels": {"rljob.dev/job": job}}, ["Ingress"])


def assert_one_attempt_left_its_results(world: World, job: dict[str, Any], steps: int) -> None:
    """The job was done in its first attempt; the cluster is given back, and the results stay."""
    name, status = job["metadata"]["name"], job["status"]
    assert [attempt["reason"] for attempt in status["attempts"]] == ["Completed"]
    assert (status["progress"]["step"], status["checkpoint"]["step"]) == (steps, steps)
    ours = f"rljob.dev/job={name}"
    world.until("the RayCluster is gone", lambda: not world.list("rayclusters", ours), seconds=30)
    files = world.in_results("ls", "-R", world.state_folder(name))
    assert {"report.html", "summary.json", "metrics.jsonl", "checkpoints:"} <= {
        path.rpartition("/")[2] for path in files.split()
    }
    assert json.loads(world.in_results("cat", f"{world.state_folder(name)}/summary.json"))["steps"] == steps
    assert_every_prompt_once(world, name, steps)
    # What the docs show.
    header, row = world.kubectl("get", "rlj", name).splitlines()
    assert header.split()[:3] == ["NAME", "STATUS", "STEP"]
    assert row.split()[:3] == [name, "Completed", str(steps)]


def checksums(world: World, job: str, step: int) -> str:
    """Of the files that hold weights and optimizers in a checkpoint, by name."""
    folder = f"{world.state_folder(job)}/checkpoints/step-{step:08}/learner"
    sums = world.in_results("bash", "-c", f"cd {folder} && sha256sum *.distcp")
    assert sums
    return sums
