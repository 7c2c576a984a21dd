"""Attempts that end because there is no space left where the driver must write. Pure.

The driver waits by itself where it can: most checkpoints may fail, and rows and versions wait for room. What is left,
the last checkpoint above all, ends it with `NO_ROOM`. As long as the disk is full every retry would fail alike, so none
is counted: the job pauses for `spec.retry.maxBackoffSeconds` and looks for room again, with its pods at hand. After
`spec.deadlines.startSeconds` of it, without a new checkpoint in between, the job has failed. What is told all the time
is the first error: those that follow (a database that cannot be opened, a log without its end) tell less.
"""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.job_status import Attempt
from rljob_operator.conditions import Reason, Type
from rljob_operator.draft import Draft
from rljob_operator.endings import attempt_failed, finish

NO_ROOM = 73
"""The driver's exit code."""


def first_alike(attempts: Sequence[Attempt]) -> Attempt | None:
    """The first of the newest attempts that all ended for want of space, under one and the same checkpoint."""
    first = None
    for attempt in reversed(attempts):
        if attempt.reason != Reason.NO_SPACE.title:
            break
        if first is not None and attempt.checkpoint_step != first.checkpoint_step:
            break
        first = attempt
    return first


def ended(draft: Draft, message: str) -> bool:
    """Closes the open attempt; False when there has been no room for too long and the job is given up."""
    attempt_failed(draft, Reason.NO_SPACE, message, counts=False)
    first = first_alike(draft.status.attempts)
    assert first is not None
    assert first.ended is not None
    seconds = round((draft.now - first.ended).total_seconds())
    limit = draft.resolved.spec.deadlines.start_seconds
    if seconds < limit:
        return True
    text = f"attempt {first.number}: {first.message}; there was no space for {seconds} s"
    finish(draft, Type.FAILED, Reason.NO_SPACE, f"{text}, spec.deadlines.startSeconds is {limit}")
    return False
