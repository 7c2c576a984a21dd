"""The errors a user meets, and the exit code each one ends the process with.

Every message says what was wrong, where, and what to do. Anything that is not one of these is a bug and shows a
traceback.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from typing import Any

from rljob_trainer.texts import writable

NO_ROOM = 73
"""Exit code of whatever failed because a disk is full, or a quota of it used up: as long as it is, every retry would
fail alike. EX_CANTCREAT of sysexits.h."""

CHANGED_JOB = "in a new job with its own output that starts from this run's checkpoint (restore.from, or --resume)"
"""Where a field can be changed that must stay what it is in a run that has begun (``record/same_job.py``)."""


class RLJobError(Exception):
    """Base of all errors with a message meant for the user, which any file and stream can hold."""

    exit_code = 1

    def __str__(self) -> str:
        return writable(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled, on its way from a rank's process, an error loses the errors that it was raised from.
        return type(self), self.args, {**self.__dict__, "lacked_room": lacks_room(self)}


def exit_code_of(error: BaseException) -> int:
    """The exit code with which ``error`` ends the process: its own, 1 for a bug, or ``NO_ROOM`` where space was wanting
    and nothing is said to be wrong with the job's file or data."""
    code: int = getattr(error, "exit_code", 1)
    return NO_ROOM if code in (1, 75) and lacks_room(error) else code


def lacks_room(error: BaseException) -> bool:
    """Whether ``error`` comes from a disk that is full, or from one of its quotas."""
    return any(
        getattr(cause, "lacked_room", False)
        or (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT))
        or (isinstance(cause, sqlite3.Error) and getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL)
        for cause in causes(error)
    )


def reading_failed(error: BaseException) -> bool:
    """Whether ``error`` comes from the operating system, of a file that is there: its disk or its server failed, it may
    not be opened, there are too many open ones."""
    return any(
        isinstance(cause, OSError)
        and cause.errno is not None
        and not isinstance(cause, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        for cause in causes(error)
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """``error``, and what it was raised from or while handling, to the first."""
    seen: set[int] = set()
    open_ones = [error]
    while open_ones:
        cause = open_ones.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        # Those of a collective save of torch's, by rank, each with its place.
        failures = getattr(cause, "failures", None)
        inner = [item[0] for item in failures.values()] if isinstance(failures, dict) else []
        context = None if cause.__suppress_context__ else cause.__context__
        open_ones += [item for item in (cause.__cause__, context, *inner) if isinstance(item, BaseException)]


class JobFileError(RLJobError):
    """The job file cannot be run as written (exit code 64: retrying does not help)."""

    exit_code = 64


class DataError(RLJobError):
    """A data set, prompt or reward input is bad (exit code 65: retrying does not help)."""

    exit_code = 65


class RewardError(DataError):
    """A reward function raised or hung on a sample, and the job says that this stops the run."""


class ProgramError(DataError):
    """The program of an environment, or a tool of the job's own, raised or did what it may not."""


class WorldFailedError(RLJobError):
    """What an environment's program calls has failed as often as it was called, which says nothing about the model
    (exit code 75: try again)."""

    exit_code = 75


class RewardWorkerError(RLJobError):
    """Processes that score samples were lost, and neither function nor row need be at fault (exit code 75: try
    again)."""

    exit_code = 75


class UnscoredError(RLJobError):
    """A sample has no score, and the job says that its group is left out (``spec.reward.onError: drop``). Where nothing
    can be left out it ends the run."""

    def __init__(self, message: str, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CheckpointError(RLJobError):
    """A checkpoint that a run is to go on from cannot be used: it is damaged, incomplete, or that of another job (exit
    code 66, EX_NOINPUT of sysexits.h: retrying does not help)."""

    exit_code = 66


class UnsavedError(CheckpointError):
    """A checkpoint cannot be written."""

    exit_code = 1


class UnreadableError(CheckpointError):
    """A file of a checkpoint is there and cannot be read: no permission, a disk or a file server that fails, no file
    descriptors left. That says nothing about what is in it (exit code 75: try again)."""

    exit_code = 75


class OtherFormatError(CheckpointError):
    """A checkpoint that another version of rljob wrote."""


class BucketError(CheckpointError):
    """An object store refuses, or cannot be reached; the message names the address."""

    exit_code = 1


class UnreachableError(BucketError):
    """An object store does not answer now: its server, or the network on the way, is away or busy (exit code 75: try
    again)."""

    exit_code = 75


class DeadlineError(RLJobError):
    """A wait outlasted its deadline; the message names who was waited for (exit code 75: try again)."""

    exit_code = 75


class EngineError(RLJobError):
    """An engine failed or refused a request."""

    exit_code = 75


class LearnerError(RLJobError):
    """A trainer rank failed."""

    exit_code = 75


class StepGivenUpError(RLJobError):
    """A training step ended on request before it changed any weights (``learner/giving_up.py``)."""


class IntegrityError(RLJobError):
    """What is about to be trained on is not what was made (exit code 75: the run goes on from its last checkpoint)."""

    exit_code = 75


class OutputError(RLJobError):
    """Something cannot be written into the output folder: no space, no permission."""
