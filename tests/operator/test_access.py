"""The operator's /metrics asks the cluster who may read it, remembers the answer a while, and says no without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from test_api_server import serving

from rljob_operator import access
from rljob_operator.access import Access, AccessDecision
from rljob_operator.api_server import ApiServer

PROMETHEUS = {
    "username": "system:serviceaccount:monitoring:prometheus",
    "uid": "1",
    "groups": ["system:serviceaccounts"],
    "extra": {"authentication.kubernetes.io/pod-name": ["prometheus-0"]},
}


@dataclass
class Reviewer:
    """The API server's two reviews."""

    users: dict[str, dict[str, Any]] = field(default_factory=lambda: {"prometheus's": PROMETHEUS})
    readers: set[str] = field(default_factory=lambda: {PROMETHEUS["username"]})  # type: ignore[arg-type]
    away: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, request: web.Request, _number: int) -> web.Response:
        spec = (await request.json())["spec"]
        self.asked.append(spec)
        if self.away:
            return web.json_response({"message": "etcd is away"}, status=503)
        if request.path == "/apis/authentication.k8s.io/v1/tokenreviews":
            user = self.users.get(spec["token"])
            return web.json_response({"status": {"authenticated": user is not None, "user": user or {}}})
        assert request.path == "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return web.json_response({"status": {"allowed": spec["user"] in self.readers}}, status=201)


def made(api: ApiServer, now: list[float]) -> Access:
    return Access(api, "/metrics", clock=lambda: now[0])


async def test_whom_the_cluster_lets_may_read_and_nobody_else() -> None:
    reviewer = Reviewer()
    reviewer.users["tenant's"] = {**PROMETHEUS, "username": "system:serviceaccount:team-a:default"}
    async with serving(reviewer.answer) as (api, _):
        doors = made(api, [0.0])
        assert await doors.verdict("Bearer prometheus's") is AccessDecision.ALLOWED
        # All that the cluster knows of them is handed on: a role may be bound to a group.
        assert {name: reviewer.asked[-1][name] for name in ("user", "uid", "groups", "extra")} == {
            "user": PROMETHEUS["username"],
            "uid": "1",
            "groups": ["system:serviceaccounts"],
            "extra": {"authentication.kubernetes.io/pod-name": ["prometheus-0"]},
        }
        assert await doors.verdict("Bearer tenant's") is AccessDecision.FORBIDDEN
        assert await doors.verdict("Bearer invented") is AccessDecision.UNKNOWN_READER


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic YTpi", f"Bearer {'a' * 20_000}"])
async def test_who_shows_no_token_is_refused_without_a_question(header: str) -> None:
    reviewer = Reviewer()
    async with serving(reviewer.answer) as (api, calls):
        assert await made(api, [0.0]).verdict(header) is AccessDecision.UNKNOWN_READER
        assert calls == []


async def test_a_verdict_is_remembered_for_a_minute_and_then_asked_for_anew() -> None:
    reviewer, now = Reviewer(), [0.0]
    async with serving(reviewer.answer) as (api, calls):
        doors = made(api, now)
        for _ in range(3):
            assert await doors.verdict("Bearer prometheus's") is AccessDecision.ALLOWED
        assert len(calls) == 2
        reviewer.readers.clear()
        now[0] = access.ALLOWED_SECONDS
        assert await doors.verdict("Bearer prometheus's") is AccessDecision.FORBIDDEN
        # A refusal is asked again sooner: roles come a moment after those who need them.
        reviewer.readers.add(PROMETHEUS["username"])  # type: ignore[arg-type]
        now[0] += access.REFUSED_SECONDS
        assert await doors.verdict("Bearer prometheus's") is AccessDecision.ALLOWED


async def test_without_the_api_server_the_answer_is_no_and_is_not_remembered(caplog: pytest.LogCaptureFixture) -> None:
    reviewer, now = Reviewer(away=True), [0.0]
    async with serving(reviewer.answer) as (api, _):
        doors = made(api, now)
        assert await doors.verdict("Bearer prometheus's") is AccessDecision.NO_ANSWER
        assert "prometheus's" not in caplog.text
        reviewer.away = False
        assert await doors.verdict("Bearer prometheus's") is AccessDecision.ALLOWED
        # What was said before holds for its time, and no longer.
        reviewer.away = True
        assert await doors.verdict("Bearer prometheus's") is AccessDecision.ALLOWED
        now[0] = access.ALLOWED_SECONDS
        assert await doors.verdict("Bearer prometheus's") is AccessDecision.NO_ANSWER


async def test_strangers_with_many_tokens_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MOST_REMEMBERED", 5)
    async with serving(Reviewer().answer) as (api, _):
        doors = made(api, [0.0])
        for number in range(20):
            await doors.verdict(f"Bearer {number}")
        assert len(doors._verdicts) == 5
