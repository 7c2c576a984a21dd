"""No success without the driver's own word: its process may end with code 0 before the run has ended."""

from __future__ import annotations

from typing import Any

import pytest
from simulation import Driver, World, job_spec

from rljob_api.cluster import DRIVE_FINISHED
from rljob_api.status import DriverStatus, End

BEGAN = "attempt 1: loading PyTorch and Ray"
VANISHED = "the driver's process exited with code 0 before the run had ended"


class Unheard(World):
    """A world in which the operator has missed the last answers of drivers."""

    def answer(self, driver: Driver) -> DriverStatus:
        return super().answer(driver).model_copy(update={"end": None})


def ended_with_0(*lines: str, **sections: Any) -> Unheard:
    world = Unheard(spec=job_spec(**sections))
    world.settle(8)
    assert world.reason("Running") == "Training"
    world.drivers[0].state, world.drivers[0].exit_code, world.drivers[0].lines = "SUCCEEDED", 0, lines
    return world


def test_a_process_that_ends_with_0_before_the_run_has_failed_and_is_retried() -> None:
    world = ended_with_0(BEGAN, "step 0 of 3", retry={"limit": 1, "backoffSeconds": 10})
    world.look()
    first = world.status.attempts[0]
    assert (world.reason("Running"), first.reason, first.counted) == ("BackingOff", "DriverFailed", True)
    assert (first.message, first.exit_code) == (VANISHED, 0)
    world.settle(8)
    assert world.submissions == [1, 2]


def test_the_drivers_last_line_is_enough_for_success() -> None:
    world = ended_with_0(BEGAN, "step 3 of 3", f"{DRIVE_FINISHED}stop.steps = 3", "a worker's last words")
    world.look()
    assert (world.value("Succeeded"), world.status.by_type["Succeeded"].message) == ("True", "stop.steps = 3")


def test_the_drivers_last_answer_is_enough_for_success() -> None:
    world = World()
    world.settle(8)
    world.end(world.drivers[0], "succeeded", 0)
    world.look()
    assert (world.value("Succeeded"), world.status.by_type["Succeeded"].message) == ("True", "ends with 0")


def test_a_driver_that_says_that_it_failed_has_not_succeeded_whatever_its_exit_code() -> None:
    world = World(spec=job_spec(retry={"limit": 0}))
    world.settle(8)
    driver = world.drivers[0]
    driver.state, driver.exit_code = "SUCCEEDED", 0
    driver.end = End(kind="failed", reason="the engines are gone", exit_code=75, time=world.now)
    world.look()
    assert world.value("Failed") == "True"
    assert "the engines are gone" in world.status.by_type["Failed"].message


def test_a_log_that_cannot_be_read_is_asked_for_again_and_decides_then() -> None:
    world = ended_with_0()
    world.look()
    assert (world.value("Finished"), world.reason("Running")) == ("False", "RayUnreachable")
    assert world.status.last is not None
    assert world.status.last.ended is None
    world.drivers[0].lines = (BEGAN, f"{DRIVE_FINISHED}stop.steps = 3")
    world.wait(5)
    world.look()
    assert world.value("Succeeded") == "True"


def test_a_log_that_is_never_read_costs_the_cluster_after_progress_seconds() -> None:
    world = ended_with_0(deadlines={"progressSeconds": 600})
    world.settle(110, train=False)
    assert list(world.clusters) == ["job-c1"]
    world.settle(20, train=False)
    assert list(world.clusters) == ["job-c2"]
    assert (world.status.attempts[0].reason, world.status.failures) == ("RayUnreachable", 0)


@pytest.mark.parametrize(
    ("lines", "succeeds"), [((BEGAN,), False), ((BEGAN, f"{DRIVE_FINISHED}stop.steps = 3"), True), ((), False)]
)
def test_the_end_of_a_run_at_its_deadline_is_judged_alike(lines: tuple[str, ...], succeeds: bool) -> None:
    world = ended_with_0(*lines, deadlines={"runSeconds": 3600, "startSeconds": 600, "progressSeconds": 600})
    world.wait(3600)
    world.look()
    assert world.value("Finished") == ("True" if lines else "False")
    world.wait(900 + 30)
    world.look()
    assert (world.value("Succeeded"), world.value("Failed")) == (("True", "False") if succeeds else ("False", "True"))


def test_a_job_that_is_suspended_meanwhile_resumes_instead_of_succeeding() -> None:
    world = ended_with_0(BEGAN)
    world.edit(suspend=True)
    world.settle(4, train=False)
    assert (world.value("Succeeded"), world.value("Suspended")) == ("False", "True")
