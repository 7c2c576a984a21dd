"""Who may read /metrics, which shows figures of every tenant's jobs: whom the cluster lets. It is asked each time.

A reader shows a token of the cluster's (`Authorization: Bearer`), as a Prometheus in a pod has one. The API server says
whose it is (TokenReview) and whether that one may `get` the path (SubjectAccessReview of a non-resource URL): what
kube-rbac-proxy and controller-runtime do. The chart has a ClusterRole to bind readers to. Verdicts are remembered for a
while, by the token's digest; without a verdict, since the API server is away, the answer is no.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

from rljob_operator.api_server import ApiError, ApiServer, Object

log = logging.getLogger(__name__)

ALLOWED_SECONDS = 60.0
REFUSED_SECONDS = 10.0
CALL_SECONDS = 5.0
LONGEST_TOKEN = 16 * 1024
MOST_REMEMBERED = 1000
AT_ONCE = 4
"""Questions: strangers must not keep the API server busy through us."""


class AccessDecision(Enum):
    """The answer, as an HTTP status and in words."""

    def __init__(self, status: int, words: str) -> None:
        self.status = status
        self.words = words

    ALLOWED = (200, "")
    UNKNOWN_READER = (401, "send a token of the cluster: Authorization: Bearer TOKEN")
    FORBIDDEN = (403, "the token's owner may not `get` /metrics: bind it to the ClusterRole for metrics readers")
    NO_ANSWER = (503, "the API server, which authorizes readers, does not answer")


class Access:
    """Asks who may read one path.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, api: ApiServer, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._path = path
        self._clock = clock
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._verdicts: OrderedDict[bytes, tuple[AccessDecision, float]] = OrderedDict()
        """What was decided about a token, by its digest, and until when that counts."""

    async def verdict(self, authorization: str) -> AccessDecision:
        """Whether who sent this header may read."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > LONGEST_TOKEN:
            return AccessDecision.UNKNOWN_READER
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        known = self._verdicts.get(digest)
        if known is not None and self._clock() < known[1]:
            return known[0]
        try:
            async with asyncio.timeout(CALL_SECONDS), self._gate:
                found = await self._ask(token)
        except (ApiError, TimeoutError) as error:
            log.warning("authorization of a reader of %s failed: %s", self._path, error or "no answer in time")
            return AccessDecision.NO_ANSWER
        seconds = ALLOWED_SECONDS if found is AccessDecision.ALLOWED else REFUSED_SECONDS
        self._verdicts[digest] = found, self._clock() + seconds
        self._verdicts.move_to_end(digest)
        if len(self._verdicts) > MOST_REMEMBERED:
            self._verdicts.popitem(last=False)
        return found

    async def _ask(self, token: str) -> AccessDecision:
        review: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        answer = await self._api.create("/apis/authentication.k8s.io/v1/tokenreviews", review)
        said = answer.get("status") or {}
        if said.get("authenticated") is not True:
            return AccessDecision.UNKNOWN_READER
        user = said.get("user") or {}
        asked = {
            "user": user.get("username", ""),
            "uid": user.get("uid", ""),
            "groups": user.get("groups") or [],
            "extra": user.get("extra") or {},
            "nonResourceAttributes": {"path": self._path, "verb": "get"},
        }
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": asked}
        answer = await self._api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        allowed = (answer.get("status") or {}).get("allowed") is True
        return AccessDecision.ALLOWED if allowed else AccessDecision.FORBIDDEN
