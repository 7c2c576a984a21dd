"""What a Python needs of the file system, and a copy of it where its own place is out of a worker's reach."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

KEEPER = Path(__file__).with_name("keeper")
KEEPER_PACKAGE = "rljob_keeper"
LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "idle_test", "tkinter", "turtledemo", "ensurepip", "lib2to3")
"""Of the library, in a copy: no program needs them."""
ELSEWHERE = ("/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class PythonFiles:
    """An interpreter without packages: the one that runs this, or a copy of it."""

    executable: Path
    library: Path
    """Python's own modules."""
    shared: Path | None
    """``libpython``, where the interpreter is not whole without it."""

    @classmethod
    def here(cls) -> PythonFiles:
        """Of the interpreter that runs this; its base where that is a virtual environment."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        prefix = Path(os.path.realpath(sys.base_prefix))
        executable = Path(os.path.realpath(prefix / "bin" / version))
        if not executable.exists():
            executable = Path(os.path.realpath(sys.executable))
        name = str(sysconfig.get_config_var("INSTSONAME"))
        places = (prefix / "lib" / name, Path(str(sysconfig.get_config_var("LIBDIR"))) / name)
        shared = [place for place in places if ".so" in name and os.access(place, os.R_OK)]
        library = Path(os.path.realpath(sysconfig.get_path("stdlib")))
        return cls(executable, library, shared[0] if shared else None)

    def environment(self) -> dict[str, str]:
        """All that a keeper's environment has. Hashes are the same in every worker, so that programs are repeatable."""
        fixed = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"}
        return {**fixed, "LD_LIBRARY_PATH": str(self.shared.parent)} if self.shared else fixed

    def others(self) -> list[str]:
        """Files and folders of the system that the interpreter reads."""
        return [path for path in (*system_libraries(), *ELSEWHERE) if os.path.exists(path)]

    def readable(self) -> tuple[str, ...]:
        """Files and folders that the interpreter reads."""
        return (*map(str, self.own()), *self.others())

    def reached_by_others(self) -> bool:
        """Whether a user to whom nothing belongs can execute it and read its library."""
        return all(map(open_to_all, self.own()))

    def moved(self, prefix: Path) -> PythonFiles:
        """Where the same files are when they are below ``prefix``, which is where the interpreter looks for them."""
        return PythonFiles(
            prefix / "bin" / self.executable.name,
            prefix / "lib" / self.library.name,
            prefix / "lib" / self.shared.name if self.shared else None,
        )

    def own(self) -> list[Path]:
        """The files and folders that are Python's."""
        return [self.executable, self.library, *([self.shared] if self.shared else [])]

    def copied(self, folder: Path) -> PythonFiles:
        """The same in ``folder``: by hard links where that is on the same file system, in some 30 ms."""
        copy = self.moved(folder)
        for path in (copy.executable.parent, copy.library.parent):
            path.mkdir(parents=True)
        _link(str(self.executable), str(copy.executable))
        if self.shared and copy.shared:
            _link(str(self.shared), str(copy.shared))
        ignored = shutil.ignore_patterns(*LEFT_OUT, "config-*", "*.opt-?.pyc")
        shutil.copytree(self.library, copy.library, ignore=ignored, copy_function=_link)
        return copy


def system_libraries() -> list[str]:
    """Folders of the C library and of what Python's modules are linked with."""
    machine = sysconfig.get_config_var("MULTIARCH")
    folders = [
        "/lib64",
        "/usr/lib64",
        *([f"/lib/{machine}", f"/usr/lib/{machine}"] if machine else ["/lib", "/usr/lib"]),
    ]
    return [folder for folder in folders if os.path.isdir(folder)]


def open_to_all(path: Path) -> bool:
    """Whether the permissions of a path and of all folders above it let everybody read it."""
    for place in (path, *path.parents):
        mode = place.stat().st_mode
        needed = stat.S_IXOTH if place != path else stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
        if mode & needed != needed:
            return False
    return True


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one that has no links.
        shutil.copy(source, target)
    return target
