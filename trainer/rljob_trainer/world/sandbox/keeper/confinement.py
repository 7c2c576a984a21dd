"""What holds the keeper, what holds each program in addition, and how all that a program has started is ended.

Standard library only: this runs inside the sandbox. The modes differ in nothing but this.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from . import landlock, system, tree
from .filters import install, keeper_filter, program_filter
from .protocol import MOST_FILES, KeeperSettings


class Confinement(Protocol):
    """One mode, in one keeper."""

    def enter(self) -> None:
        """Binds the keeper, before it says that it is ready. Raises ``OSError`` where the machine does not allow it."""
        ...

    def bind_program(self) -> None:
        """Binds the calling process, a fork of the keeper that is about to be a program. Its folder is then its working
        directory, empty."""
        ...

    def kill(self, program: int) -> None:
        """Ends the program and all that it has started, and waits for the ends. What it leaves in its folder goes
        too."""
        ...

    def space(self) -> tuple[int, int]:
        """Files and bytes in the program's folder, as far as they are counted here: (0, 0) where the kernel limits
        them."""
        ...


class InNamespaces:
    """Inside bubblewrap: the keeper is process 1 of the worker's process namespace and owner of its user namespace."""

    def __init__(self, settings: KeeperSettings) -> None:
        self._settings = settings
        self._filter = program_filter(owner_of_files=False, alone=None)

    def enter(self) -> None:
        if os.getpid() != 1:
            raise PermissionError("the keeper is not the first process of a namespace")
        install(keeper_filter())

    def bind_program(self) -> None:
        system.unshare(system.CLONE_NEWNS)
        system.mount_tmpfs(self._settings.folder, self._settings.limits.file_bytes, MOST_FILES)
        system.unmount("/proc")
        os.chdir(self._settings.folder)
        system.drop_capabilities()
        install(self._filter)

    def kill(self, program: int) -> None:
        # To all processes of the namespace but the caller.
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        reap_all()

    def space(self) -> tuple[int, int]:
        return 0, 0


class ByLandlock:
    """Landlock's domains, one in the other: the guardian's, in it the keeper's, in it each program's. A process of an
    outer domain can signal those of inner ones, and none of these the outer ones."""

    def __init__(self, settings: KeeperSettings) -> None:
        self._settings = settings
        self._scoped = settings.landlock_abi >= landlock.SCOPES_ABI
        version = settings.landlock_abi
        look = landlock.READ_FILE | landlock.READ_DIR
        shared = [(path, look | landlock.EXECUTE) for path in settings.readable]
        shared += [(path, look | landlock.WRITE_FILE) for path in settings.devices]
        shared.append((settings.folder, landlock.within(version)))
        self._keepers = landlock.ruleset(version, [*shared, ("/proc", look)])
        self._programs = landlock.ruleset(version, shared)

    def enter(self) -> None:
        outside = os.getppid()
        system.drop_capabilities()
        install(keeper_filter())
        landlock.restrict(self._keepers)
        system.prctl(system.PR_SET_CHILD_SUBREAPER, 1)
        if not self._scoped:
            return
        self._needs_to_be_held_back_from(outside)
        guardian = os.getpid()
        keeper = os.fork()
        if keeper:
            self._guard(keeper)
        landlock.restrict(self._keepers)
        system.prctl(system.PR_SET_CHILD_SUBREAPER, 1)
        system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)
        self._needs_to_be_held_back_from(guardian)

    def bind_program(self) -> None:
        os.chdir(self._settings.folder)
        landlock.restrict(self._programs)
        install(program_filter(owner_of_files=True, alone=None if self._scoped else os.getpid()))

    def kill(self, program: int) -> None:
        if self._scoped:
            # To all processes that the keeper may signal: those of the program's domain, and no others.
            with suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGKILL)
        else:
            # Which could start none.
            with suppress(ProcessLookupError):
                os.kill(program, signal.SIGKILL)
        reap_all()
        empty(self._settings.folder)

    def space(self) -> tuple[int, int]:
        return measured(self._settings.folder)

    def _guard(self, keeper: int) -> None:
        """Waits for the keeper's end, however it comes, and ends what it left."""
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])

        def end_keeper(*_: object) -> None:
            with suppress(ProcessLookupError):  # it may have ended by itself, and be waited for
                os.kill(keeper, signal.SIGKILL)

        # The driver's end, should another of its processes keep the keeper's socket open.
        signal.signal(signal.SIGTERM, end_keeper)
        system.prctl(system.PR_SET_PDEATHSIG, signal.SIGTERM)
        os.waitpid(keeper, 0)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)
        reap_all()
        with suppress(OSError):
            empty(self._settings.folder)
        os._exit(0)

    @staticmethod
    def _needs_to_be_held_back_from(outside: int) -> None:
        """What ends a program is sent to every process that may be signalled: this must not be one of the job's."""
        try:
            os.kill(outside, 0)
        except PermissionError:
            return
        raise PermissionError("Landlock does not hold back signals here")


class Unconfined:
    """Limits, and an end to what can be found: for programs that are trusted."""

    def __init__(self, settings: KeeperSettings) -> None:
        self._settings = settings

    def enter(self) -> None:
        system.prctl(system.PR_SET_CHILD_SUBREAPER, 1)

    def bind_program(self) -> None:
        os.chdir(self._settings.folder)

    def kill(self, program: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)
        # What a process has started becomes the keeper's when that process ends: in the end all is.
        while tree.children(os.getpid()):
            for process in tree.descendants(os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
        empty(self._settings.folder)

    def space(self) -> tuple[int, int]:
        return measured(self._settings.folder)


def confinement(settings: KeeperSettings) -> Confinement:
    if settings.mode == "namespaces":
        return InNamespaces(settings)
    return ByLandlock(settings) if settings.mode == "landlock" else Unconfined(settings)


def reap_all() -> None:
    """Waits until the calling process has no children, all of which are dying."""
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def measured(folder: str) -> tuple[int, int]:
    """How many files and folders are below a folder, and their bytes on the disk, with those of files that have no
    name any more and that the caller's descendants hold open. Not many more than are allowed are looked at."""
    files = size = 0
    for process in tree.descendants(os.getpid()):
        size += tree.nameless(process)
    waiting = [folder]
    while waiting and files <= MOST_FILES:
        with suppress(OSError):
            for entry in _entries(waiting.pop()):
                files += 1
                size += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                if files > MOST_FILES:
                    break
    return files, size


def empty(folder: str) -> None:
    """Deletes all that is in a folder, however deep, and of whatever permissions."""
    with suppress(PermissionError):
        os.chmod(folder, 0o700)
    while entries := list(_entries(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            try:
                os.rmdir(entry.path)
            except OSError:
                # Its folders come up one by one, so that no path grows too long.
                with suppress(PermissionError):
                    os.chmod(entry.path, 0o700)
                for inner in list(_entries(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        with suppress(PermissionError):
                            os.chmod(inner.path, 0o700)
                        os.rename(inner.path, os.path.join(folder, os.urandom(16).hex()))
                    else:
                        os.unlink(inner.path)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from entries
