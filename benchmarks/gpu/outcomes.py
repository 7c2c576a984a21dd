"""What became of the parts, and how it is kept: one file for a card, part by part. Standard library only."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from benchmarks.gpu.figures import Figure
from benchmarks.machine import Hardware
from benchmarks.measuring import plain, table

State = Literal["measured", "failed", "killed", "interrupted", "not measured"]


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """What became of a part; ``reason`` says why it is not measured, how it failed, or what is not in its figures."""

    state: State
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    reason: str = ""

    @property
    def is_fine(self) -> bool:
        return self.state == "not measured" or (
            self.state == "measured" and all(figure.met is not False for figure in self.figures)
        )


@dataclass(frozen=True, slots=True)
class KeptOutcome:
    """An outcome with what it was measured on: the card, the commit, the versions, and when it ended (UTC)."""

    outcome: PartOutcome
    card: str
    commit: str
    time: str
    versions: dict[str, str] = field(default_factory=dict)
    """Of Python, the driver and the packages; those that are not on record are not there."""

    @classmethod
    def now(cls, outcome: PartOutcome, machine: Hardware) -> KeptOutcome:
        ended = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(outcome, card(machine), machine.commit, ended, versions(machine))

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> KeptOutcome:
        """Raises ``KeyError``, ``TypeError`` or ``AttributeError`` if it is nothing that this module has written."""
        outcome = {**found["outcome"], "figures": [Figure(**figure) for figure in found["outcome"]["figures"]]}
        return cls(**{**found, "outcome": PartOutcome(**outcome)})

    def is_kept_from(self, newer: PartOutcome) -> bool:
        """Whether this stays when ``newer`` comes: figures do not give way to a part that was not run to its end by
        somebody's will, and nothing that ran gives way to what did not."""
        if newer.state == "not measured":
            return self.outcome.state != "not measured"
        return newer.state == "interrupted" and self.outcome.state == "measured"


def card(machine: Hardware) -> str:
    """What was measured on: the GPUs, or the processor where there are none."""
    return machine.accelerator or machine.processor


def versions(machine: Hardware) -> dict[str, str]:
    """What parts run with."""
    return {"Python": machine.python, **machine.versions}


class ResultsFile:
    """``gpu.json`` with everything and ``gpu.md`` with the table, which hold the last outcome of each part on one card.

    What another card's file holds is left alone: this card's is beside it, with the card in its name.
    Raises ``OSError`` if nothing can be written into the folder, which it makes.
    """

    def __init__(self, folder: Path, device: str, machine: Hardware) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()  # minutes of measuring come before the first result
        self._machine = machine
        name = "gpu" if device == "cuda" else "gpu_on_cpu"
        if _card_in(folder / f"{name}.json") not in (None, card(machine)):
            name += "-" + re.sub(r"[^a-z0-9]+", "-", card(machine).lower()).strip("-")[:80]
        self.path = folder / f"{name}.json"
        self._kept = _read(self.path)

    def keep(self, outcomes: Mapping[str, PartOutcome]) -> None:
        """Writes these outcomes in place of the earlier ones of the same parts; each file is whole or as it was."""
        for part, outcome in outcomes.items():
            if part not in self._kept or not self._kept[part].is_kept_from(outcome):
                self._kept[part] = KeptOutcome.now(outcome, self._machine)
        whole = {"card": card(self._machine), "machine": self._machine.to_json(), "results": plain(self._kept)}
        text = f"{show({part: kept.outcome for part, kept in self._kept.items()})}\n{self._when()}\n"
        self._write("json", json.dumps(whole, indent=1) + "\n")
        self._write("md", f"{text}Last: {self._machine.sentence()}.\n")

    def _when(self) -> str:
        last = versions(self._machine)
        lines = [
            f"- {part}: {kept.outcome.state} at {kept.time}, commit {kept.commit}, in {kept.outcome.seconds:.0f} s"
            f"{_other_versions(kept.versions, last)}"
            for part, kept in self._kept.items()
            if kept.outcome.state != "not measured"
        ]
        return "\n".join([f"On {card(self._machine)}:", "", *lines, ""])

    def _write(self, suffix: str, text: str) -> None:
        begun = self.path.with_suffix(f".{suffix}.begun")
        begun.write_text(text)
        begun.rename(self.path.with_suffix(f".{suffix}"))


def _other_versions(found: Mapping[str, str], last: Mapping[str, str]) -> str:
    """What to add to a part's line where not all of its versions are those of the last line."""
    others = [f"{name} {version}" for name, version in found.items() if last.get(name) != version]
    untold = [name for name in last if name not in found]
    with_others = f", with {', '.join(others)}" if others else ""
    return with_others + (f" ({', '.join(untold)}: none, or not on record)" if untold else "")


def _whole(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _card_in(path: Path) -> str | None:
    """The card whose results a file holds; None: no file. One that cannot be read is nobody's, and not to be lost."""
    return str(_whole(path).get("card", "?")) if path.exists() else None


def _read(path: Path) -> dict[str, KeptOutcome]:
    try:
        return {part: KeptOutcome.from_json(found) for part, found in _whole(path).get("results", {}).items()}
    except (KeyError, TypeError, AttributeError):
        return {}


def show(outcomes: Mapping[str, PartOutcome]) -> str:
    """The table of figures, and below it every part without them, or without some, and why."""
    words = {True: "yes", False: "**no**", None: ""}
    rows = [
        [figure.name, part, f"{figure.value:.4g} {figure.unit}".rstrip(), figure.goal, words[figure.met]]
        for part, outcome in outcomes.items()
        for figure in outcome.figures
    ]
    tables = table(["figure", "part", "value", "goal", "met"], rows)
    rest = [
        f"- {part}: {outcome.state}: {outcome.reason}"
        for part, outcome in outcomes.items()
        if outcome.state != "measured" or outcome.reason
    ]
    return "\n".join([tables, *rest, ""])
