"""An engine whose process Ray's memory monitor has ended is lost like any other, and the reason says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def test_an_engine_that_ran_out_of_memory_is_lost_and_says_why() -> None:
    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        environment = os.environ | {"HOME": folder, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        script = Path(__file__).with_name("starved.py")
        done = subprocess.run(
            [sys.executable, str(script), folder], env=environment, capture_output=True, text=True, timeout=500
        )
    assert done.returncode == 0, done.stderr[-2000:]
    lost = [line for line in done.stdout.splitlines() if line.startswith("lost: ")]
    assert len(lost) == 2
    for line in lost:
        assert re.search(r"engine 0 is gone \(out of memory, \S+B of \S+B were in use: Ray killed its process", line)
