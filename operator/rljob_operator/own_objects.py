"""What a job's pods need beside its cluster: job file, tokens, network policy. Made, and kept as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob_api import ResolvedJob
from rljob_operator import api_server, names, objects
from rljob_operator.api_server import ApiError, ApiServer
from rljob_operator.memory import Mark, Memory
from rljob_operator.network_policy import network_policy
from rljob_operator.observed import JobView
from rljob_operator.settings import Settings
from rljob_operator.tokens import JobTokens


class OwnObjects:
    """Writes what belongs to a job, and nothing that belongs to somebody else.

    What writes returns what was put back, "ConfigMap job-rljob": there was none, or somebody had changed it since it
    was written last, as far as this process remembers. Empty: it was as it should be.
    """

    def __init__(self, api: ApiServer, settings: Settings) -> None:
        self._api = api
        self._settings = settings

    async def write_job_file(self, job: JobView, resolved: ResolvedJob, memory: Memory) -> str:
        """The ConfigMap with the job as it is now."""
        body = objects.config_map(resolved, job.document, job.uid, job.generation)
        return await self._write(job, api_server.core(job.namespace, "configmaps"), body, memory)

    async def write_tokens(self, job: JobView, resolved: ResolvedJob, incarnation: int, tokens: JobTokens) -> str:
        """Creates the Secret; it goes with the job. One that is there is ours, from a try before.

        Creating is all that the operator may do with Secrets: the answers to other writes would show it anybody's.
        """
        body = objects.secret(resolved, job.uid, incarnation, tokens)
        try:
            await self._api.create(api_server.core(job.namespace, "secrets"), body)
        except ApiError as error:
            if not error.already_exists:
                raise
            return ""
        return _named(body)

    async def guard_pods(self, job: JobView, resolved: ResolvedJob, incarnation: int, memory: Memory) -> str:
        """The network policy, before there are pods; away with a former one where policies are switched off."""
        collection = api_server.group("networking.k8s.io/v1", job.namespace, "networkpolicies")
        path = f"{collection}/{names.network_policy(job.name)}"
        if self._settings.network_policy:
            body = network_policy(resolved, job.uid, self._settings)
            return await self._write(job, collection, body, memory)
        if incarnation > 1 and await self.is_own(job, path):
            await self._api.delete(path)
        return ""

    async def is_own(self, job: JobView, path: str) -> bool:
        """Whether the object, if there still is one, was made for a job of this name. It may be patched, not read."""
        label = "/metadata/labels/" + names.JOB_LABEL.replace("/", "~1")
        try:
            await self._api.patch(path, [{"op": "test", "path": label, "value": job.name}])
        except ApiError as error:
            if error.status == 422:
                return False
            if not error.not_found:
                raise
        return True

    async def _write(self, job: JobView, collection: str, body: Mapping[str, Any], memory: Memory) -> str:
        """Creates an object of the job's, or brings it up to date.

        One of somebody else's by that name stays as it is: written over, it would also be deleted with the job.
        """
        name = body["metadata"]["name"]
        path = f"{collection}/{name}"
        if path not in memory.own:
            try:
                memory.own[path] = Mark.of(await self._api.create(collection, body))
            except ApiError as error:
                if not error.already_exists:
                    raise
                if not await self.is_own(job, path):
                    memory.rejection = taken(body)
                    raise
                memory.own[path] = Mark()
            else:
                return _named(body)
        before, memory.own[path] = memory.own[path], Mark.of(await self._api.apply(path, body))
        return _named(body) if memory.own[path].put_back(before) else ""


def taken(wanted: Mapping[str, Any]) -> str:
    """What to tell of an object that the job needs under a name which another one has."""
    return f"there is a {_named(wanted)} that does not belong to the job: rename it, or the job"


def _named(body: Mapping[str, Any]) -> str:
    return f"{body['kind']} {body['metadata']['name']}"
