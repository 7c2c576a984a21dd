"""A fork of the keeper becomes a program: it reads what it is to be, and runs it as Python's own ``python
program.py`` would.

Standard library only: this runs inside the sandbox.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import math
import os
import resource
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from . import system
from .confinement import Confinement
from .protocol import STARTED, Settings, encoded

NAME = "program.py"
UNFLUSHED = 120
"""Python's exit code where what was written last can't be."""
OPEN_FILES = 256
SPARE_ADDRESSES = 2**30
"""Bytes of address space beyond the limit of memory: threads and their stacks take much more of it than of memory."""
KEEPERS_TASKS = 2
"""Processes of the worker's user that are not the program's: the keeper and its guardian."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The program's ends of its pipes."""

    keeper: int
    """The process that forks the program."""
    payload: int
    stdout: int
    stderr: int
    setup: int
    """Says ``STARTED`` when the program starts, or why it cannot, and is closed then."""


@dataclass(frozen=True, slots=True)
class Program:
    """What the keeper's fork has become, ready to run."""

    source: str
    folder: str

    def run(self) -> NoReturn:
        """Runs the program and ends the process with its exit code: after its threads, exit functions and destructors
        of what is global, and with all that it wrote. Only the interpreter's own pieces are not taken apart, which
        takes longer than most programs."""
        path = os.path.join(self.folder, NAME)
        main = ModuleType("__main__")
        main.__dict__.update(__file__=path, __builtins__=__builtins__)
        sys.modules["__main__"] = main
        sys.argv[:] = [NAME]
        sys.path[0] = self.folder
        code = _executed(self.source, path, main)
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does first
        atexit._run_exitfuncs()
        main.__dict__.clear()
        gc.collect()
        for stream in (sys.stdout, sys.__stdout__):
            try:
                if stream is not None:
                    stream.flush()
            except (OSError, ValueError, AttributeError):
                code = code or UNFLUSHED
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _executed(source: str, path: str, main: ModuleType) -> int:
    """Runs the source as ``main``; returns the exit code, and shows what the interpreter would show."""
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  whatever the program raises
        trace = error.__traceback__
        # Without the frame of this function.
        shown = error.with_traceback(trace.tb_next if trace is not None else None)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def become_program(ends: Ends, confinement: Confinement, settings: Settings) -> Program:
    """Binds the calling process, and takes what it is to run. Where that fails the keeper is told, and the process
    ends."""
    try:
        os.setsid()
        stdin = os.memfd_create("stdin")
        for descriptor, place in ((stdin, 0), (ends.stdout, 1), (ends.stderr, 2), (ends.payload, 3), (ends.setup, 4)):
            os.dup2(descriptor, place)
        system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != ends.keeper:
            os._exit(1)  # it was gone before
        signal.signal(signal.SIGINT, signal.default_int_handler)
        addresses = _addresses()
        confinement.bind_program()
        os.closerange(5, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        program = _read_payload(settings)
        _limit(settings, addresses)
    except BaseException:  # noqa: BLE001  the keeper says it
        os.write(4, traceback.format_exc().encode()[-4096:])
        os._exit(1)
    os.write(4, STARTED)
    os.close(4)
    return program


def _read_payload(settings: Settings) -> Program:
    with io.FileIO(3, "r") as pipe:
        payload = json.loads(pipe.readall())
    with io.FileIO(0, "w", closefd=False) as stdin:
        left = memoryview(encoded(payload["stdin"]))
        while left:
            left = left[stdin.write(left) :]
        stdin.seek(0)
    for name, content in {**payload["files"], NAME: payload["source"]}.items():
        path = os.path.join(settings.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(encoded(content))
    os.environ.update(HOME=settings.folder, TMPDIR=settings.folder, PWD=settings.folder)
    return Program(payload["source"], settings.folder)


def _addresses() -> int:
    """The bytes of address space that this process has."""
    with open("/proc/self/statm", "rb", 0) as file:
        return int(file.read(4096).split()[0]) * resource.getpagesize()


def _limit(settings: Settings, addresses: int) -> None:
    limits = settings.limits
    processor = math.ceil(limits.cpu_seconds)
    bounds = {
        resource.RLIMIT_CPU: processor,
        resource.RLIMIT_AS: addresses + limits.memory_bytes + SPARE_ADDRESSES,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: OPEN_FILES,
    }
    if settings.own_user:
        bounds[resource.RLIMIT_NPROC] = limits.processes + KEEPERS_TASKS
    for which, most in bounds.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # The soft limit of processor time ends the program, a second before the hard one does what it can't ignore.
        resource.setrlimit(which, (most, most + 1 if which == resource.RLIMIT_CPU and most != hard else most))
