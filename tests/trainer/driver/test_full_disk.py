"""`rljob run` into a folder on a disk that fills up: a small tmpfs, in a mount namespace of the run's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from real_runs import Runner, copy_job, metrics_of

NAMESPACE = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))
SCRIPT = """
mount -t tmpfs -o size=9m tmpfs "$1" || exit 99
"$2" -m rljob_trainer.cli run job.yaml --output "$1/output"
code=$?
# The disk goes with the namespace.
cp -r "$1/output" "$3"
exit $code
"""


def may_mount() -> bool:
    return subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="a namespace with mounts of its own is not allowed here")
def test_training_goes_on_without_checkpoints_that_do_not_fit_and_resumes_from_the_last_that_did(
    runner: Runner,
) -> None:
    spec = {"validation": {"atStart": False}, "checkpoint": {"everySteps": 1, "keep": 20}, "stop": {"steps": 8}}
    job = runner.write(copy_job(**spec))
    disk, left = runner.folder / "disk", runner.folder / "left"
    disk.mkdir()
    process = runner.start(disk, sys.executable, left, interpreter=(*NAMESPACE, "sh", "-c", SCRIPT, "sh"), program=())
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 1, printed
    whole = sorted(path.name for path in (left / "checkpoints").iterdir())
    last = int(whole[-1].removeprefix("step-"))
    assert 1 <= last < 7
    assert whole == [f"step-{step:08d}" for step in range(1, last + 1)]  # and nothing of those that did not fit
    for step in range(last + 1, 8):
        assert f"step-{step:08d}" in printed
    said = f"make room or choose another folder Training goes on; the last checkpoint is that of step {last}."
    assert printed.count(said) == 7 - last
    assert "MB are free" in printed
    assert [record["step"] for record in metrics_of(left)] == list(range(1, 9))
    assert json.loads((left / "summary.json").read_text())["outcome"] == "failed"
    assert "the newest checkpoint is missing" in runner.run("status", left)
    # With room again, the same command goes on.
    printed = runner.run("run", job, "--output", left)
    assert f"resuming from the checkpoint of step {last}" in printed
    assert [record["step"] for record in metrics_of(left)] == list(range(1, 9))
    assert "missing" not in runner.run("status", left)
