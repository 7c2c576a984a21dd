"""When the processes of a lost engine are gone, and with them what they had on a device. Asked of the ranks: one of
them is where the engine was."""

from __future__ import annotations

import logging
import time

import psutil  # type: ignore[import-untyped]

from rljob_trainer.learner.backend import BackendRank
from rljob_trainer.rollout.actor import EnginePlace, own_pod

END_SECONDS = 30.0
"""For the process of a lost engine to be gone, and with it what it had on the device."""
_PAUSE_SECONDS = 0.1

log = logging.getLogger(__name__)


def wait_until_gone(rank: BackendRank, place: EnginePlace, seconds: float = END_SECONDS) -> None:
    """On a rank in the engine's pod: returns when its processes have ended, and with a warning after ``seconds``; on
    any other at once."""
    if place.pod != own_pod():
        return
    until = time.monotonic() + seconds
    while left := [process for process in (place.process, *place.children) if _is_there(process)]:
        if time.monotonic() > until:
            log.warning("processes %s of a lost engine are still running after %.0f s", left, seconds)
            return
        time.sleep(_PAUSE_SECONDS)


def _is_there(process: int) -> bool:
    """A process that has ended and is not yet waited for holds nothing any more."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
