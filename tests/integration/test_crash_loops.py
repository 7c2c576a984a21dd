"""Pods that crash while the first cluster starts: KubeRay replaces them for ever, and the operator ends that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.heads import Play
from world import SETTINGS, WITH_FAKE_AND_REAL_KUBERAY, Object, World, job_document

from rljob_operator.names import FIRST_CRASH_ANNOTATION

pytestmark = [pytest.mark.timeout(600), WITH_FAKE_AND_REAL_KUBERAY]

IMPATIENT = replace(SETTINGS, crash_loop_seconds=3)
"""Creation times have whole seconds."""


def crashed() -> Object:
    """The status of a pod whose Ray has ended with an error."""
    ended = {"reason": "Error", "exitCode": 3}
    container = {"name": "ray", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    return {
        "phase": "Failed",
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
        "containerStatuses": [{**container, "state": {"terminated": ended}}],
    }


class CrashingPods:
    """The first pods of a group crash, `times` of them: what a kubelet is told to do."""

    def __init__(self, group: str, times: int | None = None) -> None:
        self._group = group
        self._times = times
        self.names: list[str] = []

    def __call__(self, pod: Object) -> Object | None:
        if pod["metadata"]["labels"]["ray.io/group"] != self._group:
            return None
        if self._times is not None and len(self.names) >= self._times:
            return None
        self.names.append(pod["metadata"]["name"])
        return crashed()


async def first_crash(world: World) -> str | None:
    clusters = await world.clusters()
    return clusters[0]["metadata"]["annotations"].get(FIRST_CRASH_ANNOTATION) if clusters else None


@pytest.mark.slow(stands_for=["[trainer-real]", "[headgroup-fake]"])
@pytest.mark.parametrize("group", ["headgroup", "trainer"])
async def test_a_job_whose_pods_keep_crashing_is_given_up_and_says_which(world: World, group: str) -> None:
    world.kubelet.becomes_ready = pods = CrashingPods(group)
    world.start_operator(settings=IMPATIENT)
    await world.apply(job_document("doomed", retry={"limit": 1, "backoffSeconds": 1}), Play(steps=1))
    noted = await world.until("the first crash is noted", lambda: first_crash(world))

    # Whoever comes next counts on from what the first has seen.
    await world.stop_operator()
    world.start_operator(settings=IMPATIENT)
    job = await world.until_condition("doomed", "Failed", "True", "RetryLimitExceeded")
    first, second = job["status"]["attempts"]
    assert (first["startTime"], first["reason"], first["counted"], first["incarnation"]) == (noted, "PodError", True, 1)
    assert (second["attempt"], second["reason"], second["incarnation"]) == (2, "PodError", 2)
    for attempt in (first, second):
        said = attempt["message"].partition("cannot start: ")[2]
        assert said in {f"{name}: container ray: Error, exit code 3" for name in pods.names}
    failed = next(item["message"] for item in job["status"]["conditions"] if item["type"] == "Failed")
    assert second["message"] in failed

    async def nothing_runs() -> bool:
        return not await world.clusters() and not await world.pods()

    await world.until("nobody makes pods any more", nothing_runs)
    assert world.drivers("doomed") == []


async def test_a_pod_that_crashes_once_is_replaced_and_the_job_trains(world: World) -> None:
    world.kubelet.becomes_ready = pods = CrashingPods("trainer", times=1)
    world.start_operator(settings=IMPATIENT)
    await world.apply(job_document("healed", retry={"limit": 0}), Play(steps=1))
    job = await world.until_condition("healed", "Succeeded", "True")
    assert [(item["attempt"], item["incarnation"]) for item in job["status"]["attempts"]] == [(1, 1)]
    assert job["status"]["failures"] == 0
    assert len(pods.names) == 1
