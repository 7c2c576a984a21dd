"""From a loss to the first step after it: by our operator, and by a RayJob's `backoffLimit`.

Both have the same checkpoints on the same volume, and the same program goes on from them. What differs is who finds out
that something is lost, how, and what is begun anew: an RLJob whose driver is gone keeps its cluster, a RayJob gets a
new one.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from world import World

from benchmarks.cluster import sides

Loss = Literal["head", "driver"]
LOSSES: tuple[Loss, ...] = ("head", "driver")
CHECKPOINT_EVERY = 5
BACKOFF_LIMIT = 3

KILL_THE_DRIVER = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").iterdir():
    if folder.name.isdigit() and int(folder.name) != os.getpid():
        try:
            command = (folder / "cmdline").read_bytes().split(b"\\0")
        except OSError:
            continue
        if b"drive" in command and b"--generation" in command:
            os.kill(int(folder.name), signal.SIGKILL)
"""


def recover(world: World, job: dict[str, Any], loss: Loss, *, plain: bool) -> float:
    """Seconds from the loss to the end of the first step that was trained after it, on a job that trains for ever."""
    name = job["metadata"]["name"]
    sides.apply(world, job, plain=plain, backoff_limit=BACKOFF_LIMIT)
    folder = sides.state_folder(world, name, plain=plain)
    world.until("there is a checkpoint", lambda: len(sides.steps(world, folder)) > CHECKPOINT_EVERY + 1, seconds=900)
    lost = _lose(world, name, loss)
    world.until("the next attempt has begun", lambda: sides.began(world, folder) > lost, seconds=900)
    began = sides.began(world, folder)
    world.until("it has trained a step", lambda: bool(_after(world, folder, began)), seconds=900)
    recovered = min(_after(world, folder, began))
    sides.remove(world, name, plain=plain)
    return recovered - lost


def _lose(world: World, name: str, loss: Loss) -> float:
    (head,) = world.pods(name, "head")
    now = float(world.in_results("date", "+%s.%N"))
    if loss == "head":
        world.kubectl("delete", "pod", head["metadata"]["name"], "--grace-period=0", "--force")
    else:
        world.kubectl("exec", head["metadata"]["name"], "--", "python", "-c", KILL_THE_DRIVER)
    return now


def _after(world: World, folder: str, moment: float) -> list[float]:
    """When the steps of an attempt ended."""
    ends = [datetime.fromisoformat(line["time"]).timestamp() for line in sides.steps(world, folder)]
    return [end for end in ends if end > moment]
