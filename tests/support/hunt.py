"""Runs tests again and again under load, to find those that fail now and then: `make hunt TEST=... TIMES=10`.

Two processes for each core do nothing but keep it busy meanwhile. A test that is named by its id runs alone, a file or
folder as CI runs it, slow tests left out. It prints what failed how often and with what; the output of runs that failed
stays. Tests of `tests/unsteady.yaml` are told how often they have passed (``unsteady``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import unsteady

LOOPS = 2
"""For each core."""
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
"""Until whoever started it is gone, however that ends."""
SUMMARY = re.compile(r"^(?P<how>PASSED|FAILED|ERROR) (?P<test>\S+::.+?)(?: - (?P<error>.*))?$", re.MULTILINE)
"""A line of pytest's short summary."""


def main() -> int:
    test, times = sys.argv[1], int(sys.argv[2])
    if not test:
        print("what is to be hunted? make hunt TEST=tests/trainer/rollout TIMES=10", file=sys.stderr)
        return 2
    kept = Path(tempfile.mkdtemp(prefix="rljob-hunt-"))
    ran, failed, errors = Counter[str](), Counter[str](), dict[str, str]()
    with busy():
        for number in range(1, times + 1):
            began, log = time.monotonic(), kept / f"{number}.log"
            code = run(test, log)
            fell = dict(outcomes(log.read_text()))
            if code not in (0, 1) or not fell:
                print(f"no tests ran:\n{log.read_text()}", file=sys.stderr)
                return code
            ran.update(fell.keys())
            for name, error in fell.items():
                if error is not None:
                    failed[name] += 1
                    errors.setdefault(name, error)
            said = ", ".join(name for name, error in fell.items() if error is not None)
            print(f"{number} of {times}, {time.monotonic() - began:.0f} s: {said or 'passed'}", flush=True)
            if not said:
                log.unlink()
    entries = unsteady.read()
    if entries:
        for name, count in ran.items():
            entries = unsteady.hunted(entries, name, count - failed[name], failed[name])
        unsteady.write(entries)
    for name, count in failed.most_common():
        print(f"failed {count} of {ran[name]}: {name}: {errors[name]}")
    print(f"{len(failed)} of {len(ran)} tests failed" + (f"; what they printed is in {kept}" if failed else ""))
    return 1 if failed else 0


@contextmanager
def busy() -> Iterator[None]:
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(LOOPS * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(test: str, log: Path) -> int:
    shared = ["-n", "0"] if "::" in test else ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "pytest", test, *shared, "-p", "no:cacheprovider", "-r", "pfE"]
    with log.open("w") as printed:
        wide = os.environ | {"COLUMNS": "1000"}  # errors are cut to the width of the terminal
        return subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, env=wide).returncode


def outcomes(printed: str) -> Iterator[tuple[str, str | None]]:
    """What pytest's summary says: each test's id, and the first line of what it failed with."""
    for found in SUMMARY.finditer(printed):
        yield found["test"], None if found["how"] == "PASSED" else found["error"] or "without a word"


if __name__ == "__main__":
    raise SystemExit(main())
