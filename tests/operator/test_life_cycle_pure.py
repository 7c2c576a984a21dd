"""Each transition of a job's life, decided by `reconcile` in a simulated world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulation import SETTINGS, World, job_spec

from rljob_operator import actions as do


def running(**sections: object) -> World:
    """A world in which attempt 1 trains."""
    world = World(spec=job_spec(**sections))
    world.settle(8)
    assert (world.value("Running"), world.reason("Running")) == ("True", "Training")
    return world


def test_a_new_job_gets_its_objects_first_and_a_driver_when_enough_is_ready() -> None:
    world = World()
    assert world.look().actions == (do.CheckPods(1), do.CreateCluster(1))
    world.kuberay()
    world.look()
    assert world.reason("ClusterReady") == "WaitingForPods"
    assert world.status.by_type["ClusterReady"].message == (
        "head: 1 of 1 pod waits; rollout: 2 of 2 pods wait; trainer: 1 of 1 pod waits"
    )
    world.kubelet()
    begin, submit = world.look().actions
    assert isinstance(begin, do.BeginAttempt)
    assert isinstance(submit, do.SubmitDriver)
    assert begin.attempt == submit.attempt == 1
    world.look()
    assert world.reason("Running") == "Training"


def test_success_frees_the_cluster_in_the_same_look_and_is_final() -> None:
    world = running()
    world.end(world.drivers[0], "succeeded", 0)
    decision = world.look()
    assert [type(action) for action in decision.actions] == [do.DeleteCluster]
    assert world.value("Succeeded") == world.value("Finished") == "True"
    world.settle(5)
    assert world.clusters == {}
    assert world.look().actions == ()


def test_a_job_at_rest_changes_nothing() -> None:
    world = running()
    world.settle(3, train=False)
    decision = world.look()
    assert decision.actions == ()
    assert decision.status is None
    assert decision.requeue_after == pytest.approx(5.0)


def test_a_cluster_that_vanishes_between_two_attempts_is_followed_by_another() -> None:
    world = running(retry={"limit": 3, "backoffSeconds": 10})
    world.end(world.running()[0], "failed", 1)
    world.look()
    assert world.reason("Running") == "BackingOff"
    world.clusters.clear()
    world.settle(30)
    assert (world.submissions, list(world.clusters)) == ([1, 2], ["job-c2"])
    assert world.reason("Running") == "Training"


def test_the_pause_between_attempts_doubles_and_a_checkpoint_resets_it() -> None:
    world = running(retry={"limit": 3, "backoffSeconds": 10, "maxBackoffSeconds": 600})
    pauses = []
    for number in (1, 2, 3):
        if number == 3:
            world.checkpoint_step = 7
            world.look()
        world.end(world.running()[0], "failed", 1)
        world.look()
        failed = world.now
        assert world.reason("Running") == "BackingOff"
        while len(world.drivers) == number:
            world.wait(1)
            world.look()
        pauses.append((world.now - failed).total_seconds())
    assert pauses == [10, 20, 10]
    assert world.submissions == [1, 2, 3, 4]


def test_a_clock_that_was_an_hour_ahead_delays_nothing() -> None:
    world = running(retry={"limit": 3, "backoffSeconds": 10})
    world.wait(3600)
    world.end(world.drivers[-1], "failed", 1)
    world.look()
    world.wait(-3600)
    assert world.look().requeue_after is not None
    assert world.last.requeue_after <= 10
    world.wait(11)
    assert [type(action) for action in world.look().actions] == [do.BeginAttempt, do.SubmitDriver]


@pytest.mark.parametrize(("code", "reason"), [(64, "BadJobFile"), (65, "BadData"), (66, "BadCheckpoint")])
def test_what_retrying_cannot_mend_is_not_retried(code: int, reason: str) -> None:
    world = running()
    world.end(world.drivers[0], "failed", code)
    world.settle(20)
    assert world.reason("Failed") == reason
    assert world.submissions == [1]


def test_one_failure_too_many_gives_the_job_up() -> None:
    world = running(retry={"limit": 1, "backoffSeconds": 1})
    for _ in range(2):
        world.end(world.running()[0], "failed", 1)
        world.settle(6)
    assert world.reason("Failed") == "RetryLimitExceeded"
    assert "spec.retry.limit is 1" in world.status.by_type["Failed"].message
    assert world.clusters == {}


def test_an_eviction_does_not_count() -> None:
    world = running(retry={"limit": 0, "backoffSeconds": 1})
    worker = next(name for name, pod in world.pods.items() if pod.group == "trainer")
    world.lose_pod(worker, disrupted=True)
    world.look()
    world.end(world.running()[0], "failed", 75)
    world.settle(6)
    assert world.reason("Running") == "Training"
    assert [attempt.counted for attempt in world.status.attempts] == [False, False]


def test_a_head_that_is_deleted_costs_the_incarnation_and_no_failure() -> None:
    world = running(retry={"limit": 0})
    head = next(name for name, pod in world.pods.items() if pod.group == "head")
    del world.pods[head]
    world.drivers[0].state = "GONE"
    world.settle(12)
    assert sorted(world.clusters) == ["job-c2"]
    assert world.submissions == [1, 2]
    assert (world.status.attempts[0].reason, world.status.failures) == ("HeadLost", 0)


def test_a_head_that_crashes_counts() -> None:
    world = running(retry={"limit": 0})
    head = next(name for name, pod in world.pods.items() if pod.group == "head")
    world.lose_pod(head)
    world.look()
    assert world.reason("Failed") == "RetryLimitExceeded"


def test_a_new_cluster_waits_until_every_pod_of_the_old_one_is_gone() -> None:
    world = running()
    name = next(iter(world.clusters))
    del world.clusters[name]
    world.look()
    world.look()
    assert world.clusters == {}
    assert world.reason("ClusterReady") == "ReplacingCluster"
    world.kuberay()
    world.look()
    assert sorted(world.clusters) == ["job-c2"]


def test_pods_that_never_end_are_removed_by_force_after_a_while() -> None:
    from dataclasses import replace

    world = running()
    pod = next(pod for pod in world.pods.values() if pod.group == "rollout")
    world.pods[pod.name] = replace(pod, deleting_since=world.now)
    world.wait(29)
    assert do.RemovePod(pod.name, pod.uid) not in world.look().actions
    world.wait(1)
    assert do.RemovePod(pod.name, pod.uid) in world.look().actions


def test_suspending_lets_the_driver_save_before_the_pods_go() -> None:
    world = running()
    world.edit(suspend=True)
    world.look()
    assert world.reason("Running") == "Suspending"
    assert world.drivers[0].desired is not None
    assert world.drivers[0].desired.suspend
    assert len(world.clusters) == 1
    world.settle(6)
    assert (world.value("Suspended"), world.clusters, world.pods) == ("True", {}, {})
    world.edit(suspend=False)
    world.settle(8)
    assert world.reason("Running") == "Training"
    assert world.submissions == [1, 2]
    assert sorted(world.clusters) == ["job-c2"]


def test_a_driver_that_does_not_save_in_time_is_not_waited_for() -> None:
    world = running()
    world.edit(suspend=True)
    world.look()
    world.wait(899)
    world.look()
    assert len(world.clusters) == 1
    world.wait(1)
    world.look()
    assert all(cluster.deleting for cluster in world.clusters.values())
    world.settle(3, train=False)
    assert world.value("Suspended") == "True"


def test_a_job_that_is_created_suspended_starts_nothing() -> None:
    world = World(spec=job_spec(suspend=True))
    world.settle(3)
    assert (world.value("Suspended"), world.clusters, world.submissions) == ("True", {}, [])


def test_success_wins_over_a_late_suspension() -> None:
    world = running()
    world.edit(suspend=True)
    world.end(world.drivers[0], "succeeded", 0)
    world.settle(4)
    assert world.value("Succeeded") == "True"


def test_growing_is_immediate_and_shrinking_waits_for_the_driver() -> None:
    world = running()
    world.edit(rollout={"replicas": 4})
    world.settle(4)
    assert len(world.pods) == 1 + 4 + 1
    world.edit(rollout={"replicas": 1})
    world.settle(4, train=False)
    assert len(world.pods) == 1 + 4 + 1
    assert world.reason("Resizing") == "Draining"
    world.settle(8)
    assert len(world.pods) == 1 + 1 + 1
    assert sorted(world.removed) == sorted(world.drivers[0].drained)
    assert world.reason("Resizing") == "AtSize"
    assert all(not group.removing for cluster in world.clusters.values() for group in cluster.groups)


def test_a_pool_that_grows_is_no_pool_that_has_lost_pods() -> None:
    world = running()
    warnings = []
    world.edit(rollout={"replicas": 4})
    for _ in range(4):
        warnings += [event.reason for event in world.look().events if event.kind == "Warning"]
        world.kuberay()
        assert (world.value("ClusterReady"), world.reason("ClusterReady")) == ("True", "WaitingForPods")
    world.kubelet()
    world.look()
    assert (world.reason("ClusterReady"), warnings) == ("PoolsReady", [])
    # What is lost at the new size is told as before.
    world.lose_pod(max(pods_of(world, "rollout")), disrupted=True)
    world.look()
    assert (world.value("ClusterReady"), world.reason("ClusterReady")) == ("True", "PoolDegraded")
    world.kuberay()
    world.look()
    assert (world.value("ClusterReady"), world.reason("ClusterReady")) == ("True", "PoolDegraded")


SCORED = {"functions": [{"type": "rewardModel", "rewardModel": {"source": "/models/scores"}}]}


def pods_of(world: World, group: str) -> set[str]:
    return {name for name, pod in world.pods.items() if pod.group == group}


def test_a_job_with_reward_models_begins_when_one_of_them_is_there() -> None:
    world = World(spec=job_spec(reward=SCORED, rewardModel={"replicas": 3}))
    world.quota = 1 + 2 + 1 + 1
    world.settle(6)
    assert (world.submissions, len(pods_of(world, "reward-model"))) == ([1], 1)
    assert world.status.ready == "4/6"
    assert world.status.pools["reward-model"].summary == "1/3"
    # None of its pods was lost: the pool has not been complete yet.
    assert (world.value("ClusterReady"), world.reason("ClusterReady")) == ("True", "WaitingForPods")
    world.quota = None
    world.settle(4)
    assert world.status.ready == "6/6"
    # Without any of them nothing can be scored.
    world = World(spec=job_spec(reward=SCORED, rewardModel={}))
    world.quota = 1 + 2 + 1
    world.settle(6)
    assert (world.submissions, world.reason("ClusterReady")) == ([], "WaitingForPods")


def test_two_pools_are_resized_at_once_each_at_its_own_pace() -> None:
    world = World(spec=job_spec(reward=SCORED, rewardModel={"replicas": 4}))
    world.settle(10)
    world.edit(rollout={"replicas": 1}, rewardModel={"replicas": 1})
    world.settle(4, train=False)
    assert (len(pods_of(world, "rollout")), len(pods_of(world, "reward-model"))) == (2, 4)
    said = world.status.by_type["Resizing"]
    assert (said.reason, said.message) == (
        "Draining",
        "rollout: 1 of 2 replicas is draining; reward-model: 3 of 4 replicas are draining",
    )
    began = world.status.resize_time
    assert began is not None
    # One pool is done, the other one isn't, and has had its time since it began.
    (driver,) = world.running()
    engines, scorers = sorted(pods_of(world, "rollout")), sorted(pods_of(world, "reward-model"))
    driver.drained |= {*engines[:1], *scorers[:1]}
    world.settle(4, train=False)
    assert (len(pods_of(world, "rollout")), len(pods_of(world, "reward-model"))) == (1, 3)
    assert world.status.by_type["Resizing"].message == "reward-model: 2 of 3 replicas are draining"
    assert world.status.resize_time == began
    world.settle(8)
    assert (world.reason("Resizing"), world.status.resize_time) == ("AtSize", None)
    assert pods_of(world, "reward-model") == {scorers[3]}
    assert sorted(world.removed) == sorted(driver.drained)
    assert world.submissions == [1]
    # One grows while the other one shrinks.
    world.edit(rollout={"replicas": 3}, rewardModel={"replicas": 2})
    world.settle(6)
    assert (len(pods_of(world, "rollout")), len(pods_of(world, "reward-model"))) == (3, 2)
    assert driver.desired is not None
    assert (driver.desired.rollout_replicas, driver.desired.reward_model_replicas) == (3, 2)


def test_reward_models_that_come_or_go_need_another_cluster() -> None:
    with_pool, without = (
        World(spec=job_spec(reward=SCORED, **pool)).observed().job.fingerprint
        for pool in ({"rewardModel": {"replicas": 2}}, {})
    )
    other_size = World(spec=job_spec(reward=SCORED, rewardModel={"replicas": 3})).observed().job.fingerprint
    assert with_pool == other_size != without


JUDGED = {"functions": [{"type": "judge", "judge": {"template": "{response}"}}]}


def judge(replicas: int) -> dict[str, object]:
    return {"model": {"source": "/models/judge"}, "replicas": replicas}


def test_a_judges_engines_come_are_drained_and_go() -> None:
    world = World(spec=job_spec(reward=JUDGED, judge=judge(3)))
    world.quota = 1 + 2 + 1 + 1
    world.settle(6)
    assert (world.submissions, world.status.pools["judge"].summary) == ([1], "1/3")
    world.quota = None
    world.settle(4)
    assert world.status.ready == "6/6"
    world.edit(judge={"replicas": 1})
    world.settle(4, train=False)
    assert len(pods_of(world, "judge")) == 3
    said = world.status.by_type["Resizing"]
    assert (said.reason, said.message) == ("Draining", "judge: 2 of 3 replicas are draining")
    world.settle(8)
    (driver,) = world.running()
    assert sorted(world.removed) == sorted(driver.drained)
    assert (len(pods_of(world, "judge")), world.submissions) == (1, [1])
    assert driver.desired is not None
    assert (driver.desired.judge_replicas, driver.desired.reward_model_replicas) == (1, None)
    assert world.status.progress is not None
    assert (world.status.progress.judges_ready, world.status.progress.scorers_ready) == (1, None)
    # Suspended, its pods go with all others, and come back.
    world.edit(suspend=True)
    world.settle(8)
    assert not world.pods
    world.edit(suspend=False)
    world.settle(8)
    assert len(pods_of(world, "judge")) == 1


def test_pods_on_which_a_new_driver_starts_no_engine_are_not_waited_for() -> None:
    world = running(retry={"limit": 3, "backoffSeconds": 0})
    world.end(world.running()[0], "failed", 75)
    world.look()
    world.edit(rollout={"replicas": 1})
    world.settle(6)
    (driver,) = world.running()
    assert (driver.attempt, driver.desired) == (2, None)
    assert len(world.pods) == 1 + 1 + 1
    assert world.removed == [name for name in world.removed if name not in driver.used]
    assert world.reason("Resizing") == "AtSize"


def test_an_engine_that_never_drains_goes_after_the_grace() -> None:
    world = running()
    world.edit(rollout={"replicas": 1})
    world.settle(2, train=False)
    world.wait(900)
    world.settle(3, train=False)
    assert len(world.pods) == 1 + 1 + 1


def test_pods_that_never_started_go_first_when_shrinking() -> None:
    world = running()
    world.edit(rollout={"replicas": 4})
    world.look()
    world.kuberay()
    waiting = {name for name, pod in world.pods.items() if not pod.ready}
    assert len(waiting) == 2
    world.edit(rollout={"replicas": 2})
    for _ in range(4):
        world.look()
        world.drive()
    world.kuberay()
    assert set(world.removed) == waiting


def test_a_finished_job_is_deleted_when_its_time_is_over() -> None:
    world = running(ttlSecondsAfterFinished=100)
    world.end(world.drivers[0], "succeeded", 0)
    world.settle(4)
    world.wait(79)
    assert not world.job_deleted
    world.wait(2)
    world.look()
    assert world.job_deleted


def test_leftovers_get_a_grace_and_then_new_pods() -> None:
    world = running(retry={"limit": 2, "backoffSeconds": 0})
    world.leftovers = 2
    world.end(world.drivers[0], "failed", 1)
    world.look()
    world.wait(1)
    world.look()
    assert len(world.clusters) == 1
    world.wait(30)
    world.look()
    world.leftovers = 0
    world.settle(8)
    assert sorted(world.clusters) == ["job-c2"]
    assert world.submissions == [1, 2]


def test_ray_out_of_reach_is_said_at_once_and_given_up_after_the_progress_deadline() -> None:
    world = running(deadlines={"progressSeconds": 100})
    world.reachable = False
    world.look()
    assert (world.value("Running"), world.reason("Running")) == ("Unknown", "RayUnreachable")
    world.wait(100)
    world.look()
    assert world.status.incarnation == 2


def test_what_runs_goes_on_while_the_job_s_file_is_impossible() -> None:
    world = running()
    world.labels = {"kueue.x-k8s.io/max-exec-time-seconds": "60"}
    world.look()
    assert (world.value("Accepted"), world.reason("Accepted")) == ("False", "InvalidSpec")
    assert (world.value("Running"), world.reason("Running")) == ("Unknown", "InvalidSpec")
    assert sorted(world.clusters) == ["job-c1"]
    world.labels = {}
    world.look()
    assert (world.value("Running"), world.reason("Running")) == ("True", "Training")
    assert world.submissions == [1]


def test_a_cluster_that_refuses_the_operators_token_is_named_and_left_alone() -> None:
    world = running(deadlines={"progressSeconds": 100})
    world.refuses = True
    for _ in range(5):
        world.look()
        assert (world.value("Running"), world.reason("Running")) == ("Unknown", "TokenRefused")
        world.wait(100)
    assert sorted(world.clusters) == ["job-c1"]
    # Silence is another matter, and counts from when it began.
    world.refuses, world.reachable = False, False
    world.look()
    world.wait(99)
    world.look()
    assert world.status.incarnation == 1
    world.wait(1)
    world.look()
    assert world.status.incarnation == 2


def test_a_job_goes_on_as_before_once_its_key_is_back() -> None:
    world = running()
    world.refuses = True
    world.look()
    world.refuses = False
    world.settle(3)
    assert (world.value("Running"), world.reason("Running")) == ("True", "Training")
    assert world.submissions == [1]


def by_hand(world: World, group: str, replicas: int) -> None:
    """Somebody edits the RayCluster."""
    world._change_group("job-c1", group, replicas=replicas, most=8)


def workers(world: World, group: str) -> set[str]:
    return {pod.name for pod in world.pods.values() if pod.group == group}


@pytest.mark.parametrize("group", ["rollout", "trainer"])
@pytest.mark.parametrize("seen", [True, False])
def test_pods_added_by_hand_go_again_and_cost_none_that_works(group: str, seen: bool) -> None:
    world = running()
    before = workers(world, group)
    by_hand(world, group, 4)
    world.kuberay()
    added = workers(world, group) - before
    if not seen:
        # KubeRay has made them, and the watch has not told: fewer replicas without their names would be a lottery.
        world.unseen = set(added)
        world.look()
        world.kuberay()
        world.unseen = set()
    world.settle(12)
    assert workers(world, group) == before
    assert set(world.removed) == added
    assert world.submissions == [1]


def test_engines_added_by_hand_that_never_come_are_not_waited_for() -> None:
    world = running()
    by_hand(world, "rollout", 4)
    for _ in range(8):
        world.look()
        world.wait(5)
    assert world.clusters["job-c1"].group("rollout").replicas == 2  # type: ignore[union-attr]


def test_trainer_pods_added_by_hand_that_a_quota_holds_back_are_not_waited_for() -> None:
    world = running()
    before = workers(world, "trainer")
    world.quota = len(world.pods) + 1
    by_hand(world, "trainer", 5)
    world.settle(2, seconds=SETTINGS.unseen_seconds / 2)
    # Until it could have seen all that KubeRay has made, it names nobody.
    assert len(workers(world, "trainer")) == 2
    world.settle(2)
    assert world.clusters["job-c1"].group("trainer").replicas == 1  # type: ignore[union-attr]
    assert workers(world, "trainer") == before
    # And it is at rest: nothing is left to be put right.
    assert world.look().actions == ()
    assert world.submissions == [1]


def test_a_trainer_group_made_smaller_by_hand_is_restored() -> None:
    world = running()
    by_hand(world, "trainer", 0)
    world.look()
    assert world.clusters["job-c1"].group("trainer").replicas == 1  # type: ignore[union-attr]


def test_an_incarnation_written_by_hand_gives_no_attempt_number_twice() -> None:
    world = running()
    world.status = world.status.changed(incarnation=9)
    world.settle(10)
    assert list(world.clusters) == ["job-c9"]
    assert world.submissions == [1, 2]
    assert [(attempt.number, attempt.incarnation, attempt.reason) for attempt in world.status.attempts] == [
        (1, 1, "HeadLost"),
        (2, 9, ""),
    ]


@pytest.mark.parametrize("group", ["rollout", "trainer"])
def test_a_lower_bound_raised_by_hand_costs_no_working_pod_and_is_taken_back(group: str) -> None:
    world = running()
    before = workers(world, group)
    world._change_group("job-c1", group, least=5, most=5)
    world.kuberay()
    world.kubelet()
    assert len(workers(world, group)) == 5
    world.settle(12)
    assert workers(world, group) == before
    assert world.submissions == [1]
    assert world.reason("Resizing") == "AtSize"


@pytest.mark.parametrize("group", ["rollout", "trainer"])
def test_an_upper_bound_lowered_by_hand_is_taken_back(group: str) -> None:
    world = running()
    wanted = len(workers(world, group))
    world._change_group("job-c1", group, least=0, most=0)
    world.kuberay()
    assert workers(world, group) == set()
    world.settle(12)
    assert len(workers(world, group)) == wanted


@pytest.mark.parametrize("group", ["rollout", "trainer"])
@pytest.mark.parametrize("bounds", [{"most": 70}, {"least": 1, "most": 70}])
def test_bounds_changed_by_hand_that_change_no_size_are_put_back(group: str, bounds: dict[str, int]) -> None:
    world = running()
    before = world.clusters["job-c1"].group(group)
    world._change_group("job-c1", group, **bounds)
    world.settle(2)
    assert world.clusters["job-c1"].group(group) == before
    assert world.look().actions == ()


@pytest.mark.parametrize("group", ["rollout", "trainer"])
@pytest.mark.parametrize("change", [{"hosts": 3}, {"suspended": True}], ids=["hosts", "suspend"])
def test_pods_of_a_replica_and_a_group_switched_off_by_hand_are_put_back(group: str, change: dict[str, Any]) -> None:
    world = running()
    world._change_group("job-c1", group, **change)
    world.settle(3)
    found = world.clusters["job-c1"].group(group)
    assert found is not None
    assert (found.hosts, found.suspended) == (1, False)
    assert world.submissions == [1]
    assert world.look().actions == ()


@pytest.mark.parametrize("group", ["rollout", "trainer"])
def test_a_group_taken_out_by_hand_is_put_back_and_keeps_its_pods(group: str) -> None:
    world = running()
    before = workers(world, group)
    cluster = world.clusters["job-c1"]
    world.clusters["job-c1"] = replace(cluster, groups=tuple(item for item in cluster.groups if item.name != group))
    assert do.RestoreGroups("job-c1", "", 1, (group,)) in world.look().actions
    assert len(world.clusters["job-c1"].groups) == 2
    world.settle(5)
    assert workers(world, group) == before
    assert world.submissions == [1]


def test_a_group_that_only_the_next_incarnation_has_is_not_put_into_this_one() -> None:
    world = running()
    cluster = world.clusters["job-c1"]
    trainer = tuple(group for group in cluster.groups if group.name == "trainer")
    world.clusters["job-c1"] = replace(cluster, groups=trainer, spec_hash="of placement: colocated")
    world.settle(3)
    assert world.reason("Accepted") == "NeedsNewIncarnation"
    assert [group.name for group in world.clusters["job-c1"].groups] == ["trainer"]


def test_a_trainer_group_that_the_job_file_changes_waits_for_the_next_incarnation() -> None:
    world = running()
    world.edit(trainer={"replicas": 2})
    world.settle(3)
    assert world.reason("Accepted") == "NeedsNewIncarnation"
    assert world.clusters["job-c1"].group("trainer").replicas == 1  # type: ignore[union-attr]


def test_what_pods_need_beside_the_cluster_is_made_anew_when_it_is_time() -> None:
    world = running()
    world.look()
    assert world.kept == []
    world.surroundings_due = True
    world.look()
    assert world.kept == ["job-c1"]


def test_what_pods_need_beside_a_cluster_that_cannot_be_reached_is_made_anew_at_once_and_once() -> None:
    """Its network policy lets in the operator of another namespace, which is gone."""
    world = running()
    world.reachable = False
    for _ in range(3):
        world.look()
    assert world.reason("Running") == "RayUnreachable"
    assert world.kept == ["job-c1"]
    world.reachable = True
    world.settle(3)
    world.reachable, world.surroundings_due = False, True
    world.look()
    assert world.kept == ["job-c1"] * 2


def test_a_live_change_reaches_the_driver_and_a_deep_one_is_said_to_need_a_restart() -> None:
    world = running()
    world.edit(deadlines={"startSeconds": 1234})
    world.look()
    world.look()
    assert world.config_generation == world.generation == world.drivers[0].generation
    assert world.reason("Accepted") == "Valid"
    world.edit(trainer={"microBatchTokens": 4096})
    world.look()
    assert world.reason("Accepted") == "NeedsNewIncarnation"
    assert world.submissions == [1]


def test_without_storage_the_status_warns_that_progress_would_be_lost() -> None:
    spec = job_spec()
    del spec["checkpoint"]
    world = World(spec=spec)
    world.look()
    assert world.reason("CheckpointAvailable") == "NoStorage"


def test_an_invalid_spec_is_explained_and_nothing_is_created() -> None:
    world = World(spec=job_spec(retry={"backoffSeconds": 700}))
    world.look()
    assert world.reason("Accepted") == "InvalidSpec"
    assert "spec.retry.backoffSeconds" in world.status.by_type["Accepted"].message
    assert world.clusters == {}


def test_a_job_that_is_being_deleted_frees_its_pods_whoever_keeps_it() -> None:
    world = running()
    world.job_deleted, world.finalizers = True, ("example.com/keep",)
    assert [type(action) for action in world.look().actions] == [do.DeleteCluster]
    world.settle(5)
    assert (world.clusters, world.pods) == ({}, {})
    assert world.reason("Running") == "Deleting"
    assert world.status.by_type["Running"].message == "its finalizers: example.com/keep"
    assert world.status.attempts[0].reason == "Deleting"
    assert world.look().actions == ()


def test_a_job_that_is_deleted_without_what_it_owns_is_left_alone() -> None:
    world = running()
    world.job_deleted, world.finalizers = True, ("orphan",)
    assert world.look().actions == ()
    assert world.reason("Running") == "Training"


def test_a_finished_job_that_is_kept_goes_on_saying_how_it_ended() -> None:
    world = running()
    world.end(world.drivers[0], "succeeded", 0)
    world.settle(5)
    world.job_deleted, world.finalizers = True, ("example.com/keep",)
    world.look()
    assert world.reason("Running") == "Completed"


def test_what_is_wanted_of_a_driver_comes_before_the_job_file() -> None:
    world = running()
    world.edit(suspend=True)
    kinds = [type(action) for action in world.look().actions]
    assert kinds == [do.TellDriver, do.ApplyConfigMap, do.NoteGeneration]


def test_a_pod_that_is_taken_away_has_not_crashed() -> None:
    world = running()
    pod = next(pod for pod in world.pods.values() if pod.group == "rollout")
    taken = replace(pod, ready=False, ended=True, trouble="crash", message="Error, exit code 137")
    world.pods[pod.name] = replace(taken, deleting_since=world.now)
    world.look()
    assert world.reason("ClusterReady") == "PoolDegraded"
    world.pods[pod.name] = taken
    world.look()
    assert world.reason("ClusterReady") == "PodError"


def test_a_failed_job_quotes_the_end_of_its_drivers_log() -> None:
    world = running()
    world.drivers[0].lines = ("loading", "reading data", "no column question", "giving up")
    world.end(world.drivers[0], "failed", 65)
    world.look()
    said = world.status.by_type["Failed"]
    assert (said.status, said.reason) == ("True", "BadData")
    assert said.message == "ends with 65; its log ends: reading data | no column question | giving up"
    assert world.status.attempts[0].lines == ("loading", "reading data", "no column question", "giving up")
