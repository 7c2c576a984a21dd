"""`restore.from` is a place that the new job's pods can read. The operator knows nothing of the job that wrote it."""

from __future__ import annotations

import json

import pytest
from fakes.heads import Play
from test_volumes import create
from world import Object, World, job_document

pytestmark = pytest.mark.timeout(400)
STATE = "pvc://state/runs"


def heir(folder: str) -> Object:
    return job_document("heir", restore={"from": folder}, checkpoint={"uri": "pvc://own/runs"})


def said(job: Object, kind: str) -> Object:
    (found,) = [item for item in job["status"]["conditions"] if item["type"] == kind]
    return dict(found)


async def test_a_job_goes_on_from_what_a_deleted_one_left(world: World) -> None:
    world.start_operator()
    for name in ("state", "own"):
        await create(world, name, "ReadWriteMany")
    await world.apply(job_document("ancestor", checkpoint={"uri": STATE}), Play(steps=3, checkpoints=True))
    ancestor = await world.until_condition("ancestor", "CheckpointAvailable", "True")
    await world.until_condition("ancestor", "Succeeded", "True")
    await world.delete("ancestor")
    folder = f"{STATE}/{world.namespace}/ancestor-{ancestor['metadata']['uid']}"
    play = Play(steps=None)
    await world.apply(heir(folder), play)
    job = await world.until_condition("heir", "Running", "True", "Training")

    # It travels in the job file alone: neither command line nor environment of the driver speak of it.
    config = await world.call("GET", f"/api/v1/namespaces/{world.namespace}/configmaps/heir-job")
    assert json.loads(config["data"]["job.json"])["spec"]["restore"] == {"from": folder}
    (driver,) = world.drivers("heir")
    assert "state" not in driver.entrypoint + json.dumps(driver.environment)

    # Every pod can read it, and none can write to it.
    pods = [pod for pod in await world.pods() if pod["metadata"]["labels"]["rljob.dev/job"] == "heir"]
    assert sorted(pod["metadata"]["labels"]["ray.io/group"] for pod in pods) == [
        "headgroup",
        "rollout",
        "rollout",
        "trainer",
    ]
    for pod in pods:
        claims = {v["name"]: v["persistentVolumeClaim"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v}
        (container,) = pod["spec"]["containers"]
        mounts = {
            claims[mount["name"]]["claimName"]: (mount["mountPath"], mount.get("readOnly", False))
            for mount in container["volumeMounts"]
            if mount["name"] in claims
        }
        assert mounts == {"state": ("/mnt/rljob/state", True), "own": ("/mnt/rljob/own", False)}
        assert {claim["claimName"]: claim.get("readOnly", False) for claim in claims.values()} == {
            "state": True,
            "own": False,
        }

    # The other's checkpoint isn't the job's own: it has a first attempt, and nothing of its own to go on from yet.
    assert [attempt["attempt"] for attempt in job["status"]["attempts"]] == [1]
    assert "checkpoint" not in job["status"]
    assert (said(job, "CheckpointAvailable")["status"], said(job, "CheckpointAvailable")["reason"]) == (
        "False",
        "NoneYet",
    )
    play.checkpoints, play.steps = True, 1
    job = await world.until_condition("heir", "Succeeded", "True")
    assert said(job, "CheckpointAvailable")["status"] == "True"


async def test_one_claim_for_both_is_written_to(world: World) -> None:
    world.start_operator()
    await create(world, "state", "ReadWriteMany")
    await world.apply(job_document("heir", restore={"from": f"{STATE}/a"}, checkpoint={"uri": STATE}), Play(steps=None))
    await world.until_condition("heir", "Running", "True", "Training")
    for pod in await world.pods():
        (claim,) = [v for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v]
        assert claim["persistentVolumeClaim"] == {"claimName": "state"}


async def test_without_the_claim_there_are_no_pods_until_it_is_there(world: World) -> None:
    world.start_operator()
    await create(world, "own", "ReadWriteMany")
    await world.apply(heir(STATE), Play(steps=1))

    async def missing() -> bool:
        """Of the claim that is there the operator may hear later than of the job."""
        job = await world.until_condition("heir", "Accepted", "False", "VolumeMissing")
        return bool(said(job, "Running")["message"] == "spec.restore.from: PersistentVolumeClaim state does not exist")

    await world.until("only the claim to start from is missing", missing)
    assert (await world.clusters(), await world.pods(), world.drivers("heir")) == ([], [], [])
    # It is only read: a claim that many may read will do.
    await create(world, "state", "ReadOnlyMany")
    await world.until_condition("heir", "Succeeded", "True")


async def test_a_folder_that_is_not_there_ends_the_job_at_once_in_the_drivers_words(world: World) -> None:
    """Only the driver can look into the volume; it ends with 64."""
    world.start_operator()
    for name in ("state", "own"):
        await create(world, name, "ReadWriteMany")
    await world.apply(heir(f"{STATE}/nobody"), Play(exits={1: 64}))
    job = await world.until_condition("heir", "Failed", "True", "BadJobFile")
    assert said(job, "Failed")["message"].startswith("exit code 64 as the test wants; its log ends: ")
    assert [(attempt["attempt"], attempt["exitCode"]) for attempt in job["status"]["attempts"]] == [(1, 64)]
    assert len(world.drivers("heir")) == 1
    (told,) = await world.until("it is told", lambda: events_of(world, "BadJobFile"))
    assert told["type"] == "Warning"


async def events_of(world: World, reason: str) -> list[Object]:
    return [item for item in await world.events("heir") if item["reason"] == reason]


async def test_where_a_job_starts_from_cannot_be_changed(world: World) -> None:
    await world.apply(heir(STATE))
    for spec in ({"restore": {"from": "pvc://own/runs"}}, {"restore": None}):
        done = world.plane.kubectl(
            "patch",
            "rlj",
            "heir",
            f"--namespace={world.namespace}",
            "--type=merge",
            f"--patch={json.dumps({'spec': spec})}",
            check=False,
        )
        assert done.returncode == 1
        assert "create a new job (restore.from continues from this one's checkpoint)" in done.stderr
