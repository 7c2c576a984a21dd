"""A reduced set of tests and 20 steps of the quick start, on the Pythons that are not the project's environment's.

`make pythons-test` starts it with the versions that the pins are for, all at once. It looks for what differs between
Pythons, the language and its library, and not for what all of them share: of the API and the operator everything is
run, with shorter walks by chance; of the trainer's algorithms, pipeline and sandbox programs each test with its first
case alone (``first_cases.py``). The quick start then runs Ray, the learner, the engines and the report.

What the project stands on, without an engine's build, is installed once into a cache folder that any checkout with the
same pins uses again; the checkout itself comes on top in an environment of its own, which ends with the test. What a
Python has to say is printed when it is done. A Python that this machine doesn't have is named in the last line, which
CI repeats at its end, and fails nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from requirements import install

TESTS = (
    "tests/api",
    "tests/operator",
    "tests/trainer/algorithms",
    "tests/trainer/pipeline",
    "tests/trainer/world/sandbox/test_programs.py",
)
SHORT_WALKS = {"RLJOB_CHAOS_RUNS": "10"}
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
            install.run(*command, "--requirement", "pyproject.toml", *extras, environment=settings)
            stamp.touch()
    return venv


@dataclass(frozen=True)
class Outcome:
    """What became of one Python."""

    version: str
    passed: bool


def check(python: Path, folder: Path) -> Outcome:
    """Runs everything on a Python, with a new folder for the checkout's environment and the run's output."""
    version = install.asked(python, "-V").split()[1]
    (packages,) = parts(python).glob("lib/python3.*/site-packages")
    venv = folder / "environment"
    install.run(python, "-m", "venv", "--without-pip", venv)
    (own,) = venv.glob("lib/python3.*/site-packages")
    (own / "parts.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    install.run(*install.install_project(venv), environment=install.index_settings())
    # What is imported is compiled once, and kept with the parts; and CI's long walks are the default's alone.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLJOB_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment |= SHORT_WALKS | {"PYTHONPATH": str(Path(__file__).parent)}
    pytest = ("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-p", "first_cases")
    commands: list[list[str | Path]] = [
        [venv / "bin" / "python", *pytest, *TESTS],
        [venv / "bin" / "rljob", "run", *QUICK_START, "--output", folder / "run"],
    ]
    passed = True
    for command in commands:
        done = subprocess.run(
            command, cwd=install.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        # In one piece: another Python prints too.
        print(f"--- Python {version}: {' '.join(map(str, command))}\n{done.stdout}", end="", flush=True)
        passed &= done.returncode == 0
    return Outcome(version, passed)


def main(versions: list[str]) -> int:
    default = platform.python_version()
    others = [version for version in versions if not default.startswith(f"{version}.")]
    found = {version: interpreter(version) for version in others}
    missing = [version for version, python in found.items() if python is None]
    pythons = [python for python in found.values() if python is not None]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(pythons) or 1) as beside:
        folders = [Path(tempfile.mkdtemp(dir=folder)) for _ in pythons]
        outcomes = list(beside.map(check, pythons, folders))
    told = [f"{default} (everything)", *(f"{outcome.version} (reduced set)" for outcome in outcomes)]
    failed = [outcome.version for outcome in outcomes if not outcome.passed]
    lines = [f"Pythons: {', '.join(told)}"]
    lines += [f"FAILED ON PYTHON {version}" for version in failed]
    lines += [f"NOT TESTED ON PYTHON {version}: this machine has none that runs" for version in missing]
    print("\n".join(lines))
    if times := os.environ.get("RLJOB_TEST_TIMES"):
        Path(times, "pythons").write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
