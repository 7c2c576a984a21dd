"""When something was first seen: the states of objects that `kubectl get --watch` told, each with its moment."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Sightings = list[tuple[float, dict[str, Any]]]
"""Seconds since the epoch, and the object as it was then."""


@contextmanager
def watched(kubectl: Sequence[str], kind: str) -> Iterator[Sightings]:
    """Notes every state of the objects of a kind while the context lasts."""
    found: Sightings = []
    command = [*kubectl, "get", kind, "--watch", "--output=json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout

        def note() -> None:
            text = []
            for line in lines:
                text.append(line)
                # Only the last line of an object has a brace at its beginning and no more.
                if line == "}\n":
                    found.append((time.time(), json.loads("".join(text))))
                    text.clear()

        reader = threading.Thread(target=note, daemon=True)
        reader.start()
        try:
            yield found
        finally:
            process.terminate()
            reader.join()
