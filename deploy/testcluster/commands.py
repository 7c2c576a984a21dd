"""Running a command to its end, with an error that says in one line what was run and why it failed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandFailedError(RuntimeError):
    """A command ended with an error or isn't installed; the message says in one line which, and why."""


def run(
    command: Sequence[str],
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    text: str | None = None,
) -> str:
    """The command's output; `text` is its input.

    Raises:
        CommandFailedError: it isn't there, or ended with an error.
    """
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, input=text)
    except FileNotFoundError:
        raise CommandFailedError(f"`{command[0]}` isn't installed") from None
    if done.returncode:
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise CommandFailedError(f"`{' '.join(command[:3])}` failed: {tail}")
    return done.stdout


PAUSES = (10.0, 30.0)
"""Seconds before what needs the network is tried a second and a third time."""


def fetch(command: Sequence[str], folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """The output of a command that downloads: a mirror that does not answer for a moment ends no build of minutes.

    Raises:
        CommandFailedError: it isn't there, or ended with an error three times.
    """
    for pause in PAUSES:
        try:
            return run(command, folder, environment)
        except CommandFailedError as problem:
            print(f"{problem}; once more in {pause:.0f} s", file=sys.stderr, flush=True)
            time.sleep(pause)
    return run(command, folder, environment)
