"""Real runs in real processes: `rljob run` with a private home, and what it leaves in its folder."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from warm import Forked, Warm

SECONDS = 500
VLLM_CACHE = str(Path("~/.cache/vllm").expanduser())
"""What vLLM knows of its own classes, for which it otherwise starts a process that imports all of it again."""


class Process(subprocess.Popen[str]):
    """Prints into a file: a pipe that nobody reads would stop the run when it is full."""

    def __init__(self, command: list[str], printed: Path, **options: Any) -> None:
        self.printed = printed
        with printed.open("w") as file:
            super().__init__(command, stdout=file, stderr=subprocess.STDOUT, text=True, **options)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.printed.read_text(), ""


class Runner:
    """Starts `rljob` with a home of its own and waits for it, never for ever."""

    def __init__(self, folder: Path, warm: Warm) -> None:
        self.folder = folder
        self._warm = warm
        self._started: list[Process | Forked] = []
        self._left: list[Path] = []

    def leaves(self, folder: Path) -> None:
        """A folder outside the test's own, which goes with it."""
        self._left.append(folder)

    def write(self, job: dict[str, Any], name: str = "job.yaml") -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump(job))
        return path

    def start(
        self,
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "rljob_trainer.cli"),
        cold: bool = False,
        workers: bool = True,
        mounts: bool = False,
    ) -> Process | Forked:
        """``program`` is what the interpreter runs: `rljob`, or a test's own version of it. ``cold``: in one that has
        imported nothing yet, with Ray's own workers. Without forked ``workers`` the run has those too, and has not
        imported Ray. With ``mounts`` it has its own, which nobody else sees."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        whole = {
            **os.environ,
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": VLLM_CACHE,
            **(environment or {}),
        }
        given, printed = [str(argument) for argument in arguments], self.folder / f"printed-{len(self._started)}"
        process: Process | Forked
        if cold:
            command = [sys.executable, *program, *given]
            process = Process(command, printed, env=whole, cwd=self.folder)
        else:
            process = self._warm.start(
                program, given, printed, env=whole, cwd=self.folder, workers=workers, mounts=mounts
            )
        self._started.append(process)
        return process

    def run(self, *arguments: str | Path, expect: int = 0, **options: Any) -> str:
        """Runs to the end and returns what was printed; ``options`` as for ``start``."""
        process = self.start(*arguments, **options)
        printed, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == expect, printed
        return printed

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for folder in self._left:
            shutil.rmtree(folder, ignore_errors=True)


def metrics_of(output: Path) -> list[dict[str, Any]]:
    """The steps of a run that are on the disk, without the last line if it is half written."""
    path = output / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def free_port() -> int:
    """A port of the loopback device that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], process: Process | Forked, look_seconds: float = 0.02) -> None:
    """Waits until ``condition`` holds, as long as the process lives; one that raises ``OSError`` does not hold yet."""
    deadline = time.monotonic() + SECONDS

    def holds() -> bool:
        try:
            return condition()
        except OSError:
            return False

    while not holds():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(look_seconds)
