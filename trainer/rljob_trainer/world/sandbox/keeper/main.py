"""Where the keeper starts: ``python -s -S -P -c "..." SETTINGS``, with the driver's socket as standard input.

Standard library only, and a copy of this folder: the package around it is not in the sandbox.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from types import ModuleType

from .confinement import confinement
from .protocol import PREPARED, KeeperSettings
from .serving import DriverGoneError, Keeper

USUAL = (
    "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq",
    "itertools", "math", "random", "re", "statistics", "string", "threading", "traceback", "typing",
)  # fmt: skip
"""What programs import most: imported once, before they are forked."""


def main() -> None:
    """Serves the driver until it is gone; in a fork that becomes a program, runs that."""
    settings = KeeperSettings.from_json(sys.argv[1])
    # A program may send it to the first process of its namespace, which has no other handlers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = os.dup(0)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    for name in USUAL:
        importlib.import_module(name)
    # The first use of each makes things that the forks then have.
    str(1.5), json.dumps({"": ""}), traceback.format_exc()
    source = _prepared_source() if settings.prepares else None
    held = confinement(settings)
    held.enter()
    sys.path.extend(settings.packages)
    if source is not None:
        _prepare(source)
    keeper = Keeper(control, held, settings)
    gc.collect()
    gc.freeze()
    keeper.say_ready()
    program = None
    with suppress(DriverGoneError, BrokenPipeError, ConnectionResetError):
        program = keeper.serve()
    if program is not None:
        program.run()


def _prepared_source() -> str:
    """Read before the keeper is bound: its own files are none that programs see."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{PREPARED}.py"), encoding="utf-8") as file:
        return file.read()


def _prepare(source: str) -> None:
    """Imports the module that programs find, as well held as they are but for their own folder.

    Raises ``RuntimeError`` for one that leaves a thread: no fork has it, and Landlock would not hold it."""
    module = ModuleType(PREPARED)
    sys.modules[PREPARED] = module
    exec(compile(source, f"{PREPARED}.py", "exec", dont_inherit=True), module.__dict__)
    if len(tasks := os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"the module that programs find imported has started {len(tasks) - 1} threads")
