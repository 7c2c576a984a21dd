"""A worker of Ray that a test's own process forks is what one in an interpreter of its own would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm_workers

PROGRAM = """
import json, os, random, signal, sys
import ray
from rljob_trainer.driver.local_ray import ray_for_run

class Seen:
    def things(self):
        import __main__
        paths = __main__.__file__, sys.argv[0], sys.path[0]
        return paths, os.environ["GIVEN"], signal.getsignal(signal.SIGCHLD), sorted(os.environ)

    def drawn(self):
        return os.getpid(), os.getpgid(0), random.random(), "torch" in sys.modules

file, address, killed = sys.argv[1:]
if address:
    from warm_workers import fork_workers
    fork_workers(address)
with ray_for_run(2):
    actors = [ray.remote(Seen).options(runtime_env={"env_vars": {"GIVEN": "to it"}}).remote() for _ in range(2)]
    seen = ray.get(actors[0].things.remote())
    (one, _, drawn, warm), (two, group, other, _) = ray.get([actor.drawn.remote() for actor in actors])
    assert one != two and drawn != other
    os.kill(one, 9)
    try:
        ray.get(actors[0].drawn.remote())
    except ray.exceptions.ActorDiedError:
        json.dump({"seen": seen, "warm": warm, "left": two, "group": group}, open(file, "w"))
    if killed == "killed":
        os.kill(os.getpid(), 9)
"""


def run(folder: Path, address: str, *, killed: bool = False, code: int = 0) -> dict[str, Any]:
    """What the actors of one Ray saw, forked by who listens at ``address`` if that is not empty."""
    said = [str(folder / "said"), address, "killed" if killed else "lives"]
    path = str(Path(warm_workers.__file__).parent)
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *said], env=os.environ | {"PYTHONPATH": path}, timeout=300)
    assert ended.returncode == code
    seen: dict[str, Any] = json.loads((folder / "said").read_text())
    return seen


@pytest.mark.slow(stands_for="tests/runs/test_warm.py::test_it_sees_and_leaves_what_an_interpreter_would")
def test_it_sees_what_it_would_and_its_death_is_seen_and_it_does_not_outlive_a_driver_that_is_killed(
    forked_workers: str, tmp_path: Path
) -> None:
    forked = run(tmp_path, forked_workers, killed=True, code=-signal.SIGKILL)
    assert forked["group"] != os.getpgid(0)  # not that of the process that forks
    with suppress(psutil.NoSuchProcess):
        psutil.Process(forked["left"]).wait(120)
    own = run(tmp_path, "")
    assert (forked["warm"], own["warm"]) == (True, False)
    assert forked["seen"] == own["seen"]
