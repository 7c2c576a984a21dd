"""An environment with reasoning-gym, beside ours: made once, from requirements/reasoning-gym.txt, and kept."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import lru_cache
from importlib import util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PINNED = ROOT / "requirements" / "reasoning-gym.txt"
STAMP = "made"


@lru_cache(maxsize=1)
def gym_python() -> str:
    """Its interpreter. Skips the test where three of the packages cannot be built: there is no compiler, or no header
    files of Python."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("this Python has no header files, and pycosat is built from source")
    if shutil.which(compiler := (sysconfig.get_config_var("CC") or "cc").split()[0]) is None:
        pytest.skip(f"there is no {compiler}, and pycosat is built from source")
    made_from = hashlib.sha256(f"{sys.version} {sys.base_prefix}".encode() + PINNED.read_bytes()).hexdigest()[:16]
    folder = Path.home() / ".cache" / "rljob" / f"reasoning-gym-{made_from}"
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / STAMP).exists():
            _make(folder, python)
            (folder / STAMP).touch()
    return str(python)


def _make(folder: Path, python: Path) -> None:
    """With the index that pip has been told, and nothing that has no hash, building included."""
    uv = str(Path(sys.executable).with_name("uv"))
    environment = _installer().index_settings()
    subprocess.run(
        [uv, "venv", "--quiet", "--allow-existing", "--python", _base(), folder], check=True, env=environment
    )
    install = [uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--compile-bytecode"]
    hashed = ["--build-constraints", PINNED, "--require-build-hashes", "--require-hashes", "--requirement", PINNED]
    subprocess.run([*install, *hashed], check=True, env=environment, timeout=500)


def _base() -> str:
    """The interpreter that our own environment was made of."""
    return os.path.realpath(sys.executable)


def _installer() -> Any:
    spec = util.spec_from_file_location("rljob_set_up", ROOT / "requirements" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
