"""What a part measures, figure by figure: each is written as soon as it is known, so that a part that is killed keeps
what it had. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit; ``goal`` is what it should be in words, ``met`` whether it is (None: it has none)."""

    name: str
    value: float
    unit: str = ""
    goal: str = ""
    met: bool | None = None


class Writer:
    """Appends figures to a file, one JSON document a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def plain(self, name: str, value: float, unit: str = "") -> None:
        """A figure without a goal."""
        self._write(Figure(name, value, unit))

    def at_most(self, name: str, value: float, bound: float, unit: str = "") -> None:
        self._write(Figure(name, value, unit, f"<= {bound:g}", value <= bound))

    def at_least(self, name: str, value: float, bound: float, unit: str = "") -> None:
        self._write(Figure(name, value, unit, f">= {bound:g}", value >= bound))

    def _write(self, figure: Figure) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(figure)) + "\n")


def read(path: Path) -> list[Figure]:
    """The figures so far; a line that was begun when its writer was killed does not count."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [Figure(**json.loads(line)) for line in whole.splitlines()]
