"""The output folder of one run: who may write into it, what an earlier run left there, and where things are.

    DIR/job.yaml  metrics.jsonl  summary.json  report.html  timeline.json
    DIR/samples/  tensorboard/  checkpoints/  start/  logs/

``samples/step-000000.jsonl`` is what the model generated before it was trained: for held-out prompts if the job
validates it, else in the first batch. The last step's are there too, whatever ``logging.samplesEvery``
says (but for 0).

One run at a time: the folder is locked while a run is under way (the kernel drops the lock of a process that dies).
A folder with files in which no run has ever been is somebody's for something else (``--output .``), and is left alone:
what a run finds in its folder it moves aside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from pathlib import Path
from types import TracebackType

from rljob_trainer.errors import DataError, OutputError
from rljob_trainer.record import fence
from rljob_trainer.telemetry import run_folder

START = "start"
"""The Hugging Face folder that the run starts from. What it has trained is in its checkpoints."""
_LOCK = ".lock"
_LOGS = "logs"
_EARLIER = re.compile(r"earlier-([0-9]+)")
_LOOKS_EVERY = 1.0
_CLOSED = (
    b"rljob: the files and sockets of this process were closed, by a reward function, a tool or an environment's\n"
    b"program (os.close, os.closerange): the run cannot go on; let that code close only what it has opened\n"
)
_BEFORE_ANY_RUN = (_LOGS, "lost+found")
"""What may be in a folder in which no run has been yet: log lines on a cluster, and what a new disk comes with."""


def _open_for_owner(path: Path) -> int:
    """Whoever may open the file, if only for reading, may lock it, and so keep the run out: only its owner may."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(PermissionError):  # a file of somebody else, who lets us write
        os.fchmod(descriptor, 0o600)
    return descriptor


def _lock_for_good(lock: int) -> None:
    """Raises ``BlockingIOError`` when another run has it. Who only asks (``is_held``) has it for an instant."""
    for pause in (0.05, 0.5, None):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if pause is None:
                raise
            time.sleep(pause)


def is_held(folder: Path) -> bool | None:
    """Whether a run is at work in a folder; None: that cannot be told."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without such locks
        return None
    finally:
        os.close(lock)
    return False


class _LockWatch(threading.Thread):
    """Ends the process when its lock is gone: the job's own code has closed descriptors that are not its own. Then
    asyncio hears no signal, and Ray's threads fill the disk with what they say of it."""

    def __init__(self, lock: int) -> None:
        super().__init__(name="lock of the output folder", daemon=True)
        self._lock, self._errors = (lock, _file_of(lock)), (2, _file_of(2))
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_LOOKS_EVERY):
            # What cannot be told now (a store that does not answer) is looked at again.
            with contextlib.suppress(OSError):
                if _file_of(self._lock[0]) == self._lock[1]:
                    continue
                if _file_of(2) == self._errors[1]:
                    os.write(2, _CLOSED)
                os._exit(DataError.exit_code)

    def end(self) -> None:
        self._ended.set()
        self.join(2 * _LOOKS_EVERY)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Which file is open there; None: none is. Raises ``OSError`` where that cannot be told."""
    try:
        found = os.fstat(descriptor)
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise
    return found.st_dev, found.st_ino


class OutputFolder:
    """``with OutputFolder(path) as output``: made when missing, locked, unlocked at the end.

    Raises ``OutputError`` when another run holds it, it cannot be written, is a file, or holds files of somebody else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None
        self._watch: _LockWatch | None = None

    def __enter__(self) -> OutputFolder:
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path} is a file; pass a folder with --output")
        with run_folder.writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_files_of_others()
            self._lock = _open_for_owner(self.path / _LOCK)
        try:
            _lock_for_good(self._lock)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise OutputError(
                f"another run is writing to {self.path}; wait for it, stop it, or pass another folder with --output"
            ) from None
        # A child that the job's own code forks would keep the lock after the run has ended.
        os.register_at_fork(after_in_child=self._let_go)
        self._watch = _LockWatch(self._lock)
        self._watch.start()
        return self

    def _refuse_files_of_others(self) -> None:
        found = sorted(path.name for path in self.path.iterdir())
        if _LOCK in found or fence.FILE in found:
            return
        if others := [name for name in found if name not in _BEFORE_ANY_RUN]:
            some = ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")
            raise OutputError(
                f"{self.path} is not empty ({some}) and contains no run; pass a new or empty folder with --output"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unlocks it."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def model(self) -> Path:
        """The Hugging Face folder the run starts from."""
        return self.path / START

    def point_to_model(self, path: Path) -> None:
        """Makes ``model`` lead to a folder that lies elsewhere, so that the output folder can be used on its own."""
        if path.resolve() == self.model.resolve():
            return
        with run_folder.writing(self.model):
            self.model.unlink(missing_ok=True)
            self.model.symlink_to(path.resolve(), target_is_directory=True)

    @property
    def logs(self) -> Path:
        """Log lines of attempts on a cluster; they stay whatever else is set aside."""
        return self.path / _LOGS

    @property
    def holds_a_run(self) -> bool:
        return (self.path / run_folder.JOB).exists()

    def set_aside(self) -> Path | None:
        """Moves what an earlier run left into ``DIR/earlier-N`` and returns that folder; None when there is nothing."""
        kept = (_LOCK, self.logs.name, fence.FILE)
        found = list(self.path.iterdir())
        numbers = [int(match[1]) for p in found if (match := _EARLIER.fullmatch(p.name))]
        left = [p for p in found if p.name not in kept and not _EARLIER.fullmatch(p.name)]
        if not left:
            return None
        number = 1 + max(numbers, default=0)
        aside = self.path / f"earlier-{number}"
        with run_folder.writing(aside):
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
        return aside
