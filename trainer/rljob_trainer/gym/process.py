"""A process of another interpreter that makes problems of reasoning-gym (``inside.py``), as its user sees it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import DataError, JobFileError, UnreachableError
from rljob_trainer.gym.inside import PROTOCOL

if TYPE_CHECKING:
    from rljob_api.spec.data import TaskSpec

log = logging.getLogger(__name__)

INSIDE = Path(__file__).with_name("inside.py")
INSTALL = "pip install reasoning-gym==0.1.25"
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
"""Variables that the process has of ours: no keys, and nothing of our own Python."""
START_SECONDS = 120
"""For the import, which takes 2 seconds, or 20 where nothing was compiled yet."""
ROW_SECONDS = 300
"""For a row: of the slowest task a problem takes 2 seconds, and for one that is held out some ten are made."""
_TRIES = 3
_GRACE_SECONDS = 5.0
_READ_BYTES = 1 << 20


class WrongTaskError(JobFileError):
    """There is no such task, or it does not take its configuration."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        """``field``: which of the task's."""
        super().__init__(f"{problem}; {remedy}")
        self.field, self.problem, self.remedy = field, problem, remedy


class _LostError(Exception):
    """The process has ended, or says nothing."""


def own_environment() -> dict[str, str]:
    """The environment of processes beside the package. Hashes of strings are the same in each: some tasks go through
    sets."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**kept, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def interpreter(task: TaskSpec, base: Path | None) -> str | None:
    """The Python that a task names, below ``base`` (the job file's folder) where it is a relative path; None: ours."""
    if task.python is None:
        return None
    # Not resolved: a virtual environment is known by the place of its link.
    return str((base or Path.cwd()) / Path(task.python).expanduser())


def as_asked(task: TaskSpec) -> dict[str, Any]:
    """What the package is told of a task, ready for JSON."""
    assert task.name is not None
    assert task.size is not None
    return {"name": task.name, "config": dict(task.config), "seed": task.seed, "size": task.size}


@lru_cache(maxsize=8)
def gym_process(python: str | None) -> GymProcess:
    """The one process of an interpreter (None: that of this process) that all rows share."""
    return GymProcess(python or sys.executable)


class GymProcess:
    """Makes problems. Starts with the first question, and again when it is lost; may be asked from several threads."""

    def __init__(self, python: str, row_seconds: int = ROW_SECONDS) -> None:
        self.python = python
        self._row_seconds = row_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._number = 0
        self._about: Mapping[str, Any] | None = None

    @property
    def pid(self) -> int | None:
        """The process now running."""
        return self._process.pid if self._process else None

    def describe(self) -> str:
        """Package and Python in words. Raises ``JobFileError`` saying how to install what is missing."""
        about = self._known()
        return f"reasoning-gym {about['version']} (Python {about['python']})"

    def check(self, name: str, config: Mapping[str, Any], seed: int, size: int) -> None:
        """Raises ``WrongTaskError`` for what the package does not know."""
        self._known()
        task = {"name": name, "config": config, "seed": seed, "size": size}
        self._ask({"do": "check", "task": task}, self._row_seconds)

    def row(self, task: Mapping[str, Any], row: int, *, held_out: bool) -> dict[str, Any]:
        """Question, answer and origin of a row. Raises ``WrongTaskError``, ``DataError`` for a task that fails, and
        ``UnreachableError`` when process after process is lost."""
        self._known()
        asked = {"do": "row", "task": task, "row": row, "held_out": held_out}
        made: dict[str, Any] = self._ask(asked, self._row_seconds)
        return made

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _known(self) -> Mapping[str, Any]:
        about: Mapping[str, Any] = self._about or self._ask({"do": "describe"}, START_SECONDS)
        return about

    def _check(self, answer: Mapping[str, Any]) -> None:
        """Looks at what a process that has just started says of itself."""
        if "failed" in answer:
            raise JobFileError(missing(self.python, answer["failed"]))
        about = answer["said"]
        if about["protocol"] != PROTOCOL:
            raise JobFileError(f"{self.python} speaks protocol {about['protocol']}, not {PROTOCOL}")
        if self._about not in (None, about):
            raise DataError(
                f"the environment of {self.python} has changed during the run: it had {self._about}, now {about}; "
                "restore it"
            )
        self._about = about

    def _ask(self, request: Mapping[str, Any], seconds: int) -> Any:
        with self._lock:
            lost: _LostError | None = None
            for _ in range(_TRIES):
                try:
                    answer = self._answer(request, seconds)
                    break
                except _LostError as error:
                    lost = error
                    self._end()
                    log.warning("the process for reasoning-gym problems was lost (%s) and is replaced", error)
            else:
                raise UnreachableError(
                    f"the process of {self.python} that generates reasoning-gym problems was lost {_TRIES} times in a "
                    f"row: {lost}; see the output above, give it more memory if it may have run out, and try "
                    "again"
                )
        if "wrong" in answer:
            raise WrongTaskError(*answer["wrong"])
        if "failed" in answer:
            raise DataError(
                f"reasoning-gym failed to make problems: {answer['failed']}; correct the task's config, or report it "
                "there"
            )
        return answer["said"]

    def _answer(self, request: Mapping[str, Any], seconds: int) -> dict[str, Any]:
        if self._process is None:
            process = self._process = self._started()
            # The import has a time of its own, and what was started anew may be another package. One that is not as it
            # should be is not asked again.
            try:
                self._check(self._exchange(process, {"do": "describe"}, START_SECONDS))
            except BaseException:
                self._end()
                raise
        return self._exchange(self._process, request, seconds)

    def _exchange(self, process: subprocess.Popen[bytes], request: Mapping[str, Any], seconds: int) -> dict[str, Any]:
        assert process.stdin is not None
        self._number += 1
        line = json.dumps({**request, "number": self._number, "seconds": seconds}) + "\n"
        try:
            process.stdin.write(line.encode())
            process.stdin.flush()
        except OSError:
            raise _LostError(self._ending(process)) from None
        text = self._line(process, seconds + _GRACE_SECONDS)
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:
            raise _LostError(f"it said {text[:80]!r}, which is not an answer") from None
        if answer.get("number") != self._number:
            raise _LostError("it answered another question")
        return answer

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        assert process.stdout is not None
        end, read = time.monotonic() + seconds, b""
        while not read.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0:
                raise _LostError(f"no answer within {seconds:g} s")
            if select.select([process.stdout], [], [], left)[0]:
                more = os.read(process.stdout.fileno(), _READ_BYTES)
                if not more:
                    raise _LostError(self._ending(process))
                read += more
        return read

    @staticmethod
    def _ending(process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"it ended with exit code {process.wait(_GRACE_SECONDS)}"
        return "it closed its output"

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [self.python, "-s", "-B", str(INSIDE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=own_environment(),
                # Ctrl-C is for whoever asks.
                start_new_session=True,
            )
        except OSError as error:
            raise JobFileError(missing(self.python, error.strerror or str(error))) from None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def missing(python: str, problem: str) -> str:
    """What to do about a package that an interpreter does not have."""
    return (
        f"cannot use reasoning-gym with {python} ({problem}); create an environment with `python3 -m venv FOLDER` and "
        f"`FOLDER/bin/{INSTALL}`, and set task.python: FOLDER/bin/python (docs/reasoning-gym.md)"
    )
