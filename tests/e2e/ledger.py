"""What became of every prompt of a job, read from the ledger in its newest checkpoint on the results volume."""

from __future__ import annotations

import base64
import sqlite3
from collections import Counter
from typing import Any

from world import World

GROUPS_PER_STEP = 256
"""`batch.groups` of the quick start, and the size of a pull in every pipeline of this suite."""


def rows(world: World, folder: str) -> list[dict[str, Any]]:
    """The prompt groups of a state folder, in the order in which they were handed out."""
    newest = world.in_results("ls", f"{folder}/checkpoints").split()[-1]
    encoded = world.in_results("base64", f"{folder}/checkpoints/{newest}/ledger.sqlite")
    return rows_of(base64.b64decode(encoded))


def rows_of(ledger: bytes) -> list[dict[str, Any]]:
    """The same, of a ledger's file."""
    database = sqlite3.connect(":memory:")
    database.deserialize(ledger)
    database.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in database.execute("SELECT * FROM groups ORDER BY ordinal")]
    finally:
        database.close()


def assert_every_prompt_once(world: World, job: str, steps: int, *, may_be_open: bool = False) -> list[dict[str, Any]]:
    """Every prompt was handed out once and trained in one step, and every step had a full batch.

    Args:
        may_be_open: the job generates ahead, or was stopped in the middle of a step: some prompts are in no step yet.

    Returns the rows.
    """
    found = rows(world, world.state_folder(job))
    check_every_prompt_once(found, steps, may_be_open=may_be_open)
    return found


def check_every_prompt_once(found: list[dict[str, Any]], steps: int, *, may_be_open: bool = False) -> None:
    """``assert_every_prompt_once`` of rows."""
    assert [row["ordinal"] for row in found] == list(range(len(found)))
    places = Counter((row["epoch"], row["source"], row["row"]) for row in found)
    assert not [place for place, count in places.items() if count > 1], "a prompt was handed out twice in an epoch"
    trained = Counter(row["trained_step"] for row in found if row["state"] == "trained")
    assert trained == dict.fromkeys(range(1, steps + 1), GROUPS_PER_STEP)
    others = {row["state"] for row in found} - {"trained"}
    assert others <= ({"running", "finished"} if may_be_open else set())
