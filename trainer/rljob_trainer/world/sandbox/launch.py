"""How a worker is started: its folder, its user, its command line. What each mode needs of the machine is here."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox.keeper import landlock
from rljob_trainer.world.sandbox.keeper.protocol import PREPARED, KeeperSettings, Mode, SandboxLimits
from rljob_trainer.world.sandbox.python_files import DEVICES, KEEPER, KEEPER_PACKAGE, PythonFiles

PREFIX = "rljob-sandbox-"
LOCK = "lock"
UNFINISHED_SECONDS = 60.0
"""A folder without a lock that is older than this is nobody's."""
FIRST_USER = 0x70000000
WORKERS_OF_A_PROCESS = 64
START_SECONDS = 30.0
PREPARED_SECONDS = 180.0
"""Of packages that nobody has compiled yet, on a machine with much else to do."""
NAMESPACE_USER = 1000
PYTHON_INSIDE = Path("/python")
KEEPER_INSIDE = Path("/keeper")
FOLDER_INSIDE = "/tmp"
CHANGES_USER = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7
"""CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID: to start a process of another user, give it a folder and end it."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker's process and the driver's end of its socket."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    folder: Path


@dataclass(frozen=True, slots=True)
class Prepared:
    """A module that every program of a sandbox finds imported, as ``rljob_prepared``: what takes long to import is
    imported once, before programs are forked. It is trusted as the job itself is, and runs inside all the same."""

    source: str
    """Of the module. It may start no threads."""
    python: str
    """The interpreter, whose packages the module and the programs may import."""


class Launcher:
    """Starts the workers of one sandbox. It has a folder of its own, with all that they share."""

    def __init__(self, mode: Mode, limits: SandboxLimits, prepared: Prepared | None = None) -> None:
        """Raises ``WorldError`` where the mode needs what this machine does not have."""
        self._mode = mode
        self._prepared = prepared
        self._limits = limits
        self._abi = landlock.abi() if mode == "landlock" else 0
        if mode == "landlock" and self._abi < landlock.OLDEST_ABI:
            raise WorldError(
                f"Landlock has version {self._abi} here, but the sandbox needs {landlock.OLDEST_ABI} (Linux 6.2)"
                if self._abi
                else "this kernel has no Landlock, or a seccomp profile forbids it"
            )
        self._bubblewrap = shutil.which("bwrap")
        if mode == "namespaces" and not self._bubblewrap:
            raise WorldError("bwrap is not in PATH (Debian's package bubblewrap)")
        self.own_users = mode != "none" and may_change_user()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.folder / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # It has its name once it is held: nobody finds it free.
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self.folder / "new").rename(self.folder / LOCK)
            self.folder.chmod(0o755)
            self._python = PythonFiles.here() if prepared is None else PythonFiles.of(prepared.python)
            if self.own_users and not self._python.reached_by_others():
                self._python = self._python.copied(self.folder / "python")
            shutil.copytree(KEEPER, self.folder / KEEPER_PACKAGE)
            if prepared is not None:
                (self.folder / KEEPER_PACKAGE / f"{PREPARED}.py").write_text(prepared.source, encoding="utf-8")
        except BaseException:
            self.close()
            raise

    @property
    def start_seconds(self) -> float:
        """How long a worker may take until it is ready."""
        return START_SECONDS if self._prepared is None else PREPARED_SECONDS

    def not_contained(self) -> tuple[str, ...]:
        """What the mode would contain elsewhere and does not on this machine."""
        if self._mode == "none":
            return ("programs can read, write and reach everything that the job can",)
        missing = []
        if not self.own_users:
            missing.append(
                "programs run as the job's user, which may not change users: they share the kernel's limits per user "
                "(processes, pipes, pending signals) with the job"
            )
        if self._mode == "landlock" and self._abi < landlock.SCOPES_ABI:
            missing.append("Landlock cannot block signals before Linux 6.12: programs may not start processes")
        return tuple(missing)

    def launch(self) -> Launched:
        """Starts a worker, which says when it is ready. Raises ``OSError``. From the thread whose end is the job's
        end: where bubblewrap is, the worker ends with it."""
        user = FIRST_USER + os.getpid() * WORKERS_OF_A_PROCESS + next(_numbers) % WORKERS_OF_A_PROCESS
        folder = Path(tempfile.mkdtemp(prefix="worker-", dir=self.folder))
        if self.own_users:
            os.chown(folder, user, user)
        apart = self._mode == "namespaces"
        python = self._python.moved(PYTHON_INSIDE) if apart else self._python
        inside = FOLDER_INSIDE if apart else str(folder)
        settings = KeeperSettings(
            self._mode,
            inside,
            python.readable(),
            DEVICES,
            self._counted,
            self._abi,
            self._limits,
            tuple(map(str, python.packages)),
            self._prepared is not None,
        )
        keeper = str(KEEPER_INSIDE if apart else self.folder)
        start = f"import sys; sys.path.insert(0, {keeper!r}); from {KEEPER_PACKAGE}.main import main; main()"
        command = [str(python.executable), "-s", "-S", "-P", "-B", "-c", start, settings.to_json()]
        if apart:
            command = [*self._namespaces(python), *command]
        own = user if self.own_users else None
        no_groups: list[int] = []
        ours, its = socket.socketpair()
        try:
            process = subprocess.Popen(
                command,
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=python.environment(),
                cwd="/",
                start_new_session=True,
                user=own,
                group=own,
                extra_groups=None if own is None else no_groups,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        return Launched(process, ours, folder)

    def close(self) -> None:
        """Deletes the folder. The workers are gone."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    @property
    def _counted(self) -> bool:
        """The kernel counts processes of a worker by themselves: by user, and by user namespace."""
        return self.own_users or (self._mode == "namespaces" and os.geteuid() != 0)

    def _namespaces(self, inside: PythonFiles) -> list[str]:
        """Bubblewrap's part of the command line: what there is to see, and that nothing is shared with the machine."""
        command = [str(self._bubblewrap), "--unshare-all", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"]
        command += ["--uid", str(NAMESPACE_USER), "--gid", str(NAMESPACE_USER), "--cap-add", "CAP_SYS_ADMIN"]
        shown = list(zip(map(str, self._python.own()), map(str, inside.own()), strict=True))
        shown += [(path, path) for path in self._python.others()]
        shown.append((str(self.folder / KEEPER_PACKAGE), str(KEEPER_INSIDE / KEEPER_PACKAGE)))
        for path, place in shown:
            command += ["--ro-bind", path, place]
        for path in DEVICES:
            command += ["--dev-bind", path, path]
        return [*command, "--proc", "/proc", "--dir", FOLDER_INSIDE, "--remount-ro", "/", "--chdir", FOLDER_INSIDE]


def may_change_user() -> bool:
    """Whether this process may start one of a user of its own, and the user's number exists here."""
    status = Path("/proc/self/status").read_text()
    (effective,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    if effective & CHANGES_USER != CHANGES_USER:
        return False
    last = FIRST_USER + 2**28
    ranges = (tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return any(first <= FIRST_USER and last <= first + count for first, _, count in ranges)


def sweep() -> None:
    """Deletes the folders of sandboxes whose processes were killed: nobody holds their lock."""
    for folder in abandoned():
        shutil.rmtree(folder, ignore_errors=True)


def abandoned() -> Iterator[Path]:
    """Folders of sandboxes of this user that are no longer anybody's."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            found = folder.stat()
        except OSError:  # somebody else has swept it
            continue
        if found.st_uid != os.geteuid():
            continue
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            # Not yet there, or what could not be deleted at once.
            if time.time() > found.st_mtime + UNFINISHED_SECONDS:
                yield folder
            continue
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
