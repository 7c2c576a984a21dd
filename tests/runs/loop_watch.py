"""`rljob` in which everything is written down that may block and is called in the event loop's own thread.

Python's audit events tell of files that are opened for writing, renamed or removed, of data files that are opened,
of databases, programs, connections and pauses; Ray's blocking calls, and waits for what other threads do, are wrapped.
One line for each kind and place of a call goes into the file LOOP_WATCH, together with what asyncio's debug mode says
of callbacks that take too long.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
from ray.actor import ActorClass
from ray.util.placement_group import PlacementGroup

from rljob_trainer import cli
from rljob_trainer.learner import bundles

ON_DISK = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.symlink", "os.link", "shutil.rmtree"}
OTHERS = {"sqlite3.connect", "subprocess.Popen", "time.sleep", "socket.connect", "socket.getaddrinfo", "os.system"}
DATA = (".jsonl", ".parquet", ".arrow")
"""Ends of the names of files with rows: also to read them may take for ever."""
OF_RAY: tuple[tuple[Any, str], ...] = (
    *((ray, name) for name in ("get", "put", "wait", "init", "shutdown")),
    (ActorClass, "_remote"),
    (PlacementGroup, "wait"),
    *((bundles, name) for name in ("placement_group", "placement_group_table", "remove_placement_group")),
)
"""What asks Ray's head and waits for it, under the names by which it is called. ``ray.kill`` does not wait: it takes
three milliseconds also when the head is stopped or gone."""
FREEZE_SECONDS = 10.0
"""No callback takes so long on a machine that is only busy."""

found: dict[str, None] = {}


def in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def note(what: str) -> None:
    frames = [frame for frame in traceback.extract_stack() if "rljob_trainer" in frame.filename]
    if not any(frame.name == "call" and frame.filename.endswith("cli.py") for frame in frames):
        where = " < ".join(
            f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames[:-6:-1]
        )
        found[f"{what} at {where}"] = None


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    reads_data = event == "open" and str(arguments[0]).endswith(DATA)
    if (writes or reads_data or event in ON_DISK or event in OTHERS) and in_loop():
        if event == "open" and str(arguments[0]).startswith("/dev/"):
            return
        if event == "open" and ".pyc." in str(arguments[0]):
            return  # the bytecode of a module that is imported for the first time
        note(f"{event} {arguments[:1]}")


def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if in_loop():
            note(f"ray.{name}")
        return call(*arguments, **named)

    return wrapped


def watch_ray() -> None:
    for owner, name in OF_RAY:
        setattr(owner, name, watched(name, getattr(owner, name)))


def watch_futures() -> None:
    """A thread's result that is not there yet is awaited, not waited for."""
    result = Future.result

    def watched_result(future: Future[Any], timeout: float | None = None) -> Any:
        if not future.done() and in_loop():
            note("Future.result")
        return result(future, timeout)

    Future.result = watched_result  # type: ignore[method-assign]


class Slow(logging.Handler):
    """What asyncio says of a callback that froze the loop."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING and "took" in record.msg:
            found[record.getMessage()] = None


class Debugged(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        loop.set_debug(True)
        loop.slow_callback_duration = FREEZE_SECONDS
        return loop


if __name__ == "__main__":
    watch_ray()
    watch_futures()
    asyncio.set_event_loop_policy(Debugged())
    logging.getLogger("asyncio").addHandler(Slow())
    sys.addaudithook(audit)
    code = cli.main()
    with open(os.environ["LOOP_WATCH"], "w") as file:
        file.writelines(f"{line}\n" for line in found)
    sys.exit(code)
