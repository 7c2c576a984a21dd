"""Every module imported, the pinned versions and 20 steps of the quick start, on the Pythons that are not .venv's.

`make pythons-test` starts it with the versions that the pins are for; with ``--slow all`` it also runs the tests of
what depends most on the language. What the project stands on, without an engine's build, is installed once into a cache
folder that any checkout with the same pins uses again; the checkout itself comes on top in an environment of its own,
which ends with the test. A Python that this machine doesn't have is named in the last line, which CI repeats at its
end, and fails nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from requirements import install

TESTS = (
    "tests/api",
    "tests/operator",
    "tests/trainer/algorithms",
    "tests/trainer/pipeline",
    "tests/trainer/world/sandbox/test_programs.py",
)
LOOK = Path(__file__).with_name("importing.py")
QUICK_START = ("examples/quickstart.yaml", "--steps", "20", "--resume", "never")
CACHE = Path("~/.cache/rljob/pythons").expanduser()


def interpreter(version: str) -> Path | None:
    """The interpreter of a minor version; None where this machine has none that runs."""
    found = install.asked("sh", install.REQUIREMENTS / "python.sh", version).strip()
    return Path(found) if found else None


def parts(python: Path) -> Path:
    """The environment with what the project stands on, for a Python. Whoever comes while it is made waits."""
    project = tomllib.loads((install.ROOT / "pyproject.toml").read_text())["project"]
    needs = [project["dependencies"], project["optional-dependencies"], install.asked(python, "-VV")]
    pinned = b"".join((install.REQUIREMENTS / name).read_bytes() for name in ("cpu.txt", "cpu-overrides.txt"))
    folder = CACHE / hashlib.sha256(json.dumps(needs).encode() + pinned).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        venv, stamp = folder / "environment", folder / install.STAMP
        if not stamp.exists():
            install.run(python, "-m", "venv", "--clear", "--without-pip", venv)
            settings = install.index_settings()
            command = install.install_command("cpu", settings, venv)
            extras = [f"--extra={extra}" for extra in ("trainer", "operator", "dev")]
            install.fetch(*command, "--requirement", "pyproject.toml", *extras, environment=settings)
            stamp.touch()
    return venv


def check(python: Path, folder: Path, slow: bool) -> bool:
    """Looks at a Python, with a new folder for the checkout's environment and the run's output; ``slow``: by tests,
    too."""
    (packages,) = parts(python).glob("lib/python3.*/site-packages")
    venv = folder / "environment"
    install.run(python, "-m", "venv", "--without-pip", venv)
    (own,) = venv.glob("lib/python3.*/site-packages")
    (own / "parts.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    install.fetch(*install.install_project(venv), environment=install.index_settings())
    # What is imported is compiled once, and kept with the parts; and CI's long walks are the default's alone.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLJOB_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    interpreter = venv / "bin" / "python"
    commands: list[list[str | Path]] = [
        [interpreter, LOOK],
        [venv / "bin" / "rljob", "run", *QUICK_START, "--output", folder / "run"],
    ]
    if slow:
        commands.append([interpreter, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *TESTS])
    ended = [subprocess.run(command, cwd=install.ROOT, env=environment).returncode for command in commands]
    return not any(ended)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", choices=("none", "all"), default="none")
    parser.add_argument("versions", nargs="+")
    asked = parser.parse_args(arguments)
    default = platform.python_version()
    told = [f"{default} (everything)"]
    failed, missing = [], []
    for version in asked.versions:
        if default.startswith(f"{version}."):
            continue
        python = interpreter(version)
        if python is None:
            missing.append(version)
            continue
        exact = install.asked(python, "-V").split()[1]
        install.say(f"Python {exact}")
        with tempfile.TemporaryDirectory() as folder:
            passed = check(python, Path(folder), asked.slow == "all")
        told.append(f"{exact} ({'tests' if asked.slow == 'all' else 'imports'} and the quick start)")
        failed += [] if passed else [exact]
    lines = [f"Pythons: {', '.join(told)}"]
    lines += [f"FAILED ON PYTHON {version}" for version in failed]
    lines += [f"NOT TESTED ON PYTHON {version}: this machine has none that runs" for version in missing]
    print("\n".join(lines))
    if times := os.environ.get("RLJOB_TEST_TIMES"):
        Path(times, "pythons").write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
