"""Runs Python as a pod's ``restricted`` security standard has it: a user without any capability, who can't get new
privileges, behind the usual filter that forbids namespaces. For root on x86_64, who has setpriv."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rljob_trainer.world.sandbox.python_files import PythonFiles

USER = 54321
ROOT = Path(__file__).parents[2]
ATTEMPTS = ROOT / "tests/trainer/world/sandbox/attempts"
FORBIDDING = "forbid namespaces"


def why_not() -> str | None:
    """Why it can't be had here."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None or platform.machine() != "x86_64":
        return "needs root, setpriv and x86_64"
    return None


@contextmanager
def restricted_python() -> Iterator[tuple[list[str], dict[str, str]]]:
    """The beginning of a command line, and the environment. What the sandbox's tests import is copied to where that
    user gets at it."""
    with tempfile.TemporaryDirectory(prefix="restricted-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        python = PythonFiles.here().copied(folder / "python")
        world = folder / "trainer/rljob_trainer/world"
        shutil.copytree(ROOT / "trainer/rljob_trainer/world", world)
        shutil.copy(ROOT / "trainer/rljob_trainer/__init__.py", world.parent)
        shutil.copytree(ATTEMPTS, folder / "attempts")
        shutil.copy(ROOT / "tests/support/sandbox_attempts.py", folder)
        subprocess.run(["chmod", "-R", "a+rX", folder / "trainer", folder / "attempts", folder], check=True)
        (folder / "tmp").mkdir(mode=0o700)
        os.chown(folder / "tmp", USER, USER)
        user = [f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
        environment = {
            **python.environment(),
            "PYTHONPATH": str(folder / "trainer"),
            "RLJOB_ATTEMPTS": str(folder / "attempts"),
            "PATH": os.environ["PATH"],
            "TMPDIR": str(folder / "tmp"),
        }
        yield (
            ["setpriv", *user, "--no-new-privs", str(python.executable), str(folder / "sandbox_attempts.py")],
            environment,
        )


def run_restricted(arguments: Sequence[str]) -> str:
    """What sandbox_attempts.py prints."""
    with restricted_python() as (command, environment):
        asked = subprocess.run([*command, *arguments, FORBIDDING], env=environment, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr
        return asked.stdout
