"""Why a Ray actor's process is gone, in a few words: what Ray raises has a screenful."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError, RayActorError

DEATHS = (RayActorError, OutOfMemoryError)
"""What a call of an actor raises when its process is gone. Ray's memory monitor has an error of its own."""
_MEMORY = re.compile(r"was (?P<used>\S+) used / (?P<limit>\S+) limit")


def cause_of_death(error: BaseException) -> str:
    """One sentence for one of ``DEATHS``."""
    text = str(error).strip()
    if isinstance(error, OutOfMemoryError):
        found = _MEMORY.search(text)
        room = f", {found['used']} of {found['limit']} were in use" if found else ""
        return f"out of memory{room}: Ray ended its process; give it more memory"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, RayActorError) and error.actor_init_failed:
        # The whole traceback; what was raised stands at its end.
        return f"it could not be built: {lines[-1]}"
    return lines[0] if lines else type(error).__name__
