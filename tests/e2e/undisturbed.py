"""Jobs that train for as long as it takes, however fast steps are, while something beside them is taken away."""

from __future__ import annotations

from typing import Any

from ledger import assert_every_prompt_once
from world import World

FOREVER = 100_000


def endless(world: World, name: str) -> dict[str, Any]:
    """A job that trains until it is suspended."""
    return world.job_document(name, stop={"steps": FOREVER}, validation={"every": FOREVER, "atStart": False})


def identities(world: World, job: str) -> set[str]:
    """The pods of a job: another one of the same name is another one."""
    return {pod["metadata"]["uid"] for pod in world.pods(job)}


def assert_undisturbed(world: World, job: str) -> None:
    """Suspends a job that has trained in its first attempt, on its first cluster, each step and each prompt once."""
    status = world.suspend(job)["status"]
    (attempt,) = status["attempts"]
    assert (attempt["reason"], attempt["incarnation"]) == ("Suspended", 1)
    steps = status["checkpoint"]["step"]
    assert [line["step"] for line in world.metrics(job)] == list(range(1, steps + 1))
    assert_every_prompt_once(world, job, steps, may_be_open=True)
