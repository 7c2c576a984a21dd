"""What `kubectl get` prints of a job: how it is going, on one line."""

from __future__ import annotations

import pytest
from fakes.heads import Play
from world import World, job_document

pytestmark = pytest.mark.timeout(400)


async def test_kubectl_get_says_how_a_job_is_going(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("shown", rollout={"replicas": 3}), Play(steps=None))

    async def is_trained() -> bool:
        return "progress" in (await world.job("shown")).get("status", {})

    await world.until("a step is done", is_trained)
    await world.until_condition("shown", "ClusterReady", "True", "PoolsReady")
    header, row = world.plane.kubectl("get", "rlj", "shown", "-n", world.namespace).stdout.splitlines()
    titles = "NAME STATUS STEP REWARD ROLLOUT TRAINER OLDEST-AGE CHECKPOINT AGE"
    assert " ".join(header.split()) == titles
    name, status, step, reward, *rest = row.split()
    assert (name, status) == ("shown", "Training")
    assert float(reward) == int(step) / 4
    assert rest[:-1] == ["3/3", "1/1", "1", "NoStorage"]


async def test_a_line_is_at_most_120_columns_wide(world: World) -> None:
    world.start_operator()
    name = "sixteen-to-sixteen-dapo-7b"
    await world.apply(job_document(name, checkpoint={"uri": "pvc://state/runs"}), Play(steps=None))
    await world.until_condition(name, "Accepted", "False", "VolumeMissing")
    status = {
        "observedGeneration": 1,
        "attempt": 12,
        "progress": {"step": 123456, "reward": -0.0001234, "oldestAge": 64},
        "pools": {name: {"desired": 128, "ready": 127, "summary": "127/128"} for name in ("rollout", "trainer")},
        "conditions": [
            {
                "type": kind,
                "status": "True",
                "reason": reason,
                "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for kind, reason in (("Running", "QuotaTakenBack"), ("CheckpointAvailable", "Committed"))
        ],
    }
    await world.stop_operator()
    await world.call("PATCH", world.path(name, "/status"), {"status": status}, "application/merge-patch+json")
    for line in world.plane.kubectl("get", "rlj", name, "-n", world.namespace).stdout.splitlines():
        assert len(line.rstrip()) <= 120, line


async def test_a_checkpoint_that_cannot_be_written_reaches_the_user(world: World) -> None:
    world.start_operator()
    play = Play(steps=None, unsaved="no space left on device: 3.1 GB are missing")
    await world.apply(job_document("full", checkpoint={"uri": "s3://bucket/runs"}), play)
    job = await world.until_condition("full", "CheckpointAvailable", "False", "NotSaved")
    (said,) = [item for item in job["status"]["conditions"] if item["type"] == "CheckpointAvailable"]
    assert "no space left on device: 3.1 GB are missing" in said["message"]

    async def is_told() -> bool:
        events = (await world.call("GET", f"/api/v1/namespaces/{world.namespace}/events"))["items"]
        return any((item["reason"], item["type"]) == ("NotSaved", "Warning") for item in events)

    await world.until("a warning", is_told)
    line = world.plane.kubectl("get", "rlj", "full", "-n", world.namespace).stdout.splitlines()[1]
    assert "NotSaved" in line.split()
    # There is room again.
    play.unsaved, play.checkpoints = "", True
    await world.until_condition("full", "CheckpointAvailable", "True", "Committed")
