"""What happens when one of `spec.deadlines` passes, decided by `reconcile` in a simulated world."""

from __future__ import annotations

from datetime import timedelta

from simulation import SETTINGS, World, job_spec

from rljob_operator import actions as do

RUN = {"startSeconds": 50, "progressSeconds": 50, "runSeconds": 100}


def training(**deadlines: int) -> World:
    """A world in which attempt 1 has made some steps."""
    world = World(spec=job_spec(deadlines=deadlines))
    world.settle(8)
    assert world.reason("Running") == "Training"
    return world


def message(world: World, kind: str) -> str:
    return world.status.by_type[kind].message


def test_the_start_deadline_names_what_was_missing() -> None:
    world = World(spec=job_spec(deadlines={"startSeconds": 60, "progressSeconds": 60}))
    world.look()
    world.kuberay()
    world.look()
    world.wait(60)
    world.look()
    assert world.reason("Failed") == "StartDeadlineExceeded"
    assert "rollout: 2 of 2 pods wait" in message(world, "Failed")


def test_a_driver_that_never_begins_is_stopped_and_its_last_lines_are_told() -> None:
    world = World(spec=job_spec(deadlines={"startSeconds": 60, "progressSeconds": 60}))
    world.settle(4, train=False)
    (driver,) = world.drivers
    driver.lines = ("loading the model", "waiting for s3://models/tiny")
    world.wait(60)
    decision = world.look()
    assert [type(action) for action in decision.actions] == [do.StopDriver]
    assert (world.value("Running"), world.reason("Running")) == ("True", "StartDeadlineExceeded")
    assert driver.state == "STOPPED"
    world.wait(2)
    decision = world.look()
    assert [type(action) for action in decision.actions] == [do.DeleteCluster]
    assert world.reason("Failed") == "StartDeadlineExceeded"
    assert message(world, "Failed").endswith("its log ends: loading the model | waiting for s3://models/tiny")


def test_at_the_run_deadline_the_driver_saves_its_work_first() -> None:
    world = training(**RUN)
    (driver,) = world.drivers
    world.wait(100)
    world.look()
    assert world.value("Running") == "True"
    assert message(world, "Running") == "after 100 s; attempt 1 saves a checkpoint"
    assert driver.desired is not None
    assert driver.desired.suspend
    world.checkpoint_step = 7
    driver.lines = ("a checkpoint is written",)
    world.drive()
    world.wait(5)
    decision = world.look()
    assert [type(action) for action in decision.actions] == [do.DeleteCluster]
    assert world.reason("Failed") == world.reason("Finished") == "RunDeadlineExceeded"
    assert message(world, "Failed") == "after 100 s; its log ends: a checkpoint is written"
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.step == 7
    (attempt,) = world.status.attempts
    assert (attempt.reason, attempt.exit_code) == ("RunDeadlineExceeded", 75)
    world.settle(5)
    assert (world.clusters, world.submissions) == ({}, [1])


def test_a_job_that_is_done_before_it_was_stopped_has_succeeded() -> None:
    world = training(**RUN)
    world.wait(100)
    world.look()
    world.end(world.drivers[0], "succeeded", 0)
    world.look()
    assert world.value("Succeeded") == "True"


def test_a_driver_that_does_not_end_by_itself_is_stopped_and_then_left() -> None:
    world = training(**RUN)
    (driver,) = world.drivers
    world.wait(100)
    world.look()
    world.wait(SETTINGS.suspend_grace_seconds - 25)
    assert [type(action) for action in world.look().actions] == [do.StopDriver]
    driver.state = "RUNNING"
    world.wait(31)
    world.look()
    assert world.reason("Failed") == "RunDeadlineExceeded"


def test_without_a_head_to_talk_to_the_deadline_ends_the_job_at_once() -> None:
    world = training(**RUN)
    world.reachable = False
    world.wait(100)
    world.look()
    assert world.reason("Failed") == "RunDeadlineExceeded"


def test_more_time_lets_a_job_go_on_that_was_to_end() -> None:
    world = training(**RUN)
    world.wait(100)
    world.look()
    world.drive()
    world.edit(deadlines={**RUN, "runSeconds": 100_000})
    world.settle(30)
    assert world.submissions == [1, 2]
    assert world.reason("Running") == "Training"


def test_a_night_in_which_a_job_is_suspended_counts_for_no_deadline() -> None:
    world = World(spec=job_spec(deadlines={"startSeconds": 3600, "progressSeconds": 3600, "runSeconds": 7200}))
    world.look()
    world.kuberay()
    world.look()
    assert world.status.start_time is not None
    for _ in range(2):
        world.edit(suspend=True)
        world.settle(4)
        assert world.value("Suspended") == "True"
        world.wait(8 * 3600)
        world.settle(2)
        world.edit(suspend=False)
        # Before the first step, and then again after some.
        world.settle(6)
        assert world.reason("Running") == "Training"
    assert world.status.paused_seconds >= 2 * 8 * 3600
    world.wait(7200)
    world.look()
    assert world.reason("Running") == "RunDeadlineExceeded"


def test_a_job_that_was_suspended_under_an_operator_without_this_account_is_paused_since_then() -> None:
    world = training(**RUN)
    world.edit(suspend=True)
    world.settle(4)
    assert world.value("Suspended") == "True"
    world.status = world.status.changed(pause_time=None)
    world.wait(1000)
    world.look()
    assert world.status.pause_time == world.status.by_type["Suspended"].since
    world.edit(suspend=False)
    world.settle(6)
    assert world.reason("Running") == "Training"


def test_the_time_that_a_queue_makes_a_job_wait_again_counts_for_no_deadline() -> None:
    world = World(spec=job_spec(queueName="rl", deadlines={"startSeconds": 600, "progressSeconds": 600}))
    world.look()
    world.hold()
    world.wait(3600)
    world.look()
    world.admit()
    world.look()
    world.wait(500)
    world.hold("preempted for a job of higher priority", taken_back=True)
    world.look()
    world.wait(24 * 3600)
    assert world.look().requeue_after is None
    assert world.value("Failed") == "False"
    world.admit()
    world.look()
    world.wait(99)
    world.look()
    assert world.value("Failed") == "False"
    world.wait(1)
    world.look()
    assert world.reason("Failed") == "StartDeadlineExceeded"


def test_a_frozen_driver_does_not_read_training() -> None:
    world = training(startSeconds=3600, progressSeconds=600)
    world.silent_since = world.now
    world.wait(SETTINGS.silence_seconds - 1)
    world.look()
    assert (world.value("Running"), world.reason("Running")) == ("True", "Training")
    world.wait(1)
    decision = world.look()
    # It runs, as Ray says; that it trains nobody knows.
    assert (world.value("Running"), world.reason("Running")) == ("True", "NoAnswer")
    assert message(world, "Running") == "attempt 1: no answer within 5 s"
    assert [event.reason for event in decision.events if event.kind == "Warning"] == ["NoAnswer"]
    # An operator that has just begun has not waited for an answer yet, and has none either.
    world.silent_since = world.now
    world.look()
    assert (world.reason("Running"), world.reason("Progressing")) == ("NoAnswer", "NoAnswer")
    world.now = world.silent_since + timedelta(seconds=600)
    world.look()
    assert (world.value("Running"), world.reason("Running")) == ("True", "Stalled")
    world.silent_since = None


def test_a_driver_that_answers_again_trains_again() -> None:
    world = training(startSeconds=3600, progressSeconds=600)
    world.silent_since = world.now
    world.wait(SETTINGS.silence_seconds)
    world.look()
    world.silent_since = None
    world.look()
    assert (world.reason("Running"), world.reason("Progressing")) == ("Training", "Moving")


def test_a_silent_driver_is_named_then_stopped_and_tried_again() -> None:
    world = training(startSeconds=3600, progressSeconds=600)
    world.silent_since = world.now
    world.wait(SETTINGS.silence_seconds)
    world.look()
    assert (world.value("Progressing"), world.reason("Progressing")) == ("Unknown", "NoAnswer")
    assert message(world, "Progressing") == "no answer within 5 s"
    world.now = world.silent_since + timedelta(seconds=600)
    decision = world.look()
    assert [type(action) for action in decision.actions] == [do.StopDriver]
    assert world.reason("Progressing") == "Stalled"
    assert message(world, "Progressing") == "no answer for 600 s: no answer within 5 s"
    world.silent_since = None
    world.settle(10)
    first, second = world.status.attempts
    assert (first.reason, first.counted, second.ended) == ("Stalled", True, None)
    assert world.reason("Running") == "Training"
