"""From `kubectl apply` to the first step and from a loss to the next one, against a plain RayJob; and from `kubectl
scale` to the first sample.

    KUBECONFIG=... .venv/bin/python -m benchmarks.cluster            # a cluster with KubeRay and the operator

Both sides have the same pods, image and program, and take turns. Moments come from watches of the API server and from
what the driver writes, so the clocks of this machine and of the nodes must agree to a tenth of a second.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from namespaces import fresh_namespace
from world import Settings, World, program

from benchmarks.cluster import sides
from benchmarks.cluster.recovery import CHECKPOINT_EVERY, LOSSES, Loss, recover
from benchmarks.cluster.sightings import Sightings, watched
from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, interleaved, ratios, table, write_results

HERE = Path(__file__).parent
STEPS = 3
FOREVER = 100_000
OURS, THEIRS = "RLJob", "RayJob"
PODS = 3


@dataclass(frozen=True, slots=True)
class StartSeconds:
    """Seconds of each stage from `kubectl apply` to the end of the first step; a stage ends when the next begins."""

    cluster: float
    """The RayCluster exists: our operator, or KubeRay's RayJob controller."""
    pods: float
    """All pods exist: KubeRay."""
    containers: float
    """Their containers run: scheduler, kubelet, containerd."""
    ray: float
    """All pods are ready: Ray."""
    driver: float
    """The driver has read its job: the submission, Ray's job supervisor, Python's imports."""
    load: float
    """The first step begins: learner and engine are loaded."""
    step: float
    """The first step is trained."""
    learner: float
    """Of `load`: the learner's part, by the driver's own clock."""
    engine: float
    """Of `load`: the engine's, which starts at the same time."""

    @property
    def whole(self) -> float:
        return sum(getattr(self, name) for name in STAGES)


WITHIN_LOAD = ("learner", "engine")
STAGES = tuple(field.name for field in fields(StartSeconds) if field.name not in WITHIN_LOAD)


@dataclass(frozen=True, slots=True)
class Growth:
    """Seconds from `kubectl scale` on."""

    ready: float
    """The new pod is ready."""
    first_request: float
    """The new engine works on its first request."""
    first_sample: float
    """It has answered one: it works on fewer than before."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only-loss", choices=LOSSES, help="measure nothing but the recovery from this")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    machine = Hardware.here()
    with fresh_namespace(Settings()) as world:
        if args.only_loss:
            recovery = {args.only_loss: recoveries_from(world, args.only_loss, args.repetitions)}
            write_results(args.output, f"lost_{args.only_loss}", machine, recovery, recoveries_table(recovery))
            return
        starts = interleaved(
            {
                OURS: lambda number: start(world, f"ours-{number}", plain=False),
                THEIRS: lambda number: start(world, f"theirs-{number}", plain=True),
            },
            args.repetitions,
        )
        recoveries = {loss: recoveries_from(world, loss, args.repetitions) for loss in LOSSES}
        growths = [grow(world, f"grows-{number}") for number in range(args.repetitions)]
    found = {"starts": starts, "recoveries": recoveries, "growths": growths}
    write_results(args.output, "cluster", machine, found, report(starts, recoveries, growths))


def start(world: World, name: str, *, plain: bool) -> StartSeconds:
    """One job from `kubectl apply` to its first steps, all pods gone before and after."""
    job = world.job_document(name, stop={"steps": STEPS}, validation={"every": STEPS, "atStart": False})
    kubectl = [program(), "--namespace", world.namespace]
    with watched(kubectl, "rayclusters") as clusters, watched(kubectl, "pods") as pods:
        applied = time.time()
        sides.apply(world, job, plain=plain)
        folder = sides.state_folder(world, name, plain=plain)
        if plain:
            world.until(f"{name} is done", lambda: "jobStatus" in rayjob(world, name) and ended(world, name), 900)
        else:
            world.until_finished(name, seconds=900)
    moments = [applied, clusters[0][0], *stages(pods), *from_driver(world, folder)]
    within = sides.loaded(world, folder)
    sides.remove(world, name, plain=plain)
    return StartSeconds(*(max(0.0, later - earlier) for earlier, later in itertools.pairwise(moments)), *within)


def rayjob(world: World, name: str) -> dict[str, Any]:
    return dict(world.get("rayjob", name).get("status", {}))


def ended(world: World, name: str) -> bool:
    status = rayjob(world, name)["jobStatus"]
    if status in ("FAILED", "STOPPED"):
        raise RuntimeError(f"the RayJob {name} is {status}: {rayjob(world, name).get('message')}")
    return bool(status == "SUCCEEDED")


def stages(pods: Sightings) -> list[float]:
    """When the last of the job's pods existed, its container ran, and it was ready."""
    exists: dict[str, float] = {}
    runs: dict[str, float] = {}
    ready: dict[str, float] = {}
    for moment, pod in pods:
        if not role_of(pod):
            continue
        name = pod["metadata"]["name"]
        exists.setdefault(name, moment)
        if any("running" in container.get("state", {}) for container in pod["status"].get("containerStatuses", ())):
            runs.setdefault(name, moment)
        if is_ready(pod):
            ready.setdefault(name, moment)
    found = [max(stage.values()) for stage in (exists, runs, ready) if len(stage) == PODS]
    if len(found) < 3:
        raise RuntimeError(f"{len(exists)} pods were seen, {len(runs)} running and {len(ready)} ready, of {PODS}")
    return found


def role_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"].get("labels", {}).get("rljob.dev/role", ""))


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def from_driver(world: World, folder: str) -> list[float]:
    """When the driver had read its job, when the first step began, and when it was done."""
    first = next(line for line in sides.steps(world, folder) if line["step"] == 1)
    done = datetime.fromisoformat(first["time"]).timestamp()
    return [sides.began(world, folder), done - first["timing/step_seconds"], done]


def recoveries_from(world: World, loss: Loss, repetitions: int) -> dict[str, list[float]]:
    """Seconds, of both sides in turn."""

    def side(number: int, *, plain: bool) -> float:
        name = f"{'theirs' if plain else 'ours'}-loses-{loss}-{number}"
        job = world.job_document(
            name,
            stop={"steps": FOREVER},
            validation={"every": FOREVER, "atStart": False},
            checkpoint={"everySteps": CHECKPOINT_EVERY},
        )
        return recover(world, job, loss, plain=plain)

    return interleaved({OURS: partial(side, plain=False), THEIRS: partial(side, plain=True)}, repetitions)


def grow(world: World, name: str) -> Growth:
    """One engine becomes two while the job trains."""
    stop = {"steps": FOREVER}
    world.apply(world.job_document(name, stop=stop, validation={"every": FOREVER, "atStart": False}))
    world.until_step(name, 3, seconds=900)
    (before,) = world.pods(name, "rollout")
    (head,) = world.pods(name, "head")
    old = before["metadata"]["name"]
    kubectl = [program(), "--namespace", world.namespace]
    with watched(kubectl, "pods") as pods:
        begun = time.time()
        world.kubectl("scale", f"rlj/{name}", "--replicas=2")
        said = world.kubectl("exec", head["metadata"]["name"], "--", *watch_driver(old), seconds=600)
        works, answered = (float(moment) for moment in said.split())
        # The engine doesn't wait for the pod's probe, nor does its first sample.
        world.until("the new pod is ready", lambda: bool(ready_beside(pods, old)))
    became = min(ready_beside(pods, old))
    sides.remove(world, name, plain=False)
    return Growth(became - begun, works - begun, answered - begun)


def ready_beside(pods: Sightings, old: str) -> list[float]:
    """When another rollout pod than ``old`` was seen to be ready."""
    return [
        moment
        for moment, pod in list(pods)
        if role_of(pod) == "rollout" and pod["metadata"]["name"] != old and is_ready(pod)
    ]


def watch_driver(old: str) -> list[str]:
    """A command for the head pod: asks the driver about engines in other pods than ``old``, and prints when one has its
    first request and when it has answered one.
    """
    return ["python", "-c", ASK, old]


ASK = """
import json, sys, time, urllib.request
token = open("/etc/rljob/tokens/driver_token").read().strip()
asked = urllib.request.Request("http://127.0.0.1:8470/v1/status", headers={"Authorization": f"Bearer {token}"})
before = 0
while True:
    with urllib.request.urlopen(asked, timeout=60) as answer:
        engines = json.load(answer)["pools"]["rollout"]["engines"]
    running = sum(engine.get("running", 0) for engine in engines if engine.get("pod") not in (None, sys.argv[1]))
    if running > before == 0:
        print(time.time())
    elif running < before:
        print(time.time())
        break
    before = running
    time.sleep(0.05)
"""


def report(
    starts: dict[str, list[StartSeconds]], recoveries: dict[Loss, dict[str, list[float]]], growths: list[Growth]
) -> str:
    names = [*STAGES, "whole", *WITHIN_LOAD]
    rows = [
        [side, *(MeasuredSpread.of([getattr(run, name) for run in runs]).show(".1f") for name in names)]
        for side, runs in starts.items()
    ]
    share = ratios([run.whole for run in starts[OURS]], [run.whole for run in starts[THEIRS]])
    grown = [
        ["new pod ready", MeasuredSpread.of([growth.ready for growth in growths]).show(".1f")],
        ["new engine at work", MeasuredSpread.of([growth.first_request for growth in growths]).show(".1f")],
        ["its first sample", MeasuredSpread.of([growth.first_sample for growth in growths]).show(".1f")],
    ]
    return "\n".join(
        [
            "# From kubectl to training",
            "",
            "Seconds from `kubectl apply` to the end of the first step, by stage; images are on the nodes.",
            "",
            table(["side", *STAGES, "whole", *(f"{name}, of load" for name in WITHIN_LOAD)], rows),
            f"RLJob over RayJob, pair by pair: {MeasuredSpread.of(share).show()}.",
            "",
            "Seconds from a loss to the end of the first step after it (RayJob: by its `backoffLimit`):",
            "",
            recoveries_table(recoveries),
            "",
            "Seconds from `kubectl scale` (1 to 2 engines, training goes on):",
            "",
            table(["until", "seconds"], grown),
        ]
    )


def recoveries_table(recoveries: dict[Loss, dict[str, list[float]]]) -> str:
    rows = [
        [
            loss,
            *(MeasuredSpread.of(of_loss[side]).show(".1f") for side in (OURS, THEIRS)),
            MeasuredSpread.of(ratios(of_loss[OURS], of_loss[THEIRS])).show(),
        ]
        for loss, of_loss in recoveries.items()
    ]
    return table(["lost", OURS, THEIRS, "RLJob over RayJob"], rows)


if __name__ == "__main__":
    main()
