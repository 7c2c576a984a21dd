"""What the status keeps of a driver's words, and for how long: failures, step, and what it waits for."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest
from promql import evaluate
from simulation import Driver, World, job_spec
from test_alerts import EXPRESSIONS

from rljob_api.status import Ages, CurrentWait, DriverStatus
from rljob_operator.metrics import Metrics


class Waiting(World):
    """A world with drivers that wait for their engines."""

    def answer(self, driver: Driver) -> DriverStatus:
        waiting = CurrentWait(who="driver", reason="2 engines to start", since=self.now)
        return super().answer(driver).model_copy(update={"waiting": waiting, "eta": self.now})


class Aged(World):
    """A world with drivers that tell how old the samples were that they have trained on."""

    def answer(self, driver: Driver) -> DriverStatus:
        ages = Ages(mean=0.5, max=1, bound=1) if driver.step else None
        return super().answer(driver).model_copy(update={"ages": ages})


def training(kind: type[World] = World, **sections: Any) -> World:
    world = kind(spec=job_spec(**sections))
    world.settle(8)
    assert world.reason("Running") == "Training"
    return world


def failed_twice(**sections: Any) -> World:
    """A world whose third attempt trains."""
    world = training(retry={"limit": 3, "backoffSeconds": 1}, **sections)
    for _ in range(2):
        world.end(world.running()[0], "failed", 1)
        world.settle(6)
    assert (world.reason("Running"), world.status.failures) == ("Training", 2)
    return world


def retrying(world: World) -> bool:
    """Whether the alert about a job that fails again and again fires."""
    metrics = Metrics()
    metrics.take(world.observed().job, world.look())
    return bool(evaluate(EXPRESSIONS["RLJobRetrying"], generate_latest(metrics.registry).decode()))


def step(world: World) -> int:
    assert world.status.progress is not None
    return world.status.progress.step


def test_a_new_checkpoint_wipes_failures_out_at_once() -> None:
    world = failed_twice()
    assert retrying(world)
    world.checkpoint_step = 7
    world.look()
    assert world.status.failures == 0
    assert not retrying(world)
    # From there on they count anew.
    for failures in (1, 2):
        world.end(world.running()[0], "failed", 1)
        world.look()
        assert world.status.failures == failures
        world.settle(6)


def test_the_last_checkpoint_of_a_run_wipes_failures_out_too() -> None:
    world = failed_twice()
    world.checkpoint_step = 7
    world.end(world.running()[0], "succeeded", 0)
    world.look()
    assert (world.value("Succeeded"), world.status.failures) == ("True", 0)


def test_a_checkpoint_that_was_there_before_wipes_nothing_out() -> None:
    world = training(retry={"limit": 3, "backoffSeconds": 1})
    world.checkpoint_step = 7
    for failures in (1, 2):
        world.look()
        world.end(world.running()[0], "failed", 1)
        world.settle(6)
        assert (world.reason("Running"), world.status.failures) == ("Training", failures)


@pytest.mark.parametrize("code", [0, 65])
def test_a_job_that_has_ended_retries_no_more(code: int) -> None:
    world = failed_twice()
    world.end(world.running()[0], "failed" if code else "succeeded", code)
    world.look()
    assert world.value("Finished") == "True"
    assert not retrying(world)


def test_the_step_of_the_checkpoint_stands_until_a_resumed_driver_says_its_own() -> None:
    world = training()
    world.drivers[0].step, world.checkpoint_step = 57, 50
    world.look()
    world.end(world.running()[0], "failed", 75)
    world.settle(6, train=False)
    assert world.drivers[-1].step == 0
    assert (world.reason("Running"), step(world)) == ("Training", 50)
    assert world.status.by_type["Progressing"].message == "step 50"
    world.drivers[-1].step = 51
    world.look()
    assert step(world) == 51
    # An older checkpoint, because the newest could not be read.
    world.drivers[-1].step = 41
    world.look()
    assert step(world) == 41


def test_without_a_checkpoint_a_retry_starts_over() -> None:
    world = training()
    world.end(world.running()[0], "failed", 75)
    world.settle(6, train=False)
    assert (world.reason("Running"), step(world)) == ("Training", 0)


@pytest.mark.parametrize("checkpoint", [None, 50])
def test_the_deadline_of_the_first_step_does_not_come_back_with_a_retry(checkpoint: int | None) -> None:
    world = training(Aged, deadlines={"startSeconds": 600, "progressSeconds": 600})
    world.checkpoint_step = checkpoint
    world.wait(3600)
    world.look()
    world.end(world.running()[0], "failed", 75)
    world.settle(6, train=False)
    assert world.reason("Running") == "Training"


def lose_head(world: World) -> None:
    head = next(name for name, pod in world.pods.items() if pod.group == "head")
    world.lose_pod(head, disrupted=True)


def suspend(world: World) -> None:
    world.edit(suspend=True)
    world.look()
    world.drive()


def fail(world: World) -> None:
    world.end(world.running()[0], "failed", 1)


@pytest.mark.parametrize("happens", [lose_head, suspend, fail, World.hold])
def test_what_a_driver_waited_for_ends_with_its_attempt(happens: Any) -> None:
    world = training(Waiting)
    assert world.status.progress is not None
    assert world.status.progress.waiting_for == "driver: 2 engines to start"
    happens(world)
    world.look()
    assert world.status.last is not None
    assert world.status.last.ended is not None
    progress = world.status.progress
    assert (progress.waiting_for, progress.eta, progress.engines_ready, progress.ranks_ready) == (None,) * 4
    assert progress.step > 0
