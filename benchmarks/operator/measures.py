"""The measurements: jobs that wait at start (three sides), one job at a time, many at rest, many that are polled."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.environments import ROOT
from benchmarks.operator.client import (
    CLUSTERS,
    JOBS,
    Client,
    Watching,
    Write,
    all_at_once,
    job_document,
    make_jobs,
    writes_for,
)
from benchmarks.operator.heads import ADDRESS
from benchmarks.operator.plane import NAMESPACE, ControlPlane, OperatorProcess, die_with_parent, fresh_plane
from benchmarks.operator.usage import peak_bytes, processor_seconds
from rljob_operator import names
from rljob_operator.tokens import TokenKey

PATIENCE_SECONDS = 900.0
NOBODY = "--head-address=http://127.0.0.1:9/{namespace}/{service}/{port}"
"""No head ever answers."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Jobs that were there before whoever works on them was started."""

    jobs: int
    seconds: float
    """From the first cluster or status that a watch saw to the last."""
    from_start: float | None
    """From the start of the process to the last; None for the bare client, which has none."""
    peak_bytes: int | None

    @property
    def rate(self) -> float:
        """Jobs a second."""
        return self.jobs / self.seconds


@dataclass(frozen=True, slots=True)
class Rest:
    """Processor time of an operator that has nothing to do."""

    objects: int
    """RLJobs and RayClusters."""
    seconds: float
    core_share: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Polling:
    """How often running jobs were asked."""

    jobs: int
    wanted_seconds: float
    intervals: tuple[float, float, float]
    """Median, 95th percentile and longest time between two questions to the same driver, seconds."""
    core_share: float
    peak_bytes: int
    progress_lag: float
    """Median age of the progress in the stored status at the end, seconds."""


def names_of(count: int) -> list[str]:
    return [f"job-{index}" for index in range(count)]


def bare_burst(jobs: int) -> Burst:
    """The same writes by a client that does nothing else."""
    return asyncio.run(_bare_burst(jobs))


async def _bare_burst(jobs: int) -> Burst:
    with fresh_plane() as (plane, folder):
        (folder / "key").write_text("k" * 64)
        key = TokenKey.read(folder / "key")
        async with Client(plane) as client:
            await make_jobs(client, names_of(jobs))
            ready = [writes_for(raw, key) for raw in (await client.get(JOBS))["items"]]

            def call(writes: Sequence[Write]) -> Callable[[], Awaitable[Any]]:
                async def one_job() -> None:
                    for write in writes:
                        await client.send(write)

                return one_job

            async with Watching(client) as arrivals:
                await all_at_once(call(writes) for writes in ready)
                await arrivals.until(jobs, PATIENCE_SECONDS)
                return Burst(jobs, arrivals.last - arrivals.first, None, None)


def operator_burst(jobs: int) -> Burst:
    """Ours."""
    return asyncio.run(_process_burst(jobs, start_operator))


def probe_burst(jobs: int) -> Burst:
    """The kopf `on.create` operator."""
    return asyncio.run(_process_burst(jobs, start_probe))


def start_operator(plane: ControlPlane, folder: Path, *arguments: str) -> OperatorProcess:
    own = (f"--namespace={NAMESPACE}", "--probe-port=0", "--log-level=warning")
    return OperatorProcess(plane, folder, "operator", (*own, *(arguments or (NOBODY,))))


def start_probe(plane: ControlPlane, folder: Path) -> OperatorProcess:
    return OperatorProcess(plane, folder, "probe", (NAMESPACE, str(folder / "key")), module="benchmarks.operator.probe")


async def _process_burst(jobs: int, start: Callable[[ControlPlane, Path], OperatorProcess]) -> Burst:
    with fresh_plane() as (plane, folder):
        async with Client(plane) as client:
            await make_jobs(client, names_of(jobs))
            async with Watching(client) as arrivals:
                began = time.perf_counter()
                process = start(plane, folder)
                try:
                    await arrivals.until(jobs, PATIENCE_SECONDS)
                    peak = peak_bytes(process.pid)
                except BaseException:
                    print(process.log.read_text()[-3000:])
                    raise
                finally:
                    process.stop()
                return Burst(jobs, arrivals.last - arrivals.first, arrivals.last - began, peak)


def latencies(posts: int) -> list[float]:
    """Seconds from a POST of an RLJob (before it is sent) to its RayCluster in a watch, one job after the other."""
    return asyncio.run(_latencies(posts))


async def _latencies(posts: int) -> list[float]:
    found = []
    with fresh_plane() as (plane, folder):
        async with Client(plane) as client, Watching(client) as arrivals:
            process = start_operator(plane, folder)
            try:
                for index, name in enumerate(names_of(posts + 1)):
                    body = json.dumps(job_document(name)).encode()
                    began = time.perf_counter()
                    await client.send(Write("POST", JOBS, "application/json", body))
                    await arrivals.until(index + 1, PATIENCE_SECONDS)
                    found.append(arrivals.clusters[name] - began)
                    # Whatever follows the creation is over by then.
                    await asyncio.sleep(0.2)
            finally:
                process.stop()
    # The first waits for the operator to start.
    return found[1:]


def bare_latencies(posts: int) -> list[float]:
    """The same with a bare client that makes the operator's writes in their order as soon as the POST is answered.

    What that client computes between the two doesn't count: this is the API server's share, with the watch's.
    """
    return asyncio.run(_bare_latencies(posts))


async def _bare_latencies(posts: int) -> list[float]:
    found = []
    with fresh_plane() as (plane, folder):
        (folder / "key").write_text("k" * 64)
        key = TokenKey.read(folder / "key")
        async with Client(plane) as client, Watching(client) as arrivals:
            for index, name in enumerate(names_of(posts + 1)):
                body = json.dumps(job_document(name)).encode()
                began = time.perf_counter()
                answer = await client.send(Write("POST", JOBS, "application/json", body))
                answered = time.perf_counter()
                status, *surroundings, cluster = writes_for(json.loads(answer), key)
                computed = time.perf_counter() - answered

                await asyncio.gather(*(client.send(write) for write in surroundings))
                await client.send(cluster)
                await client.send(status)
                await arrivals.until(index + 1, PATIENCE_SECONDS)
                found.append(arrivals.clusters[name] - began - computed)
                await asyncio.sleep(0.2)
    return found[1:]


def many(jobs: int, idle_seconds: float) -> tuple[Burst, Rest]:
    """A burst, and what the operator costs afterwards when nothing happens."""
    return asyncio.run(_many(jobs, idle_seconds))


async def _many(jobs: int, idle_seconds: float) -> tuple[Burst, Rest]:
    with fresh_plane() as (plane, folder):
        async with Client(plane) as client:
            await make_jobs(client, names_of(jobs))
            async with Watching(client) as arrivals:
                began = time.perf_counter()
                process = start_operator(plane, folder)
                try:
                    await arrivals.until(jobs, PATIENCE_SECONDS)
                    burst = Burst(jobs, arrivals.last - arrivals.first, arrivals.last - began, peak_bytes(process.pid))
                    await _quiet(process.pid)
                    before = processor_seconds(process.pid)
                    await asyncio.sleep(idle_seconds)
                    used = processor_seconds(process.pid) - before
                    rest = Rest(2 * jobs, idle_seconds, used / idle_seconds, peak_bytes(process.pid))
                finally:
                    process.stop()
                return burst, rest


async def _quiet(pid: int) -> None:
    """Waits for the end of what follows a burst: the second status of each job, and its events."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        before = processor_seconds(pid)
        await asyncio.sleep(5)
        if processor_seconds(pid) - before < 0.25:
            return
    raise TimeoutError("the operator doesn't come to rest")


def polling(jobs: int, every_seconds: float, seconds: float) -> Polling:
    """Running jobs whose drivers make a step a second, asked every so often."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.operator.heads", str(port)]
    heads = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=die_with_parent)
    try:
        return asyncio.run(_polling(jobs, port, every_seconds, seconds))
    finally:
        heads.send_signal(signal.SIGTERM)
        heads.wait(10)


async def _polling(jobs: int, port: int, every_seconds: float, seconds: float) -> Polling:
    with fresh_plane() as (plane, folder):
        async with Client(plane) as client:
            await make_jobs(client, names_of(jobs))
            process = start_operator(
                plane,
                folder,
                f"--head-address={ADDRESS.format(port=port)}",
                f"--poll-seconds={every_seconds}",
            )
            try:
                return await _polled(client, process, jobs, port, every_seconds, seconds)
            finally:
                process.stop()


async def _polled(
    client: Client, process: OperatorProcess, jobs: int, port: int, every_seconds: float, seconds: float
) -> Polling:
    async with Watching(client) as arrivals:
        await arrivals.until(jobs, PATIENCE_SECONDS)
    clusters = (await client.get(CLUSTERS))["items"]
    await all_at_once(_pods_of(client, cluster) for cluster in clusters)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(await _asked(port)) < jobs:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {len(await _asked(port))} of {jobs} jobs are polled")
        await asyncio.sleep(1)
    await asyncio.sleep(2 * every_seconds)
    began, before = time.time(), processor_seconds(process.pid)
    await asyncio.sleep(seconds)
    ended, used = time.time(), processor_seconds(process.pid) - before
    gaps = []
    for moments in (await _asked(port)).values():
        inside = [began, *(moment for moment in moments if began <= moment <= ended), ended]
        # The ends of the window count as questions only if the gap to them is longer than it should be.
        gaps += [b - a for a, b in pairwise(inside[1:-1])]
        gaps += [gap for gap in (inside[1] - inside[0], inside[-1] - inside[-2]) if gap > 1.5 * every_seconds]
    gaps.sort()
    lags = sorted(await _lags(client))
    return Polling(
        jobs,
        every_seconds,
        (gaps[len(gaps) // 2], gaps[int(0.95 * len(gaps))], gaps[-1]),
        used / seconds,
        peak_bytes(process.pid),
        lags[len(lags) // 2],
    )


async def _asked(port: int) -> dict[str, list[float]]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/asked") as response:
        found: dict[str, list[float]] = await response.json()
        return found


async def _lags(client: Client) -> list[float]:
    """Seconds by which each stored step is behind the drivers'."""
    steps = [item.get("status", {}).get("progress", {}).get("step", 0) for item in (await client.get(JOBS))["items"]]
    return [float(max(steps) - step) for step in steps]


def _pods_of(client: Client, cluster: dict[str, Any]) -> Callable[[], Awaitable[None]]:
    """Plays KubeRay and the kubelets for one cluster: its pods are there, and ready."""
    spec = cluster["spec"]
    wanted = [("head", "headgroup", spec["headGroupSpec"]["template"], 1)]
    wanted += [("worker", g["groupName"], g["template"], g["replicas"]) for g in spec["workerGroupSpecs"]]
    name = cluster["metadata"]["name"]
    pods_path = f"/api/v1/namespaces/{NAMESPACE}/pods"

    async def make() -> None:
        for kind, group, template, count in wanted:
            for index in range(count):
                labels = {
                    **template["metadata"]["labels"],
                    names.RAY_CLUSTER_LABEL: name,
                    names.RAY_GROUP_LABEL: group,
                    names.RAY_NODE_TYPE_LABEL: kind,
                }
                pod = {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": f"{name}-{group}-{index}", "labels": labels},
                    "spec": template["spec"],
                }
                await client.send(Write("POST", pods_path, "application/json", json.dumps(pod).encode()))
                status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
                body = json.dumps({"status": status}).encode()
                path = f"{pods_path}/{pod['metadata']['name']}/status"  # type: ignore[index]
                await client.send(Write("PATCH", path, "application/merge-patch+json", body))

    return make
