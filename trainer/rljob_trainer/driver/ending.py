"""How a run can end, and the exit code that says so."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Ending:
    """``succeeded``: the job is done. ``stopped``: somebody asked for it; the same command continues."""

    status: Literal["succeeded", "stopped"]
    reason: str
    signal: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """0, or what a shell reports for the signal."""
        return 0 if self.signal is None else 128 + self.signal
