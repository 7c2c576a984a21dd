"""An operator, a real API server, and the lives of jobs: once with the fake KubeRay, once with KubeRay itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.heads import Play
from kube.control_plane import ApiCallError
from world import SETTINGS, WITH_FAKE_AND_REAL_KUBERAY, World, job_document

pytestmark = [pytest.mark.timeout(1800), WITH_FAKE_AND_REAL_KUBERAY]

NEW_ENGINES = {"rollout": {"env": {"NCCL_DEBUG": "INFO"}}}


async def nothing_runs(world: World) -> bool:
    return not await world.clusters() and not await world.pods()


async def test_a_job_runs_to_its_end_and_frees_its_cluster(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("first"), Play(steps=3))
    job = await world.until_condition("first", "Succeeded", "True", "Completed")
    assert job["status"]["progress"]["step"] == 3
    assert [attempt["attempt"] for attempt in job["status"]["attempts"]] == [1]
    assert [driver.submission for driver in world.drivers("first")] == ["first-a1"]
    await world.until("no cluster and no pod is left", lambda: nothing_runs(world))
    conditions = {item["type"]: item for item in job["status"]["conditions"]}
    assert conditions["Running"]["reason"] == "Completed"
    assert conditions["Finished"]["status"] == "True"
    assert world.heads.refused == []


async def test_a_failed_driver_is_tried_again_on_the_same_cluster(world: World) -> None:
    world.start_operator()
    play = Play(steps=2, exits={1: 1}, logs="loading\nOSError: disk full\nsecret_token=abcdef\n")
    await world.apply(job_document("flaky"), play)
    job = await world.until_condition("flaky", "Succeeded", "True")
    first, second = job["status"]["attempts"]
    assert (first["attempt"], first["exitCode"], first["counted"]) == (1, 1, True)
    assert first["lastLines"] == ["loading", "OSError: disk full", "secret_token=***"]
    assert second["attempt"] == 2
    assert first["incarnation"] == second["incarnation"] == 1
    assert [driver.submission for driver in world.drivers("flaky")] == ["flaky-a1", "flaky-a2"]


async def test_a_job_that_keeps_failing_is_given_up(world: World) -> None:
    world.start_operator()
    play = Play(exits=dict.fromkeys(range(1, 10), 1))
    await world.apply(job_document("hopeless", retry={"limit": 2, "backoffSeconds": 0}), play)
    job = await world.until_condition("hopeless", "Failed", "True", "RetryLimitExceeded")
    assert len(job["status"]["attempts"]) == 3
    await world.until("the cluster is freed", lambda: nothing_runs(world))


async def test_a_bad_job_file_is_not_tried_again(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("wrong"), Play(exits={1: 64}))
    await world.until_condition("wrong", "Failed", "True", "BadJobFile")
    assert len(world.drivers("wrong")) == 1


async def test_suspend_saves_and_frees_and_resume_goes_on(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("sleepy"), Play(steps=None, checkpoints=True))
    await world.until_condition("sleepy", "Running", "True", "Training")
    await world.patch("sleepy", {"suspend": True})
    job = await world.until_condition("sleepy", "Suspended", "True")
    assert await nothing_runs(world)
    assert job["status"]["attempts"][-1]["reason"] == "Suspended"
    assert job["status"]["attempts"][-1]["counted"] is False
    assert world.drivers("sleepy")[0].desired[-1].suspend is True
    world.heads.plays["sleepy"].steps = 2
    await world.patch("sleepy", {"suspend": False})
    job = await world.until_condition("sleepy", "Succeeded", "True")
    assert [(item["attempt"], item["incarnation"]) for item in job["status"]["attempts"]] == [(1, 1), (2, 2)]


async def test_scaling_down_drains_exactly_the_pods_that_the_driver_names(world: World) -> None:
    world.start_operator()
    play = Play(steps=None, drains=False)
    await world.apply(job_document("elastic", rollout={"replicas": 4}), play)
    await world.until_condition("elastic", "Running", "True", "Training")
    await world.until("four engines", lambda: _count(world, 4))
    world.plane.kubectl("scale", "rljob/elastic", "--replicas=2", "-n", world.namespace)
    await world.until_condition("elastic", "Resizing", "True", "Draining")
    # As long as the driver hasn't handed anything back, no pod goes.
    before = await _names(world)
    assert len(before) == 4
    play.drains = True
    await world.until("two engines", lambda: _count(world, 2))
    driver = world.drivers("elastic")[0]
    assert driver.desired[-1].rollout_replicas == 2
    assert await _names(world) == before - driver.drained
    job = await world.until_condition("elastic", "Resizing", "False", "AtSize")
    assert job["status"]["pools"]["rollout"]["replicas"] == 2
    await world.until("the names of removed pods are forgotten", lambda: _forgotten(world))


async def test_scaling_up_adds_pods_to_a_running_job(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("growing", rollout={"replicas": 1}), Play(steps=None))
    await world.until_condition("growing", "Running", "True", "Training")
    world.plane.kubectl("scale", "rljob/growing", "--replicas=3", "-n", world.namespace)
    await world.until("three engines", lambda: _count(world, 3))
    assert len(world.drivers("growing")) == 1
    driver = world.drivers("growing")[0]
    await world.until("the driver knows", lambda: driver.desired and driver.desired[-1].rollout_replicas == 3)
    await world.until_condition("growing", "Resizing", "False", "AtSize")


async def test_pools_that_score_grow_and_shrink_beside_the_engines(world: World) -> None:
    world.start_operator()
    scored = {
        "functions": [
            {"type": "rewardModel", "rewardModel": {"source": "/models/scores"}},
            {"type": "judge", "judge": {"template": "{response}"}},
        ]
    }
    pools = {"rewardModel": {"replicas": 2}, "judge": {"model": {"source": "/models/judge"}}}
    play = Play(steps=None, drains=False)
    await world.apply(job_document("scored", reward=scored, **pools), play)
    job = await world.until_condition("scored", "Running", "True", "Training")
    await world.until("all pods", lambda: _counts(world, 2, 2, 1))
    job = await world.until_condition("scored", "ClusterReady", "True", "PoolsReady")
    assert job["status"]["pools"]["reward-model"]["summary"] == "2/2"
    _, row = world.plane.kubectl("get", "rlj", "scored", "-n", world.namespace, "-o", "wide").stdout.splitlines()
    assert row.split()[7:11] == ["2/2", "1/1", "2/2", "1/1"]
    await world.patch("scored", {"rewardModel": {"replicas": 3}, "rollout": {"replicas": 3}, "judge": {"replicas": 2}})
    await world.until("all have grown", lambda: _counts(world, 3, 3, 2))
    await world.until_condition("scored", "Resizing", "False", "AtSize")
    await world.patch("scored", {"rewardModel": {"replicas": 1}, "judge": {"replicas": 1}})
    await world.until_condition("scored", "Resizing", "True", "Draining")
    assert await _counts(world, 3, 3, 2)
    play.drains = True
    await world.until("three replicas have gone", lambda: _counts(world, 3, 1, 1))
    (driver,) = world.drivers("scored")
    wish = driver.desired[-1]
    assert (wish.reward_model_replicas, wish.judge_replicas, wish.rollout_replicas) == (1, 1, 3)
    job = await world.until_condition("scored", "Resizing", "False", "AtSize")
    assert [job["status"]["pools"][pool]["replicas"] for pool in ("reward-model", "judge")] == [1, 1]
    await world.until("what the driver says of them has been asked again", lambda: _ready(world, 1, 1))
    # What pods look like, and whether a pool is there at all, waits for a suspension; which model judges for ever.
    for change in ({"rewardModel": None}, {"rewardModel": {"gpusPerReplica": 1}}, {"judge": {"gpusPerReplica": 1}}):
        with pytest.raises(ApiCallError, match="only be changed while the job is suspended"):
            await world.patch("scored", change)
    with pytest.raises(ApiCallError, match="cannot be changed after creation"):
        await world.patch("scored", {"judge": {"model": {"source": "/models/other"}}})


async def _counts(world: World, engines: int, scorers: int, judges: int) -> bool:
    groups = [pod["metadata"]["labels"].get("ray.io/group") for pod in await world.pods()]
    return tuple(map(groups.count, ("rollout", "reward-model", "judge"))) == (engines, scorers, judges)


async def _ready(world: World, scorers: int, judges: int) -> bool:
    progress = (await world.job("scored"))["status"]["progress"]
    return (progress["scorersReady"], progress["judgesReady"]) == (scorers, judges)


async def test_a_lost_head_means_a_new_cluster_and_the_next_attempt(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("headless"), Play(steps=None))
    await world.until_condition("headless", "Running", "True", "Training")
    (head,) = [pod for pod in await world.pods() if pod["metadata"]["labels"]["ray.io/node-type"] == "head"]
    name = head["metadata"]["name"]
    await world.call("DELETE", f"/api/v1/namespaces/{world.namespace}/pods/{name}", {"gracePeriodSeconds": 0})
    await world.until("a second attempt", lambda: len(world.drivers("headless")) == 2)
    job = await world.until_condition("headless", "Running", "True", "Training")
    first, second = job["status"]["attempts"]
    assert (first["reason"], first["counted"], first["incarnation"]) == ("HeadLost", False, 1)
    assert (second["attempt"], second["incarnation"]) == (2, 2)
    assert [cluster["metadata"]["name"] for cluster in await world.clusters()] == ["headless-c2"]


async def test_a_lost_worker_is_named_and_training_goes_on(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("sturdy", rollout={"replicas": 3, "minReplicas": 1}), Play(steps=None))
    await world.until_condition("sturdy", "ClusterReady", "True", "PoolsReady")
    await world.until_condition("sturdy", "Running", "True", "Training")
    world.kubelet.becomes_ready = lambda _pod: {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/5 nodes have room"}
        ],
    }
    pod = (await world.pods("rollout"))[0]["metadata"]["name"]
    await world.call("DELETE", f"/api/v1/namespaces/{world.namespace}/pods/{pod}", {"gracePeriodSeconds": 0})
    job = await world.until_condition("sturdy", "ClusterReady", "True", "Unschedulable")
    message = next(c["message"] for c in job["status"]["conditions"] if c["type"] == "ClusterReady")
    assert message == "rollout: 1 of 3 pods waits: 0/5 nodes have room"
    assert len(world.drivers("sturdy")) == 1


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no gpus"}
                ],
            },
            "Unschedulable",
            "rollout: 2 of 2 pods wait: no gpus",
        ),
        (
            {
                "phase": "Pending",
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [
                    {
                        "name": "ray",
                        "image": "x",
                        "imageID": "",
                        "ready": False,
                        "restartCount": 0,
                        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}},
                    }
                ],
            },
            "ImageError",
            "ImagePullBackOff: no such tag",
        ),
    ],
)
async def test_pods_that_wait_are_explained(world: World, status: dict[str, object], reason: str, words: str) -> None:
    world.kubelet.becomes_ready = lambda _pod: status
    world.start_operator()
    await world.apply(job_document("waiting"))

    async def explained() -> bool:
        job = await world.until_condition("waiting", "ClusterReady", "False", reason)
        return words in next(c["message"] for c in job["status"]["conditions"] if c["type"] == "ClusterReady")

    await world.until(f"the status says: {words}", explained)
    assert world.drivers("waiting") == []


async def test_deleting_a_job_leaves_nothing(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("shortlived"), Play(steps=None))
    await world.until_condition("shortlived", "Running", "True")
    assert len(await world.owned_objects()) >= 5
    await world.delete("shortlived")

    async def nothing() -> bool:
        return not await world.owned_objects()

    await world.until("nothing is left", nothing)


async def test_a_finished_job_is_deleted_after_its_time(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("ephemeral", ttlSecondsAfterFinished=1), Play(steps=1))

    async def gone() -> bool:
        return not (await world.call("GET", world.path("").rstrip("/")))["items"]

    await world.until("the job is gone", gone)
    assert len(world.drivers("ephemeral")) == 1


async def test_leftover_actors_of_a_failed_attempt_cost_the_cluster(world: World) -> None:
    world.start_operator()
    play = Play(steps=2, exits={1: 1}, leftovers=3)
    await world.apply(job_document("undead"), play)
    await world.until("a second cluster", lambda: _incarnation(world, "undead", 2))
    play.leftovers = 0
    job = await world.until_condition("undead", "Succeeded", "True")
    assert [(item["attempt"], item["incarnation"]) for item in job["status"]["attempts"]] == [(1, 1), (2, 2)]


async def test_a_live_change_reaches_the_driver_and_costs_no_pod(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("followed"), Play(steps=None))
    await world.until_condition("followed", "Running", "True", "Training")
    before = [pod["metadata"]["uid"] for pod in await world.pods()]
    await world.patch("followed", {"deadlines": {"startSeconds": 1234}})
    generation = (await world.job("followed"))["metadata"]["generation"]
    await world.until(
        "the driver has seen the new generation", lambda: world.drivers("followed")[0].generation == generation
    )

    async def kept() -> bool:
        config = await world.call("GET", f"/api/v1/namespaces/{world.namespace}/configmaps/followed-job")
        return '"startSeconds": 1234' in config["data"]["job.json"]

    await world.until("the next attempt's job has it", kept)
    await world.until_condition("followed", "Accepted", "True", "Valid")
    assert [pod["metadata"]["uid"] for pod in await world.pods()] == before
    assert len(world.drivers("followed")) == 1


async def test_what_pods_cannot_follow_is_refused_while_they_run_and_changed_while_suspended(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("changing"), Play(steps=None))
    await world.until_condition("changing", "Running", "True", "Training")
    before = (await world.job("changing"))["spec"]
    with pytest.raises(ApiCallError) as refusal:
        await world.patch("changing", NEW_ENGINES)
    (cause,) = refusal.value.answer["details"]["causes"]
    assert cause["field"] == "spec.rollout.env"
    assert cause["message"].endswith("can only be changed while the job is suspended; set spec.suspend: true first")
    assert (await world.job("changing"))["spec"] == before

    await world.patch("changing", {"suspend": True})
    await world.until_condition("changing", "Suspended", "True")
    await world.patch("changing", NEW_ENGINES)
    await world.patch("changing", {"suspend": False})
    await world.until_condition("changing", "Running", "True", "Training")
    assert [cluster["metadata"]["name"] for cluster in await world.clusters()] == ["changing-c2"]
    assert await _are_new(world) == [True, True]


async def test_what_changed_before_the_pods_were_gone_is_said_to_need_another_suspension(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("hasty"), Play(steps=None))
    await world.until_condition("hasty", "Running", "True", "Training")
    # Suspended, changed and resumed while nobody looks: the pods stay.
    await world.stop_operator()
    for change in ({"suspend": True}, NEW_ENGINES, {"suspend": False}):
        await world.patch("hasty", change)
    world.start_operator()
    await world.until_condition("hasty", "Accepted", "True", "NeedsNewIncarnation")
    assert await _are_new(world) == [False, False]
    assert len(world.drivers("hasty")) == 1

    await world.patch("hasty", {"suspend": True})
    await world.until_condition("hasty", "Suspended", "True")
    await world.patch("hasty", {"suspend": False})
    await world.until_condition("hasty", "Running", "True", "Training")
    await world.until_condition("hasty", "Accepted", "True", "Valid")
    assert await _are_new(world) == [True, True]


async def _are_new(world: World) -> list[bool]:
    """Of each engine's pod, whether it has what `NEW_ENGINES` gives."""
    wanted = {"name": "NCCL_DEBUG", "value": "INFO"}
    return [wanted in pod["spec"]["containers"][0]["env"] for pod in await world.pods("rollout")]


async def _count(world: World, wanted: int) -> bool:
    return len(await world.pods("rollout")) == wanted


async def _names(world: World) -> set[str]:
    return {pod["metadata"]["name"] for pod in await world.pods("rollout")}


async def _forgotten(world: World) -> bool:
    (cluster,) = await world.clusters()
    return not (cluster["spec"]["workerGroupSpecs"][0].get("scaleStrategy") or {}).get("workersToDelete")


async def _incarnation(world: World, name: str, number: int) -> bool:
    return bool((await world.job(name)).get("status", {}).get("incarnation", 0) >= number)


async def test_progress_is_asked_for_more_often_than_it_is_written(world: World) -> None:
    """All jobs together may write this often; one alone then once in a thousand seconds."""
    world.start_operator(settings=replace(SETTINGS, progress_writes_per_second=0.001))
    await world.apply(job_document("busy"), Play(steps=None))
    await world.until("the driver was asked ten times", lambda: any(d.step > 10 for d in world.drivers("busy")))
    job = await world.job("busy")
    assert job["status"]["progress"]["step"] < 10
    # What is more than progress is written at once, and with it what is known of that.
    await world.patch("busy", {"rollout": {"replicas": 3}})
    job = await world.until_condition("busy", "Resizing", "True")
    assert job["status"]["progress"]["step"] > 10
