"""All head pods of the polling measurement in one process: every driver runs, and makes a step a second.

    python -m benchmarks.operator.heads PORT

`GET /asked` tells when each driver's status was asked for (seconds since the epoch, by job).
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime

from aiohttp import web

from rljob_api.status import Ages, DriverStatus, Pools, ReplicaStatus, RolloutStatus, Scores, TrainerStatus

ADDRESS = "http://127.0.0.1:{port}/{{namespace}}/{{service}}/{{port}}"


class SimulatedHeads:
    """Answers for every head; tokens aren't looked at."""

    def __init__(self) -> None:
        self._began = time.time()
        self.asked: dict[str, list[float]] = defaultdict(list)

    async def handle(self, request: web.Request) -> web.Response:
        path, service = request.match_info["path"], request.match_info["service"]
        if path.startswith("api/v0/"):
            return web.json_response({"result": True, "data": {"result": {"result": []}}})
        if path.startswith("api/jobs/"):
            return web.json_response({"status": "RUNNING", "message": "", "submission_id": path.split("/")[2]})
        if path == "v1/status":
            job = re.sub(r"-c\d+-head-svc$", "", service)
            self.asked[job].append(time.time())
            return web.Response(text=self._status(), content_type="application/json")
        return web.json_response({})

    def _status(self) -> str:
        now = datetime.now(UTC)
        step = int(time.time() - self._began)
        engines = tuple(ReplicaStatus(name=f"engine {index}", state="serving") for index in range(2))
        status = DriverStatus(
            generation=1,
            attempt=1,
            time=now,
            step=step,
            version=step,
            pools=Pools(
                rollout=RolloutStatus(desired=2, ready=2, engines=engines), trainer=TrainerStatus(desired=1, ready=1)
            ),
            ages=Ages(mean=0.5, max=1, bound=1),
            rewards=Scores(mean=step / 1000),
        )
        return status.model_dump_json(by_alias=True)


async def main(port: int) -> None:
    heads = SimulatedHeads()
    app = web.Application()

    async def asked(_request: web.Request) -> web.Response:
        return web.json_response(heads.asked)

    app.router.add_get("/asked", asked)
    app.router.add_route("*", "/{namespace}/{service}/{port}/{path:.*}", heads.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
