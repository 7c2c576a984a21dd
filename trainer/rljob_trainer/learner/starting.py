"""How a learner comes up: the driver's one way to have one, whatever its backend."""

from __future__ import annotations

from rljob_trainer.learner.backend import BackendRank
from rljob_trainer.learner.backends import backend_of
from rljob_trainer.learner.group import LearnerGroup
from rljob_trainer.learner.options import GroupOptions
from rljob_trainer.learner.protocol import RankedLearner
from rljob_trainer.learner.settings import LearnerSettings


async def start_learner(settings: LearnerSettings, options: GroupOptions) -> RankedLearner:
    """Starts all ranks of ``settings.backend`` and waits until their models are ready. Ray must be initialised.

    Raises ``JobFileError`` for a backend that is not there or cannot do this job, and ``LearnerError`` when starting
    takes longer than ``options.start_seconds`` or a rank fails.
    """
    return await LearnerGroup.start(settings, options)


def one_rank(settings: LearnerSettings) -> BackendRank:
    """A learner of one rank in this process, of the backend that is built in: for a state that is read, by canonical
    names, and not trained on. Raises ``JobFileError`` for a model folder that cannot be read."""
    return backend_of(settings.backend).start(settings, rank=0, address="", timeout_seconds=0.0)
