"""Nothing stops the driver's event loop: no call in it may block, and a Ray that has lost its head ends the run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
from real_runs import Runner, metrics_of, wait_for
from tiny_job import copy_job


def test_nothing_that_may_block_is_called_in_the_event_loop(runner: Runner) -> None:
    """A run with everything a run does: validation, samples, checkpoints, status, and then resumed."""
    job = copy_job(placement="separate", validation={"every": 2}, stop={"steps": 4})
    job["spec"]["logging"] = {"tensorboard": True, "samplesEvery": 1}
    path, output, noted = runner.write(job), runner.folder / "run", runner.folder / "noted"
    # Once with what is imported on the way.
    for steps, cold in (("2", True), ("4", False)):
        given = ("run", path, "--output", output, "--steps", steps, "--status-port", "0")
        program = (str(Path(__file__).with_name("loop_watch.py")),)
        runner.run(*given, program=program, cold=cold, environment={"LOOP_WATCH": str(noted)})
        assert noted.read_text().splitlines() == []
    assert [record["step"] for record in metrics_of(output)] == [0, 1, 2, 3, 4]


def test_a_run_whose_ray_has_lost_its_head_says_so_and_can_be_started_again(runner: Runner) -> None:
    job = copy_job(placement="separate")
    job["spec"]["stop"] = {"steps": 1_000_000}
    output = runner.folder / "run"
    process = runner.start("run", runner.write(job), "--output", output)
    wait_for(lambda: len(metrics_of(output)) > 3, process)
    below = psutil.Process(process.pid).children(recursive=True)
    (head,) = [child for child in below if child.name() == "gcs_server"]
    head.send_signal(signal.SIGKILL)
    printed, _ = process.communicate(timeout=50)  # in which Ray by itself would not have ended anything
    assert process.returncode == 75, printed
    said = f"Ray's gcs_server (process {head.pid}) was killed by SIGKILL"
    assert said in printed
    assert "Traceback" not in printed
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["outcome"], said in summary["reason"]) == ("failed", True)
    _, left = psutil.wait_procs(below, timeout=10)
    assert left == []
