"""The Secret in which the operator keeps its token keys, in its own namespace: made by the operator, never by a chart.

A chart would have to draw a key whenever it is rendered, and whoever renders without a cluster at hand (Argo CD, Flux,
`helm template`) would apply another one each time, which locks the operator out of every cluster that runs. So the
operator draws the first key itself, and remembers every key that it was ever given: one that `tokenKey.existingSecret`
provides, and replaces, comes first, and those before it go on opening what was begun under them.

Every replica keeps the Secret, leader or not: what each writes is the union of what it knows and what is there.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import secrets
from pathlib import Path

from rljob_operator import api_server, names
from rljob_operator.api_server import ApiError, ApiServer, Object
from rljob_operator.tokens import KeyRing, TokenKey

log = logging.getLogger(__name__)

ENTRY = "keys"
"""The entry of the Secret that has the keys, one a line, newest first."""
KEEP_SECONDS = 60.0
"""Seconds between two looks at the Secret and at the mounted key."""
TRIES = 10


class KeySecret:
    """Keeps the keys of `ring` in the Secret `name`.

    Args:
        given: file with a key that the administrator provides; it is read again at every look, since a changed Secret
            reaches its mount a minute later. None: the operator draws the first key.
    """

    def __init__(self, api: ApiServer, namespace: str, name: str, given: Path | None) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._given = given
        self.ring: KeyRing | None = None
        """None: before `look` has been there once."""

    async def look(self) -> KeyRing:
        """Reads the Secret, and writes it where it is missing or lacks a key.

        Raises:
            ApiError: it can neither be read nor written.
            ValueError: it, or the mounted key, holds no key.
        """
        mounted = () if self._given is None else (await asyncio.to_thread(TokenKey.read, self._given),)
        for _ in range(TRIES):
            stored = await self._read()
            there = () if stored is None else self._keys_of(stored)
            known = () if self.ring is None else self.ring.keys
            # The mounted one is the newest by definition; then the Secret, since another replica may know more.
            drawn = () if mounted or there or known else (TokenKey(secrets.token_hex(32).encode()),)
            ring = KeyRing(mounted + there + known + drawn)
            try:
                if ring.keys != there:
                    await self._write(ring, stored)
            except ApiError as error:
                # Another replica was faster, and its key is the one that counts.
                if error.conflict or error.not_found:
                    continue
                raise
            if self.ring is not None and ring.newest != self.ring.newest:
                log.info("new clusters get tokens from the key %s; older clusters keep their own keys", ring.newest.id)
            self.ring = ring
            return ring
        raise ApiError(409, "Conflict", f"the Secret {self._name} changes faster than it can be read")

    async def keep(self) -> None:
        """Looks again and again; what goes wrong is logged, since the keys in hand go on opening what they open."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            try:
                await self.look()
            except (ApiError, ValueError, OSError) as error:
                log.warning("the token keys cannot be maintained: %s", error)

    async def _read(self) -> Object | None:
        try:
            return await self._api.get(api_server.core(self._namespace, "secrets", self._name))
        except ApiError as error:
            if error.not_found:
                return None
            raise

    def _keys_of(self, stored: Object) -> tuple[TokenKey, ...]:
        where = f"entry {ENTRY!r} of the Secret {self._namespace}/{self._name}"
        try:
            lines = base64.b64decode((stored.get("data") or {}).get(ENTRY) or "", validate=True).split(b"\n")
            return tuple(TokenKey(line.strip()) for line in lines if line.strip())
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{where}: {error}; delete the Secret to have it recreated from the known keys") from error

    async def _write(self, ring: KeyRing, stored: Object | None) -> None:
        text = b"\n".join(key.key for key in ring.keys)
        data = {ENTRY: base64.b64encode(text).decode()}
        if stored is not None:
            path = api_server.core(self._namespace, "secrets", self._name)
            # With the version that was read: what another replica has added meanwhile must not be lost.
            await self._api.replace(path, {**stored, "data": (stored.get("data") or {}) | data})
            return
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self._name, "namespace": self._namespace, "labels": dict(names.OPERATOR_LABELS)},
            "type": "Opaque",
            "data": data,
        }
        await self._api.create(api_server.core(self._namespace, "secrets"), body)
