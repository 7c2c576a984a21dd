"""`rljob run` onto a disk that fills up, or cannot be written: mounts in a namespace of the run's own."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from real_runs import Runner, metrics_of
from tiny_job import copy_job

NAMESPACE = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))
SMALL = """
import shutil, subprocess, sys
from rljob_trainer.cli import main

disk, left = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", disk], check=True)
code = main(["run", "job.yaml", "--output", f"{disk}/output"])
# The disk goes with the namespace.
shutil.copytree(f"{disk}/output", left)
sys.exit(code)
"""
# A file system on which somebody writes cannot be closed: "mount point is busy", until the checkpoint is complete.
CLOSED_MEANWHILE = """
import os, subprocess, sys
from rljob_trainer.cli import main

closing = '''
until [ -e "$1/checkpoints/step-00000002" ]; do sleep 0.05; kill -0 $2 || exit; done
mount --bind "$1/checkpoints" "$1/checkpoints"
until mount -o remount,bind,ro "$1/checkpoints" 2>/dev/null; do kill -0 $2 || exit; done
'''
subprocess.Popen(["sh", "-c", closing, "sh", sys.argv[1], str(os.getpid())])
sys.exit(main(["run", "job.yaml", "--output", sys.argv[1]]))
"""
CLOSED = """
import subprocess, sys
from rljob_trainer.cli import main

subprocess.run(["mount", "--bind", sys.argv[1], sys.argv[1]], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", sys.argv[1]], check=True)
sys.exit(main(["run", "job.yaml", "--output", f"{sys.argv[1]}/output"]))
"""


def may_mount() -> bool:
    return subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not may_mount(), reason="a namespace with mounts of its own is not allowed here")


@needs_mounts
def test_training_goes_on_without_checkpoints_that_do_not_fit_and_resumes_from_the_last_that_did(
    runner: Runner,
) -> None:
    spec = {"validation": {"atStart": False}, "checkpoint": {"everySteps": 1, "keep": 20}, "stop": {"steps": 8}}
    job = runner.write(copy_job(**spec))
    disk, left = runner.folder / "disk", runner.folder / "left"
    disk.mkdir()
    # No room, of which a retry makes no more.
    printed = runner.run(disk, left, program=("-c", SMALL), mounts=True, expect=73)
    whole = sorted(path.name for path in (left / "checkpoints").iterdir())
    last = int(whole[-1].removeprefix("step-"))
    assert 1 <= last < 7
    assert whole == [f"step-{step:08d}" for step in range(1, last + 1)]  # and nothing of those that did not fit
    for step in range(last + 1, 8):
        assert f"step-{step:08d}" in printed
    said = f"make room or choose another folder Training continues; the last checkpoint is that of step {last}."
    assert printed.count(said) == 7 - last
    assert "MB are free" in printed
    assert [record["step"] for record in metrics_of(left)] == list(range(1, 9))
    assert json.loads((left / "summary.json").read_text())["outcome"] == "failed"
    assert "the newest checkpoint could not be written" in runner.run("status", left)
    # With room again, the same command goes on.
    printed = runner.run("run", job, "--output", left)
    assert f"resuming from the checkpoint of step {last}" in printed
    assert [record["step"] for record in metrics_of(left)] == list(range(1, 9))
    assert "missing" not in runner.run("status", left)


@needs_mounts
def test_training_goes_on_when_checkpoints_can_no_longer_be_written(runner: Runner) -> None:
    spec = {"validation": {"atStart": False}, "checkpoint": {"everySteps": 1, "keep": 60}, "stop": {"steps": 60}}
    job = runner.write(copy_job(**spec))
    output = runner.folder / "output"
    printed = runner.run(output, program=("-c", CLOSED_MEANWHILE), mounts=True, expect=1)
    last = max(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*"))
    assert 2 <= last < 59
    assert "Read-only file system" in printed
    assert f"Training continues; the last checkpoint is that of step {last}." in printed
    assert [record["step"] for record in metrics_of(output)] == list(range(1, 61))
    assert f"resuming from the checkpoint of step {last}" in runner.run("run", job, "--output", output)


@needs_mounts
def test_an_output_folder_that_cannot_be_written_is_named_before_anything_starts(runner: Runner) -> None:
    runner.write(copy_job())
    closed = runner.folder / "closed"
    closed.mkdir()
    printed = runner.run(closed, program=("-c", CLOSED), mounts=True, expect=1)
    assert f"{closed / 'output'}" in printed
    assert "make the folder writable, or choose another folder with --output" in printed
    assert "Traceback" not in printed
