"""The few verbs of the Kubernetes API that the operator uses, over the official client, and its errors by name.

The client (`kubernetes.aio`) has the connections, TLS, credentials and encoding. Its typed half is left aside: objects
stay the JSON that the API server sends. Every call has a deadline. Bodies never appear in errors or logs, as they do in
the client's own exceptions, since some of them hold tokens. docs/decisions/001-kubernetes-client.md has the reasons.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException

from rljob_operator import names
from rljob_operator.credentials import BEARER

CALL_SECONDS = 30.0
CONNECTIONS = 32
BUSY_PAUSES = (0.1, 0.4, 1.0)
LIST_CHUNK = 500
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

Object = dict[str, Any]


class ApiError(Exception):
    """The API server refused a call, or did not answer (status 0).

    Attributes:
        cut_off: there was a connection, and it broke before the answer: the server may have done what it was asked to.
    """

    def __init__(self, status: int, reason: str, message: str, *, cut_off: bool = False) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else message)
        self.status = status
        self.reason = reason
        self.message = message
        self.cut_off = cut_off

    @property
    def not_found(self) -> bool:
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """The object is not as the call assumed: look again. A failed `test` of a JSON Patch is a 422."""
        return self.status == 409 or (self.status == 422 and "testing" in self.message.lower())

    @property
    def already_exists(self) -> bool:
        """There is an object of that name."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def refused(self) -> bool:
        """The server understood and said no; the same call won't do any better later."""
        return self.status in (400, 403, 413, 422) and not self.conflict

    @property
    def passing(self) -> bool:
        """Overload, restart, timeout: the same call may do better later."""
        return self.status in (0, 408, 429) or self.status >= 500


class ApiServer:
    """The API server, over one connection pool. Use as an asynchronous context manager."""

    def __init__(self, configuration: Configuration, *, call_seconds: float = CALL_SECONDS) -> None:
        self._configuration = configuration
        self._timeout = aiohttp.ClientTimeout(total=call_seconds)
        self._client: ApiClient | None = None

    async def __aenter__(self) -> ApiServer:
        # Not a deep copy: a token that is renewed in the one is in the other.
        configuration = copy.copy(self._configuration)
        configuration.connection_pool_maxsize = CONNECTIONS
        # Proxies are the kubeconfig's, as for the watches; the environment's would be looked up at every call.
        configuration.client_session_kwargs = {"trust_env": False}
        # Making its TLS context reads certificate files.
        client = await asyncio.to_thread(ApiClient, configuration)
        client.user_agent = names.FIELD_MANAGER
        self._client = client
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def get(self, path: str) -> Object:
        return await self._call("GET", path)

    async def metadata(self, path: str, selector: str = "") -> AsyncIterator[Object]:
        """The metadata of all objects of a collection, without the objects."""
        query = {"limit": str(LIST_CHUNK), "labelSelector": selector}
        while True:
            page = await self._call("GET", path, query=query, accept=METADATA_ONLY)
            # An empty page of a built-in kind has null for its items.
            for item in page.get("items") or ():
                yield item["metadata"]
            query["continue"] = page.get("metadata", {}).get("continue") or ""
            if not query["continue"]:
                return

    async def create(self, path: str, body: Mapping[str, Any]) -> Object:
        """POSTs to a collection. An existing object is a conflict, never overwritten; unknown fields are refused."""
        query = {"fieldValidation": "Strict", "fieldManager": names.FIELD_MANAGER}
        return await self._call("POST", path, body, query=query)

    async def would_create(self, path: str, body: Mapping[str, Any]) -> None:
        """A POST that is checked to the end, unknown fields included, and not carried out. Raises what it would."""
        query = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": names.FIELD_MANAGER}
        await self._call("POST", path, body, query=query)

    async def apply(self, path: str, body: Mapping[str, Any], manager: str = names.FIELD_MANAGER) -> Object:
        """Server-side apply of our own fields."""
        query = {"fieldManager": manager, "force": "true"}
        return await self._call("PATCH", path, body, query=query, content="application/apply-patch+yaml")

    async def replace(self, path: str, body: Mapping[str, Any]) -> Object:
        """PUTs an object; with its resource version this is refused if somebody else was faster."""
        return await self._call("PUT", path, body, query={"fieldManager": names.FIELD_MANAGER})

    async def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> Object:
        """JSON Patch (RFC 6902)."""
        query = {"fieldManager": names.FIELD_MANAGER}
        return await self._call("PATCH", path, list(operations), query=query, content="application/json-patch+json")

    async def delete(self, path: str, uid: str | None = None, *, at_once: bool = False) -> None:
        """Deletes an object (with `uid`: this very one) in the background; one that is gone or replaced is fine."""
        options: Object = {"propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if at_once:
            options["gracePeriodSeconds"] = 0
        try:
            await self._call("DELETE", path, options)
        except ApiError as error:
            if not error.not_found and not error.conflict:
                raise

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        accept: str = "application/json",
    ) -> Object:
        """One call, repeated at once a few times when the server was busy or the connection broke.

        A look has several writes. Were each hiccup to end it, a server that refuses every other write would never see a
        look through. Repeating is safe: every write here is idempotent or guarded by what it assumes.
        """
        for pause in BUSY_PAUSES:
            try:
                return await self._call_once(method, path, body, query=query, content=content, accept=accept)
            except ApiError as error:
                # A server that is away, or silent, is not busy: then the queue's longer pauses are right.
                if not error.passing or (error.status == 0 and not error.cut_off):
                    raise
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        return await self._call_once(method, path, body, query=query, content=content, accept=accept)

    async def _call_once(
        self, method: str, path: str, body: Any, *, query: Mapping[str, str] | None, content: str, accept: str
    ) -> Object:
        client = self._client
        if client is None:
            raise RuntimeError("use ApiServer as an asynchronous context manager")
        try:
            # Asks for credentials that may have to be renewed. The body is JSON already: not to be looked through.
            method, url, headers, _, _ = await client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Content-Type": content, "Accept": accept},
                auth_settings=[BEARER],
            )
            response = await client.call_api(method, url, headers, body, _request_timeout=self._timeout)
            text = (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ConfigException) as error:
            message = f"{method} {path}: {str(error) or 'no answer in time'}"
            raise ApiError(0, type(error).__name__, message, cut_off=_was_cut_off(error)) from error
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {}
        if response.status >= 400:
            message = str(answer.get("message", "") or text[:200])
            raise ApiError(response.status, str(answer.get("reason", response.reason)), message)
        return answer if isinstance(answer, dict) else {}


def jobs(namespace: str, name: str = "", sub: str = "") -> str:
    """Path of the RLJobs of a namespace, or of one of them."""
    return _path(f"/apis/{names.GROUP}/{names.VERSION}", namespace, names.PLURAL, name, sub)


def clusters(namespace: str, name: str = "") -> str:
    """Path of the RayClusters of a namespace, or of one of them."""
    return _path("/apis/ray.io/v1", namespace, "rayclusters", name)


def core(namespace: str, plural: str, name: str = "") -> str:
    """Path of objects of the core group."""
    return _path("/api/v1", namespace, plural, name)


def group(prefix: str, namespace: str, plural: str, name: str = "") -> str:
    """Path of objects of another group: `events.k8s.io/v1`."""
    return _path(f"/apis/{prefix}", namespace, plural, name)


def _path(root: str, namespace: str, plural: str, name: str = "", sub: str = "") -> str:
    parts = [root, "namespaces", namespace, plural, name, sub]
    return "/".join(part for part in parts if part)


def _was_cut_off(error: BaseException) -> bool:
    broken = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError)
    return isinstance(error, broken) and not isinstance(error, aiohttp.ClientConnectorError)
