"""All head pods' HTTP sides in one server: Ray's dashboard and the driver's interface.

A head answers while its pod is ready, and forgets everything with it. Both interfaces demand the token that lies in the
cluster's Secret. What a driver does is said by the `Play` of its job; without one it makes three steps and succeeds.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from kube.control_plane import ApiCallError, ControlPlane

from fakes.kubelet import OF_RAY
from rljob_api.cluster import DRIVE_FINISHED
from rljob_api.status import (
    Ages,
    Desired,
    DriverStatus,
    End,
    LastCheckpoint,
    Pools,
    ReplicaStatus,
    RolloutStatus,
    Scores,
    ScoringPoolStatus,
    TrainerStatus,
)
from rljob_operator import names

Object = dict[str, Any]


@dataclass
class Play:
    """What the drivers of one job do."""

    steps: int | None = 3
    """Steps until success; None: go on for ever."""
    exits: dict[int, int] = field(default_factory=dict)
    """Attempts that fail, with their exit code, after their first step."""
    checkpoints: bool = False
    unsaved: str = ""
    """Why the newest checkpoint cannot be written."""
    drains: bool = True
    answers: bool = True
    leftovers: int = 0
    logs: str = "training\n"


@dataclass
class Driver:
    """One submitted driver."""

    submission: str
    entrypoint: str
    environment: dict[str, str]
    attempt: int
    generation: int
    head: str = ""
    """UID of the head pod that it runs on."""
    state: str = "RUNNING"
    exit_code: int | None = None
    step: int = 0
    replicas: int = 0
    """Engines that the job file asked for when it began."""
    desired: list[Desired] = field(default_factory=list)
    scorers: int = 0
    judges: int = 0
    """Replicas of the reward models that the job file asked for when it began."""
    used: set[str] = field(default_factory=set)
    """Pods on which it ever started an engine or a reward model."""
    drained: set[str] = field(default_factory=set)
    end: End | None = None


class FakeHeads:
    """The server. `address` is the operator's template of a head's address."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._pods = plane.mirror("/api/v1/pods", OF_RAY)
        self._tokens: dict[tuple[str, str], str] = {}
        """What lies in a head pod, by its UID and the token's name: like the pod it never changes."""
        self.plays: dict[str, Play] = {}
        self.drivers: dict[str, list[Driver]] = {}
        """By job: every driver ever started, over all heads."""
        self._heads: dict[str, dict[str, Driver]] = {}
        """By UID of the head pod: its drivers by submission id."""
        self.refused: list[str] = []
        self.drivers_refuse: int | None = None
        """With what something between operator and drivers answers, as a service mesh may."""
        """Calls without the right token."""
        self.duplicates = 0
        """Submissions of an id that the head knew already."""
        self.address = ""

    async def run(self, started: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_route("*", "/{namespace}/{service}/{port}/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            self.address = f"http://127.0.0.1:{port}/{{namespace}}/{{service}}/{{port}}"
            started.set()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        match = request.match_info
        cluster = match["service"].removesuffix("-head-svc")
        head = self._head(match["namespace"], cluster)
        if head is None:
            return web.Response(status=503, text="no head")
        on_dashboard = match["port"] == "8265"
        key = "auth_token" if on_dashboard else "driver_token"
        token = await asyncio.to_thread(self._token, head, key)
        if request.headers.get("Authorization") != f"Bearer {token}":
            self.refused.append(request.path)
            return web.Response(status=403, text="wrong token")
        if self.drivers_refuse is not None and not on_dashboard:
            return web.Response(status=self.drivers_refuse, text="not from here")
        drivers = self._heads.setdefault(head["metadata"]["uid"], {})
        handle = self._dashboard if on_dashboard else self._driver
        return await handle(request, match["path"], head, drivers)

    def _head(self, namespace: str, cluster: str) -> Object | None:
        ours = {"ray.io/cluster": cluster, "ray.io/node-type": "head"}.items()
        for pod in self._pods.objects(namespace):
            conditions = pod["status"].get("conditions", ())
            ready = any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
            if ready and ours <= pod["metadata"]["labels"].items():
                return pod
        return None

    def _token(self, head: Object, key: str) -> str:
        known = (head["metadata"]["uid"], key)
        if known not in self._tokens:
            mounted = [volume["secret"]["secretName"] for volume in head["spec"]["volumes"] if "secret" in volume]
            path = f"/api/v1/namespaces/{head['metadata']['namespace']}/secrets/{mounted[0]}"
            try:
                self._tokens[known] = base64.b64decode(self._plane.call("GET", path)["data"][key]).decode()
            except ApiCallError:
                return ""
        return self._tokens[known]

    async def _dashboard(
        self, request: web.Request, path: str, head: Object, drivers: dict[str, Driver]
    ) -> web.StreamResponse:
        job = head["metadata"]["labels"]["rljob.dev/job"]
        play = self.plays.setdefault(job, Play())
        if path == "api/jobs/" and request.method == "POST":
            file = await asyncio.to_thread(self._job_file, head["metadata"]["namespace"], job)
            replicas = file["spec"]["rollout"]["replicas"]
            scorers, judges = (
                file["spec"][pool].get("replicas", 1) if pool in file["spec"] else 0
                for pool in ("rewardModel", "judge")
            )
            sizes = (replicas, scorers, judges)
            return self._submit(await request.json(), job, head["metadata"]["uid"], sizes, drivers)
        if path.startswith("api/v0/"):
            count = play.leftovers if "actors" in path else 0
            found = [{"class_name": "Engine", "state": "ALIVE"}] * count
            return web.json_response({"result": True, "data": {"result": {"result": found}}})
        match = re.fullmatch(r"api/jobs/([^/]+)(/stop|/logs)?", path)
        driver = drivers.get(match[1]) if match else None
        if match is None or driver is None:
            return web.Response(status=404, text="no such job")
        if match[2] == "/logs":
            end = driver.end
            last = f"{DRIVE_FINISHED}{end.reason}\n" if end is not None and end.kind == "succeeded" else ""
            return web.json_response({"logs": play.logs + last})
        if match[2] == "/stop":
            if driver.state == "RUNNING":
                driver.state = "STOPPED"
            return web.json_response({"stopped": True})
        body = {"status": driver.state, "message": "", "driver_exit_code": driver.exit_code}
        if driver.exit_code:
            body["message"] = f"Job entrypoint command failed with exit code {driver.exit_code}"
        return web.json_response(body)

    def _job_file(self, namespace: str, job: str) -> Object:
        found = self._plane.call("GET", f"/api/v1/namespaces/{namespace}/configmaps/{names.config_map(job)}")
        file: Object = json.loads(found["data"][names.JOB_FILE])
        return file

    def _submit(
        self, body: Object, job: str, head: str, sizes: tuple[int, int, int], drivers: dict[str, Driver]
    ) -> web.Response:
        submission = body["submission_id"]
        if submission in drivers:
            self.duplicates += 1
            return web.Response(status=400, text=f"Job with submission_id {submission} already exists")
        words = body["entrypoint"].split()
        driver = Driver(
            submission=submission,
            entrypoint=body["entrypoint"],
            environment=body["runtime_env"]["env_vars"],
            attempt=int(words[words.index("--attempt") + 1]),
            generation=int(words[words.index("--generation") + 1]),
            head=head,
            replicas=sizes[0],
            scorers=sizes[1],
            judges=sizes[2],
        )
        drivers[submission] = driver
        self.drivers.setdefault(job, []).append(driver)
        return web.json_response({"submission_id": submission})

    async def _driver(
        self, request: web.Request, path: str, head: Object, drivers: dict[str, Driver]
    ) -> web.StreamResponse:
        job = head["metadata"]["labels"]["rljob.dev/job"]
        play = self.plays.setdefault(job, Play())
        running = [driver for driver in drivers.values() if driver.state == "RUNNING"]
        if not running or not play.answers:
            return web.Response(status=503, text="no driver")
        driver = running[-1]
        if path == "v1/desired":
            desired = Desired.model_validate(await request.json())
            driver.desired.append(desired)
            driver.generation = desired.generation
            if desired.suspend:
                self._end(driver, "suspended", "suspended as asked", 75)
            return web.json_response({})
        self._go_on(driver, play)
        status = self._status(driver, play, head)
        return web.json_response(status.model_dump(mode="json", by_alias=True))

    def _go_on(self, driver: Driver, play: Play) -> None:
        """Every question lets the driver make a step."""
        driver.step += 1
        if driver.attempt in play.exits:
            code = play.exits[driver.attempt]
            self._end(driver, "failed", f"exit code {code} as the test wants", code)
        elif play.steps is not None and driver.step >= play.steps:
            self._end(driver, "succeeded", f"{play.steps} steps are done", 0)

    def _end(self, driver: Driver, kind: Any, reason: str, code: int) -> None:
        driver.end = End(kind=kind, reason=reason, exit_code=code, time=datetime.now(UTC))
        driver.exit_code = code
        driver.state = "SUCCEEDED" if code == 0 else "FAILED"

    def _status(self, driver: Driver, play: Play, head: Object) -> DriverStatus:
        told = driver.desired[-1] if driver.desired else None
        engines = self._pool(driver, play, head, "rollout", driver.replicas, told and told.rollout_replicas)
        scorers = self._pool(driver, play, head, "reward-model", driver.scorers, told and told.reward_model_replicas)
        judges = self._pool(driver, play, head, "judge", driver.judges, told and told.judge_replicas)
        checkpoint = None
        if play.checkpoints:
            checkpoint = LastCheckpoint(uri="/state", step=driver.step, time=datetime.now(UTC))
        return DriverStatus(
            generation=driver.generation,
            attempt=driver.attempt,
            time=datetime.now(UTC),
            step=driver.step,
            version=driver.step,
            total_steps=play.steps,
            pools=Pools(
                rollout=RolloutStatus(desired=len(engines), ready=len(engines), engines=engines),
                trainer=TrainerStatus(desired=1, ready=1),
                reward_model=ScoringPoolStatus(desired=len(scorers), ready=len(scorers), replicas=scorers)
                if driver.scorers
                else None,
                judge=ScoringPoolStatus(desired=len(judges), ready=len(judges), replicas=judges)
                if driver.judges
                else None,
            ),
            ages=Ages(mean=0.5, max=1, bound=1),
            rewards=Scores(mean=0.25 * driver.step),
            checkpoint=checkpoint,
            unsaved=play.unsaved,
            end=driver.end,
        )

    def _pool(
        self, driver: Driver, play: Play, head: Object, group: str, begun: int, told: int | None
    ) -> tuple[ReplicaStatus, ...]:
        """What the driver has on the pods of a group: as many as it began with, or was told to have."""
        metadata = head["metadata"]
        ours = {"ray.io/cluster": metadata["labels"]["ray.io/cluster"], "ray.io/group": group}.items()
        pods = [pod for pod in self._pods.objects(metadata["namespace"]) if ours <= pod["metadata"]["labels"].items()]
        there = sorted(pod["metadata"]["name"] for pod in pods)
        wanted = begun if told is None else told
        for name in there:
            if len(driver.used & set(there) - driver.drained) < wanted:
                driver.used.add(name)
        mine = [name for name in there if name in driver.used]
        if play.drains:
            # Which ones is the driver's choice; the first by name here, which KubeRay wouldn't take by itself.
            while len(mine) - len(driver.drained & set(mine)) > wanted:
                driver.drained.add(next(name for name in mine if name not in driver.drained))
        return tuple(
            ReplicaStatus(
                name=f"engine {index}",
                pod=name,
                state="drained" if name in driver.drained else "serving",
                safe_to_delete=name in driver.drained,
            )
            for index, name in enumerate(mine)
        )
