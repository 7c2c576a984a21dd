"""Tokens of a cluster incarnation, derived from the operator's own key.

Deriving instead of storing means that the operator never has to read a Secret: it can create Secrets, but it cannot
see anybody's.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

SHORTEST_KEY = 32


@dataclass(frozen=True)
class Tokens:
    """What opens one cluster incarnation. Never printed: `repr` leaves both out."""

    ray: str = field(repr=False)
    """Bearer token of Ray's dashboard and its other services."""
    driver: str = field(repr=False)
    """Bearer token of the driver's HTTP interface."""


@dataclass(frozen=True)
class TokenKey:
    """The operator's secret key, at least 32 bytes."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < SHORTEST_KEY:
            raise ValueError(
                f"the operator's token key has {len(self.key)} bytes and needs at least {SHORTEST_KEY}: "
                "put random bytes into the Secret of the chart (`openssl rand -hex 32`)"
            )

    @classmethod
    def read(cls, path: Path) -> TokenKey:
        """The key in a mounted file; surrounding white space doesn't count."""
        return cls(path.read_bytes().strip())

    def tokens(self, uid: str, incarnation: int) -> Tokens:
        """The tokens of incarnation `incarnation` of the job with `uid`; always the same ones."""
        return Tokens(ray=self._derive("ray", uid, incarnation), driver=self._derive("driver", uid, incarnation))

    def _derive(self, purpose: str, uid: str, incarnation: int) -> str:
        return hmac.new(self.key, f"rljob/{purpose}/{uid}/{incarnation}".encode(), hashlib.sha256).hexdigest()
