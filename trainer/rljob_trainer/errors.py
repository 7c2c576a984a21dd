"""The errors a user meets, and the exit code each one ends the process with.

Every message says what was wrong, where, and what to do. Anything that is not one of these is a bug and shows a
traceback.
"""

from __future__ import annotations

from rljob_trainer.texts import writable


class RLJobError(Exception):
    """Base of all errors with a message meant for the user, which any file and stream can hold."""

    exit_code = 1

    def __str__(self) -> str:
        return writable(super().__str__())


class JobFileError(RLJobError):
    """The job file cannot be run as written (exit code 64: retrying does not help)."""

    exit_code = 64


class DataError(RLJobError):
    """A data set, prompt or reward input is bad (exit code 65: retrying does not help)."""

    exit_code = 65


class RewardError(DataError):
    """A reward function raised or hung on a sample, and the job says that this stops the run."""


class RewardWorkerError(RLJobError):
    """Processes that score samples were lost, and neither function nor row need be at fault (exit code 75: try
    again)."""

    exit_code = 75


class CheckpointError(RLJobError):
    """A checkpoint cannot be read or written."""


class BucketError(CheckpointError):
    """An object store cannot be reached, or refuses; the message names the address."""


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
