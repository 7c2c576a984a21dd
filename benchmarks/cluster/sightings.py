"""When something was first seen: lines of `kubectl get --watch`, each with the moment at which it arrived."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Sightings:
    """The states of objects as a watch told them: (seconds since the epoch, fields of the line)."""

    seen: list[tuple[float, list[str]]] = field(default_factory=list)

    def first(self, *fields: str) -> float:
        """When a line began with these fields for the first time. Raises ``LookupError`` when none did."""
        for moment, line in self.seen:
            if line[: len(fields)] == list(fields):
                return moment
        raise LookupError(f"never seen: {' '.join(fields)}")


@contextmanager
def watched(kubectl: Sequence[str], kind: str, *paths: str) -> Iterator[Sightings]:
    """Notes every state of the objects of a kind while the context lasts. ``paths`` are JSONPath expressions."""
    template = "{'\\t'}".join(f"{{{path}}}" for path in paths) + "{'\\n'}"
    command = [*kubectl, "get", kind, "--watch", f"--output=jsonpath={template}"]
    found = Sightings()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout

        def note() -> None:
            for line in lines:
                found.seen.append((time.time(), line.rstrip("\n").split("\t")))

        reader = threading.Thread(target=note, daemon=True)
        reader.start()
        try:
            yield found
        finally:
            process.terminate()
            reader.join()
