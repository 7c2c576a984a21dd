"""Attempts that end because a disk is full: no retry is used up, the first error is told, and it has an end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from simulation import START, World, job_spec

NO_ROOM = 73
"""The driver's exit code, EX_CANTCREAT of sysexits.h."""
MORE = "cannot open the ledger: database or disk is full"


def training(**sections: Any) -> World:
    world = World(spec=job_spec(retry={"limit": 2, "backoffSeconds": 10, "maxBackoffSeconds": 300}, **sections))
    world.settle(6)
    assert world.reason("Running") == "Training"
    return world


def fill_up(world: World, error: str) -> None:
    """The running driver finds the disk full."""
    (driver,) = world.running()
    world.end(driver, "failed", NO_ROOM)
    assert driver.end is not None
    driver.end = driver.end.model_copy(update={"reason": error})
    world.look()


def until_the_next_attempt(world: World) -> None:
    for _ in range(20):
        if world.running():
            return
        world.settle(1, seconds=50)
    raise AssertionError("no attempt begins")


def message(world: World, kind: str) -> str:
    return world.status.by_type[kind].message


def test_retries_that_would_fail_alike_are_not_used_up_and_the_job_goes_on_once_there_is_room() -> None:
    world = training()
    for number in range(1, 7):
        fill_up(world, "cannot write the checkpoint: No space left on device" if number == 1 else MORE)
        assert (world.value("Running"), world.reason("Running")) == ("False", "NoSpace")
        # The first error: what fails afterwards follows from it, or tells less.
        assert message(world, "Running").startswith("attempt 1: cannot write the checkpoint: No space left on device")
        assert f"attempt {number + 1} starts in 300 s" in message(world, "Running")
        until_the_next_attempt(world)
    world.settle(3)
    assert world.reason("Running") == "Training"
    assert world.status.failures == 0
    assert {(item.reason, item.counted, item.exit_code) for item in world.status.attempts[:-1]} == {
        ("NoSpace", False, NO_ROOM)
    }


def test_a_disk_that_stays_full_fails_the_job_after_the_start_deadline() -> None:
    world = training(deadlines={"startSeconds": 1000})
    fill_up(world, "cannot write the checkpoint: No space left on device")
    first = world.now
    while world.value("Finished") != "True":
        until_the_next_attempt(world)
        fill_up(world, MORE)
    # Pauses of 300 s: the fourth retry is the first one that ends after the deadline.
    assert timedelta(seconds=1000) <= world.now - first < timedelta(seconds=1500)
    assert world.reason("Failed") == "NoSpace"
    assert message(world, "Failed").startswith(
        "attempt 1: cannot write the checkpoint: No space left on device; there was no space for "
    )
    assert world.status.failures == 0


def test_the_first_error_outlasts_the_list_of_attempts() -> None:
    world = training()
    for number in range(1, 16):
        fill_up(world, "cannot write the checkpoint: No space left on device" if number == 1 else MORE)
        if world.value("Finished") == "True":
            break
        until_the_next_attempt(world)
    assert world.reason("Failed") == "NoSpace"
    assert message(world, "Failed").startswith("attempt 1: cannot write the checkpoint: No space left on device")
    assert [item.number for item in world.status.attempts][:2] != [1, 2]
    assert len(world.status.attempts) == 10


def test_a_checkpoint_in_between_makes_it_another_lack_of_space() -> None:
    world = training(deadlines={"startSeconds": 500})
    for step in range(1, 6):
        world.checkpoint_step = step
        world.settle(1, seconds=1)
        fill_up(world, f"after step {step}")
        assert message(world, "Running").startswith(f"attempt {step}: after step {step}")
        until_the_next_attempt(world)
    assert world.value("Failed") == "False"
    assert world.now - START > timedelta(seconds=4 * 300)


@pytest.mark.parametrize("code", [1, 75])
def test_other_failures_count_as_before(code: int) -> None:
    world = training()
    (driver,) = world.running()
    world.end(driver, "failed", code)
    world.look()
    assert (world.reason("Running"), world.status.failures) == ("BackingOff", 1)
