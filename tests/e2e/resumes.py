"""Whether a later attempt went on from a checkpoint: steps and prompts alone don't tell it from one that began anew."""

from __future__ import annotations

import re
from typing import Any

from world import World

RESUMING = re.compile(r"resuming from the checkpoint of step (\d+)")
"""What the driver says of it."""


def assert_resumed(world: World, job: str, rows: list[dict[str, Any]]) -> None:
    """``check_resumed`` of a job that keeps its state on the results volume."""
    found = world.get("rlj", job)
    check_resumed(found, world.driver_log(job, found["status"]["attempts"][-1]["attempt"]), rows)


def check_resumed(job: dict[str, Any], log: str, rows: list[dict[str, Any]]) -> None:
    """The last attempt began with the newest checkpoint that was known before, or one that nobody had heard of yet.

    Args:
        log: what the last attempt's driver said.
        rows: the prompt groups of the job's last ledger.
    """
    *earlier, last = job["status"]["attempts"]
    assert earlier, "the job had one attempt only"
    said = RESUMING.search(log)
    assert said, f"attempt {last['attempt']} did not resume; its log begins: {log[:1000]}"
    step = int(said[1])
    # The operator hears of a checkpoint some seconds after it was written.
    assert step >= max(1, *(attempt.get("checkpointStep", 0) for attempt in earlier))
    # A checkpoint carries the ledger: what was trained before it stays the earlier attempts'. (Of later steps nothing
    # follows: prompts that had been answered in time for the checkpoint are trained without being asked again.)
    attempts = {row["attempt"] for row in rows if row["state"] == "trained" and row["trained_step"] <= step}
    assert attempts <= {attempt["attempt"] for attempt in earlier}, (
        f"steps 1 to {step} are those of attempts {attempts}"
    )
    assert attempts, f"no prompt was trained in steps 1 to {step}"
