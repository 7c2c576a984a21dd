"""The terminal of a run is closed: it leaves a checkpoint, as after any other signal, and nobody stays."""

from __future__ import annotations

import json
import os
import pty
import signal
from pathlib import Path

import psutil
from real_runs import Runner, metrics_of, wait_for
from tiny_job import copy_job

ON_A_TERMINAL_OF_ITS_OWN = """
import fcntl, os, signal, sys, termios
from rljob_trainer.cli import main

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may have been started with nohup, which a run respects
terminal = os.open(sys.argv.pop(1), os.O_RDWR)
os.setsid()
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)  # whoever closes its other end hangs up on this process
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
os.close(terminal)
sys.exit(main())
"""


def test_a_closed_terminal_leaves_a_checkpoint_and_nobody(runner: Runner) -> None:
    job = runner.write(copy_job(checkpoint={"everySteps": 0}, validation={"atStart": False}, stop={"steps": 100000}))
    output: Path = runner.folder / "output"
    other_end, terminal = pty.openpty()
    name = os.ttyname(terminal)
    # Plain: nobody reads from the terminal, which takes a few pages.
    program = ("-c", ON_A_TERMINAL_OF_ITS_OWN, name)
    process = runner.start("run", job, "--output", output, "--plain", program=program)
    wait_for(lambda: len(metrics_of(output)) > 2, process)
    others = psutil.Process(process.pid).children(recursive=True)
    os.close(terminal)
    os.close(other_end)
    process.send_signal(signal.SIGHUP)  # a shell would send its own as well
    process.wait(timeout=60)
    assert process.returncode == 128 + signal.SIGHUP
    summary = json.loads((output / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert (output / "checkpoints" / f"step-{summary['steps']:08d}" / "manifest.json").exists()
    _, left = psutil.wait_procs(others, timeout=30)
    assert not left
