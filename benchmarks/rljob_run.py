"""Runs `rljob run` on a job file as a user would, and reads what the run wrote."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environments import ROOT, peer_environment
from benchmarks.measuring import Step

RLJOB = Path(sys.executable).with_name("rljob")


class RunFailedError(RuntimeError):
    """`rljob run` ended with an error; the message holds the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: one row of metrics a step, and the summary."""

    folder: Path
    rows: list[dict[str, float]]
    summary: dict[str, Any]

    def steps(self, sequences: int, epochs: int) -> list[Step]:
        """The steps by the clock of the whole run: each lasts from the end of the previous one to its own end."""
        ends = [0.0, *(row["progress/seconds"] for row in self.rows)]
        steps = []
        for begin, end, row in zip(ends[:-1], ends[1:], self.rows, strict=True):
            tokens = round(row["response/length/mean"] * sequences)
            trained = round(tokens * row.get("response/trained_ratio", 1.0)) * epochs
            steps.append(Step(seconds=end - begin, generated=tokens, trained=trained))
        return steps

    def stage_seconds(self, warm_up: int = 0) -> dict[str, float]:
        """Median seconds a step by stage (``timing/<stage>_seconds``), the whole step under ``step``.

        The last step is left out, since the final checkpoint is written in it, unless it is the only one.
        """
        rows = self.rows[warm_up:-1] or self.rows[-1:]
        names = (re.fullmatch(r"timing/(\w+)_seconds", name) for name in rows[0])
        return {match[1]: median(row.get(match[0], 0.0) for row in rows) for match in names if match}

    def column(self, name: str) -> list[float]:
        """A metric over the steps; steps without it are left out."""
        return [row[name] for row in self.rows if row.get(name) is not None]


def rljob_run(
    job: Path,
    output: Path,
    *,
    overlays: Sequence[Path] = (),
    steps: int | None = None,
    threads: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Trains ``job``, with ``overlays`` over it, from the beginning into ``output``. ``settings`` are paths and values
    for ``--set``.

    Raises ``RunFailedError`` when the command fails.
    """
    command = [str(RLJOB), "run", *map(str, [job, *overlays]), "--output", str(output), "--resume", "never"]
    if steps is not None:
        command += ["--steps", str(steps)]
    for path, value in (settings or {}).items():
        command += ["--set", f"{path}={value}"]
    ended = subprocess.run(command, cwd=ROOT, env=peer_environment(threads), capture_output=True, text=True)
    if ended.returncode != 0:
        printed = "\n".join((ended.stdout + ended.stderr).splitlines()[-40:])
        raise RunFailedError(f"`{' '.join(command)}` ended with exit code {ended.returncode}:\n{printed}")
    return read_run(output)


def read_run(folder: Path) -> Run:
    """Reads ``metrics.jsonl`` and ``summary.json`` of a finished run. Row 0, validation before training, is no step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    return Run(folder, rows, json.loads((folder / "summary.json").read_text()))
