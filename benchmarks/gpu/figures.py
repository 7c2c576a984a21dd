"""What a part measures, figure by figure: each is written as soon as it is known, so that a part that is killed keeps
what it had. Standard library only."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit; ``goal`` is what it should be in words, ``met`` whether it is (None: it has none)."""

    name: str
    value: float
    unit: str = ""
    goal: str = ""
    met: bool | None = None


class Writer:
    """Appends figures and notes to a file, one JSON document a line, and prints each: of a part that is killed, what it
    printed last says how long it has had for what it did."""

    def __init__(self, path: Path) -> None:
        self._path, self._began = path, time.monotonic()

    def plain(self, name: str, value: float, unit: str = "") -> None:
        """A figure without a goal."""
        self._write(Figure(name, value, unit))

    def at_most(self, name: str, value: float, bound: float, unit: str = "") -> None:
        self._write(Figure(name, value, unit, f"<= {bound:g}", value <= bound))

    def at_least(self, name: str, value: float, bound: float, unit: str = "") -> None:
        self._write(Figure(name, value, unit, f">= {bound:g}", value >= bound))

    def failed(self, name: str, why: str) -> None:
        """Something that should have worked and did not; the rest of the part goes on."""
        self._write(Figure(name, 0.0, "", "1", False))
        self.note(f"{name}: {why}")

    def note(self, text: str) -> None:
        """Why a figure that may be looked for is not there."""
        self._append({"note": text})

    def _write(self, figure: Figure) -> None:
        self._append(asdict(figure))

    def _append(self, document: Mapping[str, Any]) -> None:
        said = document.get("note") or f"{document['name']}: {document['value']:.4g} {document['unit']}".rstrip()
        print(f"{time.monotonic() - self._began:.0f} s: {said}", flush=True)
        with self._path.open("a") as file:
            file.write(json.dumps(document) + "\n")


def read(path: Path) -> list[Figure]:
    """The figures so far; a line that was begun when its writer was killed does not count."""
    return [Figure(**document) for document in _documents(path) if "note" not in document]


def read_notes(path: Path) -> list[str]:
    """The notes so far."""
    return [document["note"] for document in _documents(path) if "note" in document]


def _documents(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
