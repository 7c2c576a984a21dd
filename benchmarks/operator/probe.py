"""The operator that most people would write with kopf: an `on.create` handler that makes the children and the status.

    python -m benchmarks.operator.probe NAMESPACE KEY_FILE

It makes the same objects with the same client as ours, and keeps kopf's defaults but for events.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import kopf

from benchmarks.operator.client import NETWORKING
from rljob_operator import api_server, credentials, names, objects
from rljob_operator.network_policy import network_policy
from rljob_operator.observed import Observed
from rljob_operator.reconcile import reconcile
from rljob_operator.settings import Settings
from rljob_operator.tokens import TokenKey
from rljob_operator.views import job_view


async def main(namespace: str, key_file: Path) -> None:
    registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    settings.posting.enabled = False
    configuration, key, ours = await credentials.login(), TokenKey.read(key_file), Settings()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await credentials.connection(configuration)

    async with api_server.ApiServer(configuration) as api:

        @kopf.on.create(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
        async def create(body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
            job = job_view(dict(body))
            assert job.job is not None, job.problems
            config = objects.config_map(job.job, job.document, job.uid, job.generation)
            secret = objects.secret(job.job, job.uid, 1, key.tokens(job.uid, 1))
            cluster = objects.ray_cluster(job.job, job.fingerprint, job.uid, job.generation, 1, key.id, ours)
            space = job.namespace
            await api.apply(api_server.core(space, "configmaps", config["metadata"]["name"]), config)
            await api.create(api_server.core(space, "secrets"), secret)
            policy = network_policy(job.job, job.uid, ours)
            await api.apply(api_server.group(NETWORKING, space, "networkpolicies", policy["metadata"]["name"]), policy)
            await api.create(api_server.clusters(space), cluster)
            status = reconcile(Observed(job, (), ()), job.created, ours).status
            assert status is not None
            patch.status.update(status.document())

        await kopf.operator(registry=registry, settings=settings, standalone=True, namespaces=[namespace])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
