"""How a run can end, and the exit code that says so."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Ending:
    """``succeeded``: the job is done. ``stopped``: a signal asked for it; the same command continues. ``suspended``:
    the operator asked for it; the next attempt continues."""

    status: Literal["succeeded", "stopped", "suspended"]
    reason: str
    signal: signal.Signals | None = None

    @property
    def told(self) -> str:
        """How people call it: as the summary does, but for what the operator asked for."""
        return "interrupted" if self.status == "stopped" else self.status

    @property
    def exit_code(self) -> int:
        """0, or 75 (try again) when suspended, or what a shell reports for the signal."""
        if self.status == "suspended":
            return 75
        return 0 if self.signal is None else 128 + self.signal
