"""Tokens of a cluster incarnation, derived from the operator's own keys.

Deriving instead of storing means that the operator never has to read a job's Secret: it can create Secrets in the
namespaces that it watches, but it cannot see anybody's there. `key_secret` keeps the keys.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

SHORTEST_KEY = 32
KEYS_KEPT = 32
"""Former keys are forgotten, oldest first, beyond this many."""


@dataclass(frozen=True)
class JobTokens:
    """What opens one cluster incarnation. Never printed: `repr` leaves both out."""

    ray: str = field(repr=False)
    """Bearer token of Ray's dashboard and its other services."""
    driver: str = field(repr=False)
    """Bearer token of the driver's HTTP interface."""
    key: str
    """`TokenKey.id` of the key they derive from."""


@dataclass(frozen=True)
class TokenKey:
    """A secret key of the operator, at least 32 bytes."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < SHORTEST_KEY:
            raise ValueError(
                f"the operator's token key has {len(self.key)} bytes but needs at least {SHORTEST_KEY}: put random "
                "bytes into the Secret that tokenKey.existingSecret names (`openssl rand -hex 32`)"
            )
        if any(byte in b"\n\r" for byte in self.key):
            raise ValueError("the operator's token key has several lines but must be one (`openssl rand -hex 32`)")

    @classmethod
    def read(cls, path: Path) -> TokenKey:
        """The key in a mounted file; surrounding white space doesn't count."""
        return cls(path.read_bytes().strip())

    @property
    def id(self) -> str:
        """A name of the key, 8 hexadecimal digits, that says nothing about it."""
        return hmac.new(self.key, b"rljob/id", hashlib.sha256).hexdigest()[:8]

    def tokens(self, uid: str, incarnation: int) -> JobTokens:
        """The tokens of incarnation `incarnation` of the job with `uid`; always the same ones."""
        ray, driver = self._derive("ray", uid, incarnation), self._derive("driver", uid, incarnation)
        return JobTokens(ray=ray, driver=driver, key=self.id)

    def _derive(self, purpose: str, uid: str, incarnation: int) -> str:
        return hmac.new(self.key, f"rljob/{purpose}/{uid}/{incarnation}".encode(), hashlib.sha256).hexdigest()


class KeyRing:
    """The operator's keys: new clusters get tokens of the newest, and former ones open the clusters made under them.

    Args:
        keys: newest first.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, keys: tuple[TokenKey, ...]) -> None:
        if not keys:
            raise ValueError("the operator has no token key")
        # A key that comes twice counts where it is newest.
        self.keys = tuple(dict.fromkeys(keys))[:KEYS_KEPT]

    @property
    def newest(self) -> TokenKey:
        return self.keys[0]

    def find(self, key: str) -> TokenKey | None:
        """The key with this `TokenKey.id`; None: it was lost."""
        return next((known for known in self.keys if known.id == key), None)
