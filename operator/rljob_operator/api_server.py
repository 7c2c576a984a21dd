"""A small asynchronous client of the Kubernetes API: the few verbs the operator uses, and its errors by name.

Every call has a deadline. Bodies never appear in errors or logs, since some of them hold tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import kopf

from rljob_operator import names

CALL_SECONDS = 30.0
TOKEN_RELOAD_SECONDS = 60.0
BUSY_PAUSES = (0.1, 0.4, 1.0)
LIST_CHUNK = 500
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

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


def login() -> kopf.ConnectionInfo:
    """The service account's credentials in a cluster, else those of the kubeconfig."""
    settings = kopf.OperatorSettings()
    connection = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if connection is None:
        raise RuntimeError("no Kubernetes credentials: run in a cluster, or set KUBECONFIG")
    return connection


class ApiServer:
    """The API server, over one connection pool. Use as an asynchronous context manager."""

    def __init__(self, connection: kopf.ConnectionInfo, *, call_seconds: float = CALL_SECONDS) -> None:
        self._connection = connection
        self._timeout = aiohttp.ClientTimeout(total=call_seconds)
        self._session: aiohttp.ClientSession | None = None
        self._headers = connection.as_http_headers()
        self._headers_read = time.monotonic()

    async def __aenter__(self) -> ApiServer:
        # Making the context reads and writes certificate files.
        context = await asyncio.to_thread(self._connection.as_ssl_context)
        connector = aiohttp.TCPConnector(ssl=context, limit=32)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

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
        if self._session is None:
            raise RuntimeError("use ApiServer as an asynchronous context manager")
        data = None if body is None else json.dumps(body).encode()
        headers = {**await self._authorization(), "Content-Type": content, "Accept": accept}
        url = self._connection.server.rstrip("/") + path
        try:
            async with self._session.request(method, url, data=data, headers=headers, params=query) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
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

    async def _authorization(self) -> Mapping[str, str]:
        # Service account tokens are replaced every hour.
        age = time.monotonic() - self._headers_read
        if self._connection.token and age > TOKEN_RELOAD_SECONDS and SERVICE_ACCOUNT_TOKEN.exists():
            token = await asyncio.to_thread(SERVICE_ACCOUNT_TOKEN.read_text)
            self._headers = {"Authorization": f"Bearer {token.strip()}"}
            self._headers_read = time.monotonic()
        return self._headers


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
