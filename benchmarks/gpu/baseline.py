"""A number that a part keeps for the ratios of later parts, with what it was measured on. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.outcomes import card
from benchmarks.machine import Hardware

CHECK_NAME = "RLJOB_GPU_CHECK"
"""The variable that names the check that a part belongs to."""


class KeptBaseline:
    """What ``part`` has measured: other parts divide by it where it is of the same card and commit, and only there.

    Code that is not committed may have changed since, under the same name: then it has to be of the same check, too.
    """

    def __init__(self, part: str, machine: Callable[[], Hardware] = Hardware.here) -> None:
        self._part = part
        self._machine = machine

    def keep(self, cache: Path, value: float) -> None:
        machine = self._machine()
        whole = {"value": value, "card": card(machine), "commit": machine.commit}
        whole["check"] = os.environ.get(CHECK_NAME)
        self._path(cache).write_text(json.dumps(whole) + "\n")

    def read(self, cache: Path) -> float | str:
        """The number, or why there is none to divide by and what to do, as a sentence."""
        remedy = f"run {self._part} first, or both together"
        try:
            found = json.loads(self._path(cache).read_text())
            value, theirs, check = float(found["value"]), (found["card"], found["commit"]), found["check"]
        except (OSError, ValueError, KeyError, TypeError):
            return f"no ratio, since there is no figure of {self._part} yet: {remedy}"
        machine = self._machine()
        if theirs != (card(machine), machine.commit):
            return f"no ratio, since {self._part} was measured on {theirs[0]} at commit {theirs[1]}: {remedy}"
        if not machine.is_committed and (check is None or check != os.environ.get(CHECK_NAME)):
            return (
                f"no ratio, since {self._part} was measured earlier and what code that was is not known "
                f"(commit {machine.commit}): run both together"
            )
        return value

    def _path(self, cache: Path) -> Path:
        return cache / f"{self._part}.json"
