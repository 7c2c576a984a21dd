"""A service with SandboxFusion's interface in a sandbox's place: programs end alike; its failures are not theirs."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from aiohttp import web
from played_sandbox import RunCodeRequest, failing, playing_sandbox, running

from rljob_trainer.environments.tools import PythonPrograms, ToolError
from rljob_trainer.errors import JobFileError, RewardWorkerError
from rljob_trainer.rewards.code_tests import code_tests
from rljob_trainer.waits import Waits
from rljob_trainer.world.protocol import WorldGoneError
from rljob_trainer.world.sandbox import LocalSandbox, ProgramResult, Sandbox, SandboxLimits
from rljob_trainer.world.sandbox.service import SandboxService

PLACE = "spec.reward.sandbox"
LIMITS = SandboxLimits(wall_seconds=3, cpu_seconds=20, output_bytes=5000)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def service(url: str, seconds: float = 20.0, waits: Waits | None = None, at_once: int | None = None) -> SandboxService:
    return SandboxService(url, PLACE, LIMITS, at_once, seconds, waits)


PROGRAMS: dict[str, tuple[str, str, dict[str, str]]] = {
    "prints": ("print(6 * 7)", "", {}),
    "reads": ("print(sum(map(int, input().split())))", "1 2 39\n", {}),
    "has files": ("print(open('a/b.txt').read(), open('c.py').read())", "", {"a/b.txt": "é\n", "c.py": "\udce9x"}),
    "has no home": ("import os; print(sorted(os.listdir('.'))[:1] != [], os.environ.get('RLJOB_SECRET'))", "", {}),
    "leaves with a code": ("import sys; print('a'); sys.exit(3)", "", {}),
    "raises": ("print('a'); 1 / 0", "", {}),
    "wants memory": ("raise MemoryError", "", {}),
    "kills itself": ("import os; print('a', flush=True); os.kill(os.getpid(), 9)", "", {}),
    "sleeps": ("import time; time.sleep(60)", "", {}),
    "floods": ("print('é' * 100000)", "", {}),
    "fills what it may": ("print('x' * 4999)", "", {}),
    "is no UTF-8": ("print('\ud800')", "", {}),
    "is no program": ("print(", "", {}),
    "says nothing": ("", "", {}),
}


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLJOB_SECRET", raising=False)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_ends_there_as_it_does_here(name: str, secret: None) -> None:
    source, stdin, files = PROGRAMS[name]
    async with playing_sandbox() as played, service(played.url) as there, LocalSandbox("none", LIMITS, 1) as here:
        ours, theirs = await asyncio.gather(there.run(source, stdin, files), here.run(source, stdin, files))
    assert (ours.outcome, ours.exit_code, ours.stdout) == (theirs.outcome, theirs.exit_code, theirs.stdout)
    assert (ours.succeeded, ours.truncated) == (theirs.succeeded, theirs.truncated)
    last = [result.stderr.rstrip().rpartition("\n")[2].partition(":")[0] for result in (ours, theirs)]
    assert last[0] == last[1]


async def test_the_service_is_told_how_long_a_program_may_run() -> None:
    async with playing_sandbox() as played, service(f"{played.url}/") as there:
        await there.run("pass")
    assert [(asked.run_timeout, asked.language) for asked in played.asked] == [(3, "python")] * 2


async def test_a_service_that_comes_late_is_waited_for_by_name() -> None:
    waits, port = Waits(), free_port()
    there = service(f"http://127.0.0.1:{port}", waits=waits)
    entering = asyncio.create_task(there.__aenter__())
    while not waits.beside:  # noqa: ASYNC110  nobody says it
        await asyncio.sleep(0.01)
    (wait,) = waits.beside.values()
    assert wait.sentence.startswith(f"reward.sandbox waits for the sandbox at http://127.0.0.1:{port}, tried once (")
    assert 0 < (waits.left(wait) or 0) <= 20
    async with playing_sandbox(port=port):
        await entering
        assert not waits.beside
        assert (await there.run("print(1)")).stdout == "1\n"
    await there.__aexit__(None, None, None)


async def test_one_that_never_comes_ends_the_wait_at_the_deadline() -> None:
    there = service(f"http://127.0.0.1:{free_port()}", seconds=0.5)
    with pytest.raises(WorldGoneError, match=r"not run a program within 0\.5 s \(deadlineSeconds\), tried \d times"):
        await there.__aenter__()


async def test_failures_of_the_service_are_no_results() -> None:
    async def sometimes(request: RunCodeRequest, number: int) -> web.StreamResponse:
        if number % 4 == 1:
            return await failing(request)
        if number % 4 == 2:
            return web.Response(status=503, headers={"Retry-After": "0"}, text="busy")
        if number % 4 == 3:
            return web.Response(text="<html>down for maintenance")
        return await running(request)

    async with playing_sandbox(sometimes) as played, service(played.url) as there:
        results = [await there.run(f"print({number})") for number in range(3)]
    assert [result.stdout for result in results] == ["0\n", "1\n", "2\n"]
    assert len(played.asked) == 13


async def test_an_outage_in_which_some_programs_still_end_is_no_programs_doing() -> None:
    """As when a service is started anew: what it has begun ends, what comes is turned away."""
    down = asyncio.Event()

    async def restarts(request: RunCodeRequest, number: int) -> web.StreamResponse:
        if down.is_set() and "begun" not in request.code:
            return web.Response(status=503)
        return await running(request)

    async with playing_sandbox(restarts) as played, service(played.url) as there:
        begun = asyncio.create_task(there.run("begun = 1\nimport time; time.sleep(0.5); print(1)"))
        await asyncio.sleep(0.2)
        down.set()
        late = asyncio.create_task(there.run("print(2)"))
        assert (await begun).succeeded
        while len([asked for asked in played.asked if asked.code == "print(2)"]) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        down.clear()
        assert (await late).stdout == "2\n"


async def test_what_breaks_the_service_is_no_program_for_it() -> None:
    """Also when nobody else asks it anything: it would end the run each time that a model writes it."""

    async def breaks(request: RunCodeRequest, number: int) -> web.StreamResponse:
        if "poison" in request.code:
            raise ConnectionResetError  # the pod is killed for memory, say
        return await running(request)

    waits = Waits()
    async with playing_sandbox(breaks) as played, service(played.url, waits=waits) as there:
        asking = asyncio.create_task(PythonPrograms(there).run("poison = 1"))
        while len(played.asked) < 4:
            await asyncio.sleep(0.01)
            assert len(waits._open) <= 1
        with pytest.raises(ToolError, match="failed 5 times with this program, the last time right after it ran ano"):
            await asking
        assert not waits.beside
    assert len(played.asked) == 1 + 4 + 2


async def test_a_service_that_wants_to_be_left_alone_longer_than_there_is_time_is_asked_once_more() -> None:
    async def busy(request: RunCodeRequest, number: int) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "900"}) if number == 1 else await running(request)

    async with playing_sandbox(busy) as played, service(played.url, seconds=1.0) as there:
        assert (await there.run("print(1)")).stdout == "1\n"


async def test_outputs_that_the_service_cuts_are_not_taken_for_whole(caplog: pytest.LogCaptureFixture) -> None:
    limits = SandboxLimits(wall_seconds=10, output_bytes=4 * 2**20)
    async with playing_sandbox() as played, SandboxService(played.url, PLACE, limits) as there:
        assert f"returns at most {2**20} bytes of output" in caplog.text
        whole = await there.run(f"print('x' * {2**20 - 2})")
        cut = await there.run(f"print('x' * {2**20 + 5})")
    assert (whole.outcome, len(whole.stdout)) == ("exited", 2**20 - 1)
    assert (cut.outcome, cut.truncated) == ("too much output", True)


async def test_what_a_service_cannot_be_sent_is_refused() -> None:
    async with playing_sandbox() as played, service(played.url) as there:
        with pytest.raises(ValueError, match="accepts only UTF-8 on standard input"):
            await there.run("print(1)", stdin="\udce9")
        assert there.told == ""
        assert "no network" in LocalSandbox("none").told


def finished(**ran: Any) -> str:
    return json.dumps({"status": "Success", "message": "", "run_result": {"status": "Finished", **ran}})


@pytest.mark.parametrize(
    ("status", "text", "problem"),
    [
        (404, "nothing here", "status 404: 'nothing here'"),
        (302, "elsewhere", "status 302"),
        (422, "language", "status 422: 'language'"),
        (200, "<html>", "is not an answer of run_code"),
        (200, '{"status": "Success", "message": ""}', "is not an answer of run_code"),
        (200, finished(), "return code None"),
        (200, finished(return_code=0, stdout="43"), "ended unexpectedly"),
        (200, finished(return_code=1, stdout="42\\n", stderr="no"), "ended unexpectedly"),
    ],
)
async def test_who_is_no_sandbox_is_told_before_the_first_sample(status: int, text: str, problem: str) -> None:
    async def always(request: RunCodeRequest, number: int) -> web.StreamResponse:
        return web.Response(status=status, text=text, headers={"Location": "/run_code"})

    async with playing_sandbox(always) as played:
        with pytest.raises(JobFileError, match=rf"spec\.reward\.sandbox\.url: .*{problem}"):
            await service(played.url).__aenter__()


async def test_an_address_that_is_none_is_not_waited_for() -> None:
    with pytest.raises(JobFileError, match=r"sandbox\.url: .* invalid address"):
        await service("http://127.0.0.1:99999").__aenter__()


async def test_no_more_programs_are_sent_at_once_than_the_job_says() -> None:
    async with playing_sandbox() as played, service(played.url, at_once=3) as there:
        await asyncio.gather(*(there.run("import time; time.sleep(0.05)") for _ in range(12)))
    assert played.most_at_once == 3


async def test_answers_that_are_too_long_are_the_programs_doing() -> None:
    async def floods(request: RunCodeRequest, number: int) -> web.StreamResponse:
        if "flood" not in request.code:
            return await running(request)
        return web.Response(text=json.dumps({"run_result": {"stdout": "x" * 2_000_000}}))

    async with playing_sandbox(floods) as played, service(played.url) as there:
        result = await there.run("flood = 1")
    assert result == ProgramResult("too much output", -9, "", "", 0.0, truncated=True)


async def test_a_reward_by_tests_is_the_same_and_waits_once() -> None:
    async def scores(sandbox: Sandbox) -> list[float]:
        tests = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}
        programs = ("print(int(input()) ** 2)", "print(4)", "import time; time.sleep(60)", "import os; os._exit(0)")
        return [(await code_tests(sandbox, program, tests, score="fraction")).score for program in programs]

    async with playing_sandbox() as played, service(played.url) as there, LocalSandbox("none", LIMITS) as here:
        assert await scores(there) == await scores(here) == [1.0, 0.5, 0.0, 0.0]
    async with playing_sandbox() as played:
        lost = await service(played.url, seconds=0.5).__aenter__()
    began = asyncio.get_running_loop().time()
    try:
        with pytest.raises(RewardWorkerError, match=r"deadlineSeconds.* Try again: the run continues"):
            await code_tests(lost, "print(1)", {"inputs": ["2\n"], "outputs": ["4\n"]})
    finally:
        await lost.__aexit__(None, None, None)
    assert asyncio.get_running_loop().time() - began < 4 * 0.5
