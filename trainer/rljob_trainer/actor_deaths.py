"""Why a Ray actor's process is gone, in a few words: what Ray raises has a screenful."""

from __future__ import annotations

import re

from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from rljob_api.cluster import PERHAPS_MEMORY

DEATHS = (RayActorError, OutOfMemoryError)
"""What a call of an actor raises when its process is gone. Ray's memory monitor has an error of its own."""
KILLED = f"its process crashed or was killed{PERHAPS_MEMORY}"
"""All that is known of a process that is gone: the system kills without a word, and may be faster than Ray's monitor of
memory."""
_REASON = "The actor is dead because "
_PROCESS = "its worker process has died"
_MEMORY = re.compile(r"was (?P<used>\S+) used / (?P<limit>\S+) limit")


def cause_of_death(error: BaseException) -> str:
    """One sentence for one of ``DEATHS``."""
    text = str(error).strip()
    if isinstance(error, OutOfMemoryError):
        found = _MEMORY.search(text)
        room = f", {found['used']} of {found['limit']} were in use" if found else ""
        return f"out of memory{room}: Ray killed its process; give it more memory"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, RayActorError) and error.actor_init_failed:
        # The whole traceback; what was raised stands at its end.
        return f"it failed to initialize: {lines[-1]}"
    if isinstance(error, ActorUnavailableError) or not isinstance(error, RayActorError):
        return lines[0] if lines else type(error).__name__
    reasons = [line.removeprefix(_REASON) for line in lines if line.startswith(_REASON)]
    return reasons[0] if reasons and not reasons[0].startswith(_PROCESS) else KILLED
