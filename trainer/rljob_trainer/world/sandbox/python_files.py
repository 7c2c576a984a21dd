"""What a Python needs of the file system, and a copy of it where its own place is out of a worker's reach."""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEEPER = Path(__file__).with_name("keeper")
KEEPER_PACKAGE = "rljob_keeper"
LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "idle_test", "tkinter", "turtledemo", "ensurepip", "lib2to3")
"""Of the library, in a copy: no program needs them."""
ELSEWHERE = ("/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


_QUESTION = """
import json, sys, sysconfig
told = ("INSTSONAME", "LIBDIR")
print(json.dumps({
    "version": "python%d.%d" % sys.version_info[:2], "prefix": sys.base_prefix, "executable": sys.executable,
    "library": sysconfig.get_path("stdlib"), "packages": [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")],
    **{name: str(sysconfig.get_config_var(name)) for name in told},
}))
"""
"""What an interpreter is asked of its files."""
_ASKED_SECONDS = 60
_MOST_COPIED_BYTES = 1 << 30
"""Of packages: each sandbox has a copy of its own."""


@dataclass(frozen=True, slots=True)
class PythonFiles:
    """An interpreter, without packages but for those that are asked for: the one that runs this, or another, or a copy
    of it."""

    executable: Path
    library: Path
    """Python's own modules."""
    shared: Path | None
    """``libpython``, where the interpreter is not whole without it."""

    packages: tuple[Path, ...] = ()
    """Folders with packages, for programs that find some of them imported already."""

    @classmethod
    def here(cls) -> PythonFiles:
        """The files of the interpreter that runs this, or of its base where that is a virtual environment."""
        told = {name: str(sysconfig.get_config_var(name)) for name in ("INSTSONAME", "LIBDIR")}
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        library = sysconfig.get_path("stdlib")
        return cls._from(
            {"version": version, "prefix": sys.base_prefix, "executable": sys.executable, "library": library, **told}
        )

    @classmethod
    @functools.lru_cache(maxsize=8)
    def of(cls, python: str) -> PythonFiles:
        """The files of another interpreter, with its environment's packages. Raises ``OSError`` for what is none."""
        try:
            asked = [python, "-E", "-s", "-c", _QUESTION]
            done = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=_ASKED_SECONDS)
            return cls._from(json.loads(done.stdout))
        except (subprocess.SubprocessError, ValueError) as problem:
            raise OSError(f"{python} does not say where its files are ({problem})") from None

    @classmethod
    def _from(cls, told: dict[str, Any]) -> PythonFiles:
        prefix = Path(os.path.realpath(told["prefix"]))
        executable = Path(os.path.realpath(prefix / "bin" / told["version"]))
        if not executable.exists():
            executable = Path(os.path.realpath(told["executable"]))
        name = told["INSTSONAME"]
        places = (prefix / "lib" / name, Path(told["LIBDIR"]) / name)
        shared = [place for place in places if ".so" in name and os.access(place, os.R_OK)]
        packages = dict.fromkeys(Path(os.path.realpath(path)) for path in told.get("packages", ()))
        return cls(executable, Path(os.path.realpath(told["library"])), shared[0] if shared else None, tuple(packages))

    def environment(self) -> dict[str, str]:
        """All that a keeper's environment has. Hashes are the same in every worker, so that programs are repeatable."""
        fixed = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"}
        if self.packages:
            # numpy's library starts threads when it is imported, which no fork would have.
            fixed |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
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
            tuple(prefix / f"packages-{number}" for number, _ in enumerate(self.packages)),
        )

    def own(self) -> list[Path]:
        """The files and folders that are Python's, and its packages."""
        return [self.executable, self.library, *([self.shared] if self.shared else []), *self.packages]

    def copied(self, folder: Path) -> PythonFiles:
        """A copy of these files in ``folder``: by hard links where that is on the same file system, in 30 ms without
        packages. Raises ``OSError`` for more packages than are to be copied."""
        device = folder.parent.stat().st_dev
        for packages in self.packages:
            if packages.stat().st_dev != device and _bytes_of(packages) > _MOST_COPIED_BYTES:
                raise OSError(
                    f"the packages in {packages} exceed {_MOST_COPIED_BYTES >> 20} MiB, other users cannot read them, "
                    f"and {folder.parent} is on another file system: use an environment with only the packages that "
                    "are needed, in a folder that everybody may read"
                )
        copy = self.moved(folder)
        for path in (copy.executable.parent, copy.library.parent):
            path.mkdir(parents=True)
        _link(str(self.executable), str(copy.executable))
        if self.shared and copy.shared:
            _link(str(self.shared), str(copy.shared))
        ignored = shutil.ignore_patterns(*LEFT_OUT, "config-*", "*.opt-?.pyc")
        shutil.copytree(self.library, copy.library, ignore=ignored, copy_function=_link)
        for packages, place in zip(self.packages, copy.packages, strict=True):
            shutil.copytree(packages, place, copy_function=_link)
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


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one that has no links.
        shutil.copy(source, target)
    return target
