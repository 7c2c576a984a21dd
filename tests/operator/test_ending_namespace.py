"""A namespace that is being deleted takes its jobs with it: nothing new is tried in it, and the status says why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from simulation import SETTINGS, World, job_spec

from rljob_operator import actions as do
from rljob_operator.api_server import ApiError
from rljob_operator.conditions import Reason
from rljob_operator.executor import Executor
from rljob_operator.memory import Memory
from rljob_operator.observed import Observed
from rljob_operator.views import cluster_view

ENDS = "unable to create new content in namespace space because it is being terminated"
OF_A_POD = f'pods "job-c1-rollout-worker-8xk2p" is forbidden: {ENDS}'


class Ending(World):
    """A world whose API server has refused what the operator wanted to make."""

    rejection: str = ""

    def observed(self) -> Observed:
        return replace(super().observed(), rejection=self.rejection)


def training() -> Ending:
    world = Ending(spec=job_spec())
    world.settle(8)
    assert world.reason("Running") == "Training"
    return world


def told(world: World) -> tuple[str, str, str]:
    return world.reason("Running"), world.reason("ClusterReady"), world.status.by_type["Running"].message


def test_kuberays_refused_pods_say_that_the_namespace_is_deleted() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreateWorkerPod"}
    condition = {**failure, "message": f"FailedCreateWorkerPod\n{OF_A_POD}"}
    view = cluster_view({"metadata": {"name": "a"}, "status": {"conditions": [condition]}})
    assert view.refused is Reason.DELETING


def test_a_job_whose_pods_are_gone_is_deleting_and_no_second_cluster_is_tried() -> None:
    world = training()
    world.clusters = {name: replace(found, refused=Reason.DELETING) for name, found in world.clusters.items()}
    decision = world.look()
    assert told(world) == ("Deleting", "ClusterFreed", "the namespace space is being deleted")
    assert [type(action) for action in decision.actions] == [do.DeleteCluster]
    assert [event.reason for event in decision.events if event.kind == "Warning"] == []
    made = []
    for _ in range(20):
        world.kuberay()
        made += [action for action in world.look().actions if isinstance(action, do.CreateCluster | do.CheckPods)]
        world.wait(5)
    assert (made, world.clusters) == ([], {})
    assert told(world)[0] == "Deleting"
    assert world.value("Finished") == "False"


def test_a_job_whose_cluster_is_gone_learns_it_from_the_first_refusal() -> None:
    world = training()
    world.clusters.clear()
    world.pods.clear()
    world.look()
    assert [type(action) for action in world.look(writes=1).actions] == [do.CheckPods, do.CreateCluster]
    world.rejection = f"the API server refuses the pods of head: {ENDS}"
    assert world.look().actions == ()
    assert told(world) == ("Deleting", "ClusterFreed", "the namespace space is being deleted")
    # The operator forgets the refusal, or is another one now.
    world.rejection = ""
    assert world.look().actions == ()
    assert told(world)[0] == "Deleting"


@pytest.mark.parametrize(("message", "goes_on"), [(ENDS, False), ("exceeded quota: count/podtemplates=0", True)])
async def test_the_dry_run_of_the_pods_stops_at_a_namespace_that_ends(message: str, goes_on: bool) -> None:
    async def would_create(path: str, body: Any) -> None:
        raise ApiError(403, "Forbidden", f'podtemplates "job-head" is forbidden: {message}')

    pod = {"labels": {"team": "a"}}
    job, memory = World(spec=job_spec(head={"pod": pod})).observed().job, Memory("uid")
    assert job.job is not None
    api = cast(Any, SimpleNamespace(would_create=would_create))
    executor = Executor(api, cast(Any, None), cast(Any, None), cast(Any, None), SETTINGS)
    if goes_on:
        await executor._check_pods(do.CheckPods(2), job, job.job, memory)
        return
    with pytest.raises(ApiError):
        await executor._check_pods(do.CheckPods(2), job, job.job, memory)
    assert message in memory.rejection
