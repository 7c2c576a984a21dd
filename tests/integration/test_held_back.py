"""Pods that nobody schedules, as a real API server keeps them: the job says whose fault that is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.heads import Play
from world import SETTINGS, World, job_document

pytestmark = pytest.mark.timeout(400)


async def said(world: World, name: str, reason: str) -> str:
    job = await world.until_condition(name, "ClusterReady", "False", reason)
    return str(next(item["message"] for item in job["status"]["conditions"] if item["type"] == "ClusterReady"))


def with_template(**spec: Any) -> dict[str, Any]:
    return {"pod": {"template": {"spec": spec}}}


async def test_an_unknown_scheduler_and_scheduling_gates_are_named(world: World) -> None:
    # Nobody schedules here, and the kubelets start what has a scheduler of the usual name, long before eight seconds.
    world.kubelet.becomes_ready = lambda pod: (
        {"phase": "Pending"} if pod["spec"]["schedulerName"] == "my-scheduler" else None
    )
    world.start_operator(settings=replace(SETTINGS, scheduler_seconds=8.0))
    await world.apply(job_document("unserved", trainer=with_template(schedulerName="my-scheduler")))
    message = await said(world, "unserved", "SchedulerMissing")
    assert "the scheduler my-scheduler has not handled the pod for 8 s" in message

    gates = [{"name": "example.com/checked"}]
    await world.apply(job_document("gated", trainer=with_template(schedulingGates=gates)), Play(steps=1))
    message = await said(world, "gated", "SchedulingGated")
    assert "waits for its scheduling gates example.com/checked to be removed" in message
