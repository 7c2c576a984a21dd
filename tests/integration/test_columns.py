"""What `kubectl get` prints of a job: how it is going, on one line."""

from __future__ import annotations

import pytest
from fakes.heads import Play
from world import World, job_document

from rljob_api.spec.job import MAX_NAME
from rljob_operator.conditions import Reason

pytestmark = pytest.mark.timeout(400)


async def test_kubectl_get_says_how_a_job_is_going(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("shown", rollout={"replicas": 3}), Play(steps=None))

    async def is_trained() -> bool:
        return "progress" in (await world.job("shown")).get("status", {})

    await world.until("a step is done", is_trained)
    await world.until_condition("shown", "ClusterReady", "True", "PoolsReady")
    header, row = world.plane.kubectl("get", "rlj", "shown", "-n", world.namespace).stdout.splitlines()
    titles = "NAME STATUS STEP REWARD READY CHECKPOINT AGE"
    assert " ".join(header.split()) == titles
    name, status, step, reward, *rest = row.split()
    assert (name, status) == ("shown", "Training")
    assert float(reward) == int(step) / 4
    assert rest[:-1] == ["4/4", "NoStorage"]
    header, row = world.plane.kubectl("get", "rlj", "shown", "-n", world.namespace, "-o", "wide").stdout.splitlines()
    pools = ["ROLLOUT", "TRAINER", "REWARD-MODELS", "JUDGES"]
    assert header.split()[7:] == [*pools, "OLDEST-AGE", "ATTEMPT", "ALGORITHM", "WAITING-FOR"]
    assert row.split()[7:11] == ["3/3", "1/1", "1", "1"]


async def test_a_line_is_at_most_120_columns_wide(world: World) -> None:
    world.start_operator()
    name = "sixteen-to-sixteen-fully-async-dapo-7b-x"
    assert len(name) == MAX_NAME
    running = max((reason.title for reason in Reason), key=len)
    checkpoint = max(
        (Reason.COMMITTED, Reason.NOT_SAVED, Reason.NONE_YET, Reason.NO_STORAGE), key=lambda r: len(r.title)
    )
    await world.apply(job_document(name, checkpoint={"uri": "pvc://state/runs"}), Play(steps=None))
    await world.until_condition(name, "Accepted", "False", "VolumeMissing")
    status = {
        "observedGeneration": 1,
        "attempt": 12,
        "progress": {"step": 1234567, "reward": -0.0001234, "oldestAge": 64},
        "ready": "8191/8192",
        "pools": {name: {"desired": 4096, "ready": 4095, "summary": "4095/4096"} for name in ("rollout", "trainer")},
        "conditions": [
            {
                "type": kind,
                "status": "True",
                "reason": reason,
                "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for kind, reason in (("Running", running), ("CheckpointAvailable", checkpoint.title))
        ],
    }
    await world.stop_operator()
    await world.call("PATCH", world.path(name, "/status"), {"status": status}, "application/merge-patch+json")
    header, line = world.plane.kubectl("get", "rlj", name, "-n", world.namespace).stdout.splitlines()
    assert line.split()[:-1] == [name, running, "1234567", "-0.0001234", "8191/8192", checkpoint.title]
    # An age has at most five characters for eight years: 9m59s, 7d23h.
    assert line.index(line.split()[-1]) + 5 <= 120, line
    assert len(header.rstrip()) <= 120


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
