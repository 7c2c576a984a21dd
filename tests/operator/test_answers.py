"""What pods answer is bounded, cleaned and masked before anybody sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from rljob_operator.answers import AnswerError, clean, last_lines, masked
from rljob_operator.head import Heads
from rljob_operator.tokens import JobTokens

TOKENS = JobTokens("ray-token-value", "driver-token-value", "key")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def heads(handler: Handler) -> AsyncIterator[Heads]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield Heads(session, f"http://127.0.0.1:{runner.addresses[0][1]}/{{namespace}}/{{service}}/{{port}}")
    await runner.cleanup()


def test_control_characters_and_escapes_go() -> None:
    assert clean("a\x1b[31mred\x1b[0m\r\nb\x00\u202ec") == "ared bc"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("WANDB_API_KEY=abc123 rest", "WANDB_API_KEY=*** rest"),
        ('{"password": "hunter2"}', '{"password": "***"}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("token hf_abcdefghijkl found", "token hf_*** found"),
        ("s3://user:pass@host/x", "s3://user:***@host/x"),
        ("s3://:pass@host/x", "s3://:***@host/x"),
        ("aws_secret_access_key = wJalr/K7MDENG+b", "aws_secret_access_key = ***"),
        ("AWS_SECRET_ACCESS_KEY='wJa lr' AWS_REGION=eu", "AWS_SECRET_ACCESS_KEY='***' AWS_REGION=eu"),
        ("AWS_ACCESS_KEY_ID: AKIAIOSFODNN7EXAMPLE", "AWS_ACCESS_KEY_ID: ***"),
        ("JUDGE_KEY=abc, rest", "JUDGE_KEY=***, rest"),
        ("{'apiKey': 'a b', 'model': 'm'}", "{'apiKey': '***', 'model': 'm'}"),
        ('{"private_key": "-----BEGIN \\"x\\" KEY", "a": 1}', '{"private_key": "***", "a": 1}'),
        ("password='a b' user=me", "password='***' user=me"),
        ('passphrase="cut off', 'passphrase="***'),
        ("dbPassword=x;y", "dbPassword=***;y"),
        ("Bearer abcdefgh.ijkl failed", "Bearer *** failed"),
        ("Proxy-Authorization: Basic dXNlcjpwYXNz", "Proxy-Authorization: Basic ***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVP", "eyJ***"),
        ("github_pat_11ABCDEFG0_abcdef", "github_pat_***"),
        ("gho_16C7e42F292c6912E7", "gho_***"),
        ("glpat-abcdefghijklmnop", "glpat-***"),
        ("nvapi-abcdefghijklmnop", "nvapi-***"),
        ("gsk_abcdefghijklmnop", "gsk_***"),
        ("AIzaSyabcdefghijklmnop", "AIza***"),
        ("https://b.example/o?sv=1&sig=a%2Bb%3D&se=2", "https://b.example/o?sv=1&sig=***&se=2"),
        ("X-Amz-Signature=abcdef&X-Amz-Date=1", "X-Amz-Signature=***&X-Amz-Date=1"),
        (
            "-----BEGIN RSA PRIVATE KEY----- MIIE abc -----END RSA PRIVATE KEY----- x",
            "-----BEGIN RSA PRIVATE KEY-----*** x",
        ),
        ("step 3 of 9", "step 3 of 9"),
        ("maxPromptTokens = 1000, tokens: 12, keys: a", "maxPromptTokens = 1000, tokens: 12, keys: a"),
        ("the design: monkey: 3, basic idea", "the design: monkey: 3, basic idea"),
        ("xx driver-token-value yy", "xx *** yy"),
    ],
)
def test_what_looks_like_a_secret_is_masked(line: str, shown: str) -> None:
    assert masked(line, ["driver-token-value"]) == shown


@pytest.mark.parametrize("part", ["a", "token", "token ", "key=", "a_", "'", "://", "://a:", "Bearer ", "-----BEGIN "])
def test_secrets_are_looked_for_in_time_linear_in_the_text(part: str) -> None:
    """A search that is quadratic takes minutes for these."""
    masked(part * (300_000 // len(part)))


def test_only_the_last_lines_are_kept_and_cut() -> None:
    assert last_lines("a\n\nbbbbbb\nc\n", 2, 3) == ("bbb", "c")


@pytest.mark.parametrize(
    ("log", "last"),
    [
        ("step 1\nstep 2\n", ("step 1", "step 2")),
        ("x" * 190 + "\n", ("x" * 190,) * 19 + ("the end",)),
        # Of a progress bar, without line breaks: what is left of the beginning may be half an escape sequence.
        ("\r\u00e9\U0001f600\\", ("the end",)),
    ],
    ids=["short", "long", "one line"],
)
async def test_the_end_of_a_log_is_read_however_long_it_is(log: str, last: tuple[str, ...]) -> None:
    async def ray(request: web.Request) -> web.StreamResponse:
        # As Ray answers (`ray.dashboard.modules.job.job_head`): the whole log, in ASCII.
        whole = log if len(last) == 2 else log * (9 * 1024 * 1024 // len(json.dumps(log))) + "\nthe end\n"
        return web.Response(text=json.dumps({"logs": whole}), content_type="application/json")

    async with heads(ray) as found:
        lines = await found.head("n", "c", TOKENS).lines("job-a1")
    assert lines[-len(last) :] == last


@pytest.mark.parametrize("body", ["", "null", "[" * 100_000, '{"logs": "no end', "{}", '{"logs": 7}', "\ufeff"])
async def test_a_log_that_is_no_answer_raises_nothing_else(body: str) -> None:
    async def ray(_request: web.Request) -> web.StreamResponse:
        return web.Response(text=body)

    async with heads(ray) as found:
        try:
            lines = await found.head("n", "c", TOKENS).lines("job-a1")
        except AnswerError:
            lines = ()
    assert lines == ()


@pytest.mark.parametrize("result", [None, 3, ["text"], [None], {"a": 1}])
async def test_a_list_of_another_form_is_named(result: object) -> None:
    async def ray(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": {"result": {"result": result}}})

    async with heads(ray) as found:
        with pytest.raises(AnswerError, match="has an unknown format"):
            await found.head("n", "c", TOKENS).leftovers()


@pytest.mark.parametrize(("code", "kept"), [(66, 66), (-9, -9), (10**30, None), ("1", None)])
async def test_only_an_exit_code_that_the_status_can_hold_is_taken(code: object, kept: int | None) -> None:
    async def ray(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "FAILED", "driver_exit_code": code})

    async with heads(ray) as found:
        job = await found.head("n", "c", TOKENS).job("job-a1")
    assert job is not None
    assert job.exit_code == kept


async def test_an_endless_answer_is_cut_off() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(b"x" * 4096)
        return response

    async with heads(endless) as found:
        with pytest.raises(AnswerError, match="longer than 65536"):
            await found.head("n", "c", TOKENS).status()


async def test_a_silent_driver_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async with heads(silent) as found:
        head = found.head("n", "c", TOKENS)
        with pytest.raises(AnswerError, match="no answer within"):
            async with head._call("GET", head._driver, "t", seconds=0.05):
                pass


async def test_a_redirect_is_not_followed_with_the_token() -> None:
    seen = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        raise web.HTTPFound("/stolen")

    async with heads(elsewhere) as found:
        with pytest.raises(AnswerError, match="answered 302"):
            await found.head("n", "c", TOKENS).status()
    assert seen == ["/n/c-head-svc/8470/v1/status"]


async def test_nonsense_is_named_without_being_repeated() -> None:
    async def nonsense(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"generation": "<script>", "attempt": 1})

    async with heads(nonsense) as found:
        with pytest.raises(AnswerError) as caught:
            await found.head("n", "c", TOKENS).status()
    assert "script" not in str(caught.value)


async def test_submitting_twice_is_fine_and_a_refusal_is_not() -> None:
    known: set[str] = set()

    async def ray(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            return web.Response(status=400, text="already exists")
        if request.path.rsplit("/", 1)[-1] in known:
            return web.json_response({"status": "RUNNING"})
        return web.Response(status=404)

    async with heads(ray) as found:
        head = found.head("n", "c", TOKENS)
        with pytest.raises(AnswerError, match="refused the job with 400"):
            await head.submit("job-a1", "true", {}, {})
        known.add("job-a1")
        await head.submit("job-a1", "true", {}, {})


async def test_no_secret_comes_through_rays_message_or_the_drivers_words() -> None:
    """Ray's message about a failed job quotes the end of its log, and whatever the driver printed there."""
    log = "Job entrypoint command failed with exit code 1, last available logs: HF_TOKEN=hunter2 driver-token-value"

    async def answer(request: web.Request) -> web.StreamResponse:
        if "api/jobs" in request.path:
            return web.json_response({"status": "FAILED", "message": log, "driver_exit_code": 1})
        return web.json_response(
            {
                "generation": 1,
                "attempt": 1,
                "time": "2026-01-01T00:00:00Z",
                "pools": {"rollout": {"desired": 1, "ready": 1}, "trainer": {"desired": 1, "ready": 1}},
                "end": {
                    "kind": "failed",
                    "reason": "cannot read s3://user:hunter2@host/data, sent ray-token-value",
                    "exitCode": 65,
                    "time": "2026-01-01T00:00:00Z",
                },
            }
        )

    async with heads(answer) as found:
        head = found.head("n", "c", TOKENS)
        job, status = await head.job("job-a1"), await head.status()
    assert job is not None
    assert job.message.endswith("HF_TOKEN=*** ***")
    assert status.end is not None
    assert status.end.reason == "cannot read s3://user:***@host/data, sent ***"
