"""What Ray raises when an actor's process is gone, in a few words. The texts are those of Ray's own processes."""

from __future__ import annotations

import re

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayActorError

from rljob_trainer.actor_deaths import cause_of_death

PROCESS = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file."
)
NODE = "The actor is dead because its node has died. Node Id: 1f2e"


def died(message: str) -> ActorDiedError:
    return ActorDiedError(ActorDiedErrorContext(error_message=message, class_name="EngineActor", actor_id=b"\0" * 16))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        # The kernel says nothing, and Ray's own list of what it may have been has a dozen lines.
        pytest.param(died(PROCESS), r"^its process crashed or was killed \(.* out of memory\)$", id="process"),
        pytest.param(RayActorError(), r"^its process crashed or was killed \(.*\)$", id="nothing is known"),
        pytest.param(ActorDiedError(), r"^its process crashed or was killed \(.*\)$", id="nothing is known of a death"),
        pytest.param(died(NODE), "^its node has died. Node Id: 1f2e$", id="node"),
        pytest.param(
            OutOfMemoryError("Memory on the node was 0.47GB used / 0.49GB limit (0.95)"),
            "^out of memory, 0.47GB of 0.49GB were in use: Ray killed its process; give it more memory$",
            id="Ray was first",
        ),
    ],
)
def test_a_death_is_told_in_one_line(error: BaseException, told: str) -> None:
    assert re.search(told, cause_of_death(error))


def test_an_actor_out_of_reach_was_not_killed() -> None:
    told = cause_of_death(ActorUnavailableError("no answer\nfor a while", b"\0" * 16))
    assert "no answer" in told
    assert "killed" not in told
    assert "\n" not in told
