"""What a judge has been asked and has said, in a file of the run's output folder: scores that a run which goes on need
not ask for again, and what has been spent of its budget.

A line of JSON each: ``{"asked": KEY}`` before a request, ``{"key": KEY, "score": 0.7, "tokens": 312}`` for an answer
(without a score where it has none). Lines are handed to the kernel at once, so a process that is killed loses none; a
line that is not whole is left out.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from urllib.parse import quote

from rljob_trainer.telemetry.run_folder import writing

log = logging.getLogger(__name__)


class JudgeRecord:
    """What one judge was asked and has said; without a folder it is forgotten at the end."""

    def __init__(self, name: str, folder: Path | None, remembers: bool = True) -> None:
        """``remembers``: whether scores are kept; what was spent is counted in any case."""
        self.requests = 0
        """Begun since the run began, those of earlier processes too."""
        self.tokens = 0
        self._remembers = remembers
        self._scores: dict[bytes, float] = {}
        self._file: int | None = None
        self._path = None if folder is None else folder / f"{quote(name, safe='')}.jsonl"

    def open(self) -> None:
        """Reads the file that is there, which may take long. Raises ``OutputError``."""
        if (path := self._path) is None:
            return
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._read(path)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def score(self, key: str) -> float | None:
        """What was said to this question; None: it is not known."""
        return self._scores.get(bytes.fromhex(key))

    def asked(self, key: str) -> None:
        """A request is about to be made. Raises ``OutputError``."""
        self.requests += 1
        self._write({"asked": key})

    def answered(self, key: str, score: float | None, tokens: int) -> None:
        """Raises ``OutputError``."""
        self.tokens += tokens
        if score is None:
            self._write({"key": key, "tokens": tokens})
            return
        if self._remembers:
            self._scores[bytes.fromhex(key)] = score
        self._write({"key": key, "score": score, "tokens": tokens})

    def _write(self, line: dict[str, str | float | int]) -> None:
        if self._file is None or self._path is None:
            return
        with writing(self._path):
            data = json.dumps(line).encode() + b"\n"
            while data:
                data = data[os.write(self._file, data) :]

    def _read(self, path: Path) -> None:
        broken, last = 0, b"\n"
        with path.open("rb") as file:
            for line in file:
                last = line
                try:
                    broken += not self._take(json.loads(line))
                except (ValueError, KeyError, TypeError):
                    broken += 1
        if not last.endswith(b"\n"):
            assert self._file is not None
            os.write(self._file, b"\n")
        if broken:
            log.warning("%s: %d lines cannot be read; their questions are asked again", path, broken)

    def _take(self, line: dict[str, str | float | int]) -> bool:
        if "asked" in line:
            self.requests += 1
            return True
        self.tokens += int(line["tokens"])
        if "score" in line and self._remembers:
            self._scores[bytes.fromhex(str(line["key"]))] = float(line["score"])
        return "key" in line
