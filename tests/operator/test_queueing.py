"""Kueue's words in the status, and a job that Kueue stops and starts. The conditions are as Kueue 0.19 writes them."""

from __future__ import annotations

from typing import Any

import pytest
from simulation import SETTINGS, World, job_spec

from rljob_api import check, resolve
from rljob_operator import actions as do
from rljob_operator.objects import ray_cluster
from rljob_operator.queueing import QueueView, queue_view
from rljob_operator.store import Store
from rljob_operator.views import workload_view

NO_QUOTA = (
    "couldn't assign flavors to pod set trainer: insufficient unused quota for nvidia.com/gpu in flavor h100, "
    "4 more needed"
)
PREEMPTED = "Preempted to accommodate a workload (UID: u1, JobUID: u2) due to prioritization in the ClusterQueue"


def workload(*conditions: tuple[str, str, str], name: str = "w", second: int = 1, **rest: Any) -> dict[str, Any]:
    """A Workload with conditions (type, status, message)."""
    return {
        "metadata": {
            "name": name,
            "namespace": "space",
            "uid": f"uid-{name}",
            "resourceVersion": str(second),
            "creationTimestamp": f"2026-01-01T00:00:{second:02d}Z",
            "ownerReferences": [{"kind": "RayCluster", "name": "job-c1", "uid": "cluster-uid", "controller": True}],
        },
        "spec": {"queueName": "rl", "podSets": [{"name": "head"}], **rest.get("spec", {})},
        "status": {
            "conditions": [
                {"type": kind, "status": status, "reason": "Any", "message": message}
                for kind, status, message in conditions
            ],
            **rest.get("status", {}),
        },
    }


def seen(*workloads: dict[str, Any]) -> QueueView:
    return queue_view([workload_view(raw) for raw in workloads])


ADMITTED = (("QuotaReserved", "True", "Quota reserved in ClusterQueue cq"), ("Admitted", "True", "is admitted"))


@pytest.mark.parametrize(
    ("raw", "message", "taken_back"),
    [
        (workload(("QuotaReserved", "False", NO_QUOTA)), f"waits for quota: {NO_QUOTA}", False),
        (workload(), "waits for quota: Kueue has not processed it yet", False),
        (
            workload(("QuotaReserved", "False", "LocalQueue rl doesn't exist")),
            "waits for quota: LocalQueue rl doesn't exist",
            False,
        ),
        (workload(*ADMITTED), "", False),
        (
            workload(
                ("QuotaReserved", "True", "Quota reserved in ClusterQueue cq"),
                ("Admitted", "False", "The workload has not all checks ready"),
                status={
                    "admissionChecks": [
                        {"name": "budget", "state": "Pending", "message": "asks the bank"},
                        {"name": "done", "state": "Ready", "message": ""},
                    ]
                },
            ),
            "waits for admission: budget: asks the bank",
            False,
        ),
        # Kueue sets Evicted first and takes the reservation once the pods are gone.
        (workload(*ADMITTED, ("Evicted", "True", PREEMPTED)), f"quota reclaimed: {PREEMPTED}", True),
        (
            workload(
                ("QuotaReserved", "False", NO_QUOTA),
                ("Admitted", "False", "The workload has no reservation"),
                ("Evicted", "True", PREEMPTED),
                ("Preempted", "True", PREEMPTED),
            ),
            f"quota reclaimed: {PREEMPTED}; waits for quota: {NO_QUOTA}",
            True,
        ),
        (
            workload(
                ("QuotaReserved", "False", "The ClusterQueue is stopped"),
                ("Evicted", "True", "The ClusterQueue is stopped"),
            ),
            "quota reclaimed: The ClusterQueue is stopped",
            True,
        ),
        (
            workload(("Evicted", "True", "The workload is deactivated"), spec={"active": False}),
            "deactivated in the queue: The workload is deactivated",
            True,
        ),
        # Admitted again: Kueue keeps the old words under a condition that is False.
        (workload(*ADMITTED, ("Evicted", "False", f"Previously: {PREEMPTED}")), "", False),
    ],
)
def test_a_workload_in_words(raw: dict[str, Any], message: str, taken_back: bool) -> None:
    view = seen(raw)
    assert view.known
    assert view.taken_back is taken_back
    assert view.message == message


def test_a_larger_slice_waits_while_the_first_goes_on() -> None:
    first = workload(*ADMITTED, name="first", second=1)
    larger = workload(("QuotaReserved", "False", NO_QUOTA), name="larger", second=2)
    assert seen(first, larger) == QueueView(True, False, f"waits for quota: {NO_QUOTA}")
    replaced = workload(*ADMITTED, ("Finished", "True", "Replaced"), name="first", second=1)
    assert seen(replaced, workload(*ADMITTED, name="larger", second=2)) == QueueView(True)


def test_no_workload_is_not_known() -> None:
    assert seen() == QueueView(known=False)


def queued(**sections: Any) -> World:
    """A world with a cluster that Kueue holds back."""
    world = World(spec=job_spec(queueName="rl", **sections))
    world.look()
    world.hold(f"waits for quota: {NO_QUOTA}")
    world.look()
    return world


def test_a_job_waits_with_kueues_words() -> None:
    world = queued()
    for kind in ("Admitted", "Running", "ClusterReady"):
        said = world.status.by_type[kind]
        assert (said.status, said.reason, said.message) == ("False", "WaitingForQuota", f"waits for quota: {NO_QUOTA}")
    assert world.status.start_time is None, "deadlines count from the admission"
    world.admit()
    world.settle(8)
    assert (world.reason("Admitted"), world.reason("Running")) == ("AdmittedByQueue", "Training")


def test_a_queue_without_kueue_holds_nothing_back_and_the_status_says_so() -> None:
    world = World(spec=job_spec(queueName="rl"))
    world.settle(8)
    assert (world.value("Admitted"), world.reason("Admitted")) == ("True", "NoQueue")
    assert "spec.queueName is rl, but Kueue has made no Workload" in world.status.by_type["Admitted"].message
    assert world.reason("Running") == "Training"


def test_quota_taken_back_costs_no_failure_and_not_the_place_in_the_queue() -> None:
    world = queued(retry={"limit": 0})
    world.admit()
    world.settle(8)
    (before,) = world.clusters.values()
    world.hold(f"quota reclaimed: {PREEMPTED}", taken_back=True)
    world.settle(3)
    assert world.pods == {}
    assert world.reason("Running") == "QuotaTakenBack"
    assert PREEMPTED in world.status.by_type["Running"].message
    (attempt,) = world.status.attempts
    assert (attempt.reason, attempt.counted) == ("QuotaTakenBack", False)
    world.hold(f"waits for quota: {NO_QUOTA}")
    world.settle(3)
    assert world.status.by_type["Running"].message == f"waits for quota: {NO_QUOTA}"
    world.admit()
    world.settle(8)
    (after,) = world.clusters.values()
    assert after.uid == before.uid, "a new cluster would queue up at the end again"
    assert (world.reason("Running"), world.submissions, world.status.failures) == ("Training", [1, 2], 0)
    # From here on a lost head is a lost head again.
    world.lose_pod(next(name for name in world.pods if "head" in name), disrupted=True)
    world.settle(10)
    assert (world.reason("Running"), world.status.incarnation) == ("Training", 2)


def test_admitted_again_before_a_pod_went_the_old_driver_is_stopped_first() -> None:
    world = queued()
    world.admit()
    world.settle(8)
    world.hold("quota reclaimed", taken_back=True)
    world.look()
    world.admit()
    world.settle(8)
    assert [driver.state for driver in world.drivers] == ["STOPPED", "RUNNING"]
    assert world.reason("Running") == "Training"


def test_an_eviction_is_believed_before_the_cluster_is_stopped() -> None:
    """Pods may be seen to go before the cluster is seen to be suspended: that is no lost head."""
    world = queued()
    world.admit()
    world.settle(8)
    world.queue = QueueView(True, True, "quota reclaimed: for somebody else")
    world._end_pod(next(name for name in world.pods if "head" in name))
    world.look()
    assert (world.reason("Running"), world.status.incarnation) == ("QuotaTakenBack", 1)


def test_the_size_may_change_while_the_job_waits() -> None:
    world = queued(rollout={"replicas": 4})
    world.edit(rollout={"replicas": 1})
    world.settle(3)
    (cluster,) = world.clusters.values()
    group = cluster.group("rollout")
    assert group is not None
    assert group.replicas == 1
    assert world.pods == {}


def test_nothing_the_operator_does_touches_suspend() -> None:
    world = queued()
    done: list[do.Action] = []
    for step in (world.admit, world.hold, world.admit):
        step()
        for _ in range(6):
            done += world.look().actions
            world.kuberay()
            world.kubelet()
            world.wait(5)
    patches = [
        do.cluster_patch(action)
        for action in done
        if isinstance(action, do.NoteGeneration | do.BeginAttempt | do.ResizeGroup | do.ClearRemoved)
    ]
    assert patches
    assert not [entry for patch in patches for entry in patch if "suspend" in entry["path"]]
    job = world.observed().job
    assert job.job is not None
    assert "suspend" not in ray_cluster(job.job, "hash", "uid", 1, 1, "key", SETTINGS)["spec"]


def test_a_larger_size_that_waits_for_quota_is_named() -> None:
    world = queued()
    world.admit()
    world.settle(8)
    world.queue = QueueView(True, False, f"waits for quota: {NO_QUOTA}")
    world.edit(rollout={"replicas": 4})
    for _ in range(3):
        world.look()
        world.kuberay()
    said = world.status.by_type["ClusterReady"]
    assert (said.status, said.reason) == ("True", "WaitingForQuota")
    assert said.message == f"waits for quota: {NO_QUOTA}; rollout: 2 of 4 pods wait"
    assert world.reason("Running") == "Training"


def cluster() -> dict[str, Any]:
    world = World(spec=job_spec(queueName="rl"))
    view = world.observed().job
    assert view.job is not None
    made = ray_cluster(view.job, "hash", "uid", 1, 1, "key", SETTINGS)
    made["metadata"] |= {"uid": "cluster-uid", "resourceVersion": "3", "namespace": "space"}
    return made


def described(placement: str = "separate", queue: str | None = "rl", **labels: str) -> dict[str, Any]:
    spec = job_spec(queueName=queue, placement=placement)
    if placement == "colocated":
        spec["rollout"] = {}
    document = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job", "labels": {f"kueue.x-k8s.io/{name}": value for name, value in labels.items()}},
        "spec": spec,
    }
    job, violations = check(document)
    assert job is not None
    assert not violations
    return ray_cluster(resolve(job), "hash", "uid", 1, 1, "key", SETTINGS)["metadata"]


def test_the_priority_class_of_kueue_is_passed_on() -> None:
    made = described(**{"priority-class": "urgent", "queue-name": "rl"})
    assert made["labels"]["kueue.x-k8s.io/priority-class"] == "urgent"
    assert made["labels"]["kueue.x-k8s.io/queue-name"] == "rl"
    assert "kueue.x-k8s.io/priority-class" not in described()["labels"]


def test_the_priority_class_of_kueue_is_passed_on_without_a_queue_too() -> None:
    # Kueue gives it the queue `default` of its namespace, where there is one.
    made = described(queue=None, **{"priority-class": "urgent"})
    assert made["labels"]["kueue.x-k8s.io/priority-class"] == "urgent"
    assert "kueue.x-k8s.io/queue-name" not in made["labels"]


def test_a_priority_class_that_is_changed_reaches_the_cluster_that_runs() -> None:
    world = World()
    world.settle()
    assert (world.reason("Running"), world.clusters["job-c1"].priority) == ("Training", None)
    for priority in ("urgent", "later", None):
        world.labels = {} if priority is None else {"kueue.x-k8s.io/priority-class": priority}
        world.look()
        assert world.clusters["job-c1"].priority == priority
        assert not [action for action in world.look().actions if isinstance(action, do.PassPriority)]
    assert (world.submissions, sorted(world.clusters)) == ([1], ["job-c1"])


def test_only_a_cluster_that_can_be_resized_is_elastic() -> None:
    assert described()["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"
    assert "kueue.x-k8s.io/elastic-job" not in described(placement="colocated")["annotations"]


def test_a_workload_finds_its_job_through_the_cluster_in_any_order() -> None:
    store, key = Store(), ("space", "job")
    waiting = workload(("QuotaReserved", "False", NO_QUOTA), second=5)
    assert store.put_workload(waiting) is None
    assert store.put_cluster(cluster()) == key
    assert store.queue("cluster-uid").message == f"waits for quota: {NO_QUOTA}"
    assert store.put_workload(workload(*ADMITTED, second=6)) == key
    assert store.queue("cluster-uid") == QueueView(True)
    assert store.put_workload(waiting) is None, "older than what is known"
    assert store.queue("cluster-uid") == QueueView(True)
    assert store.drop_workload(workload(*ADMITTED, second=7)) == key
    assert store.queue("cluster-uid") == QueueView()


def test_workloads_of_others_are_not_kept() -> None:
    store = Store()
    other = workload(*ADMITTED)
    other["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": "x", "controller": True}]
    assert store.put_workload(other) is None
    assert store.queue("x") == QueueView()
