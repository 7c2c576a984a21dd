"""The driver's HTTP side over a real socket: who may do what, what is refused, and that commands are idempotent."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rljob_api import load_jobs, resolve
from rljob_api.resolved import ResolvedSpec
from rljob_api.spec.pipeline import LiveSettings
from rljob_api.status import Desired, DriverStatus, End, Pools, RolloutStatus, TrainerStatus
from rljob_trainer.control.http import Answers, Listening, ServiceError, serving
from rljob_trainer.control.signals import StopRequest
from rljob_trainer.control.steering import Steering
from rljob_trainer.pipeline.schedule import Schedule
from rljob_trainer.pipeline.shape import schedule_settings
from rljob_trainer.record.ledger import Ledger
from rljob_trainer.rewards.standing import ScoringPools

TOKEN = "0123456789abcdef"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: tiny}
spec:
  model: {source: org/model}
  data: {train: {source: train.jsonl}, prompt: question, answer: answer}
  algorithm: {preset: grpo}
  trainer: {replicas: 2}
  placement: separate
"""
SYNC = "  reward: {functions: [{type: gsm8k}]}\n"
ASYNC = """\
  batch: {miniBatchGroups: 2}
  pipeline: {mode: fullyAsync, syncEvery: 2}
  reward:
    functions:
      - {type: rewardModel, rewardModel: {source: scores}}
      - {type: judge, judge: {template: "{response}"}}
  rewardModel: {replicas: 1}
  judge: {model: {source: judge}}
"""


def spec(mode: str = "fullyAsync") -> ResolvedSpec:
    (job,) = load_jobs(JOB + (ASYNC if mode == "fullyAsync" else SYNC))
    return resolve(job).spec


class Engines:
    """Those, reward models, or judges."""

    wanted = 1

    def want(self, count: int) -> None:
        self.wanted = count


class Driver:
    """A steering with everything that it acts on, behind the real service."""

    def __init__(self, mode: str = "fullyAsync") -> None:
        self.stop = StopRequest()
        self.steering = Steering(spec(mode), self.stop, attempt=3, generation=1)
        self.engines = Engines()
        self.scorers, self.judges = Engines(), Engines()
        schedule = Schedule(schedule_settings(spec()))
        scoring = ScoringPools(reward_model=self.scorers, judge=self.judges)  # type: ignore[arg-type]
        self.steering.steers(schedule, self.engines, scoring)  # type: ignore[arg-type]

    def status(self) -> DriverStatus:
        return DriverStatus(
            generation=self.steering.generation,
            attempt=3,
            time=datetime.now(UTC),
            pools=Pools(rollout=RolloutStatus(desired=1, ready=1), trainer=TrainerStatus(desired=1, ready=1)),
        )

    @asynccontextmanager
    async def client(self, token: str | None = TOKEN) -> AsyncIterator[aiohttp.ClientSession]:
        answers = Answers(self.status, lambda: "rljob_x 1.0\n", self.steering.take)
        async with (
            serving(Listening(0, token=token), answers) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=HEADERS if token else {}) as session,
        ):
            yield session


async def tell(session: aiohttp.ClientSession, **desired: Any) -> tuple[int, str]:
    body = Desired(**{"generation": 2, "attempt": 3, **desired}).model_dump(mode="json", by_alias=True)
    async with session.put("/v1/desired", json=body) as answer:
        return answer.status, await answer.text()


async def test_status_and_metrics_need_the_token() -> None:
    async with Driver().client() as session:
        for path in ("/v1/status", "/metrics", "/v1/unknown"):
            for said in ("", "Bearer wrong", TOKEN, f"Bearer {TOKEN}x", "Bearer \xff"):
                async with session.get(path, headers={"Authorization": said}) as answer:
                    assert answer.status == 401, (path, said)
        async with session.get("/v1/status") as answer:
            status = DriverStatus.model_validate_json(await answer.read())
        assert (status.generation, status.attempt) == (1, 3)
        async with session.get("/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert await answer.text() == "rljob_x 1.0\n"


async def test_a_command_is_fulfilled_echoed_and_may_be_repeated() -> None:
    driver = Driver()
    settings = LiveSettings(max_age=3, fraction=0.5, sync_every=3)
    async with driver.client() as session:
        for _ in range(3):
            sizes = {"rollout_replicas": 5, "reward_model_replicas": 4, "judge_replicas": 3}
            code, answer = await tell(session, settings=settings, **sizes)
            assert code == 200, answer
            assert json.loads(answer)["generation"] == 2
    schedule = driver.steering.schedule
    assert schedule is not None
    assert (driver.engines.wanted, driver.scorers.wanted, driver.judges.wanted) == (5, 4, 3)
    assert (schedule.settings.max_age, schedule.settings.fraction) == (3, 0.5)
    assert schedule.settings.groups_per_version == 4, "G changes at a publication"
    schedule.published()
    assert schedule.settings.groups_per_version == 6
    assert not driver.stop


async def test_what_the_job_no_longer_says_no_longer_counts() -> None:
    driver = Driver()
    async with driver.client() as session:
        for generation, settings in enumerate((LiveSettings(fraction=0.5), LiveSettings(max_age=2), LiveSettings()), 2):
            assert (await tell(session, generation=generation, settings=settings))[0] == 200
    assert driver.steering.schedule is not None
    now = driver.steering.schedule.settings
    assert (now.max_age, now.fraction) == (2, None), "the last command has no settings, and changes none"


async def test_every_command_is_in_the_ledger_also_one_that_comes_before_it_is_open(tmp_path: Path) -> None:
    driver = Driver()
    async with driver.client() as session:
        assert (await tell(session, generation=2, rollout_replicas=5))[0] == 200
        for roll_backs in range(2):
            ledger = Ledger(tmp_path / "ledger.sqlite", attempt=3)
            driver.steering.record_with(ledger.command)
            for _ in range(2):
                assert (await tell(session, generation=3 + roll_backs, rollout_replicas=6))[0] == 200
            driver.steering.record_with(None)
            await ledger.close()
            assert (await tell(session, generation=4, rollout_replicas=7))[0] == 200
    with sqlite3.connect(tmp_path / "ledger.sqlite") as read:
        rows = read.execute("SELECT generation, attempt, command ->> 'rolloutReplicas' FROM commands").fetchall()
    # The last one came after the last ledger was closed.
    assert rows == [(2, 3, 5), (3, 3, 6), (4, 3, 7), (4, 3, 6)]
    assert driver.steering.desired is not None
    assert driver.steering.desired.rollout_replicas == 7


async def test_suspend_asks_the_run_to_stop() -> None:
    driver = Driver()
    async with driver.client() as session:
        assert (await tell(session, suspend=True))[0] == 200
        assert (await tell(session, suspend=True))[0] == 200
    assert driver.stop
    assert driver.stop.suspended


async def test_what_is_not_for_this_attempt_is_refused() -> None:
    driver = Driver()
    async with driver.client() as session:
        code, why = await tell(session, attempt=2, suspend=True)
        assert (code, why) == (409, "this is attempt 3, but the command is for attempt 2\n")
        assert (await tell(session, generation=5))[0] == 200
        code, why = await tell(session, generation=4, suspend=True)
        assert (code, why) == (409, "generation 4 is older than generation 5, which is in effect\n")
    assert not driver.stop


@pytest.mark.parametrize(("count", "code"), [(4096, 200), (4097, 422)])
@pytest.mark.parametrize("pool", ["rewardModel", "judge"])
async def test_no_larger_pool_that_scores_than_a_job_file_can_have(pool: str, count: int, code: int) -> None:
    """A job file may have 4096 in ``replicas`` of both."""
    driver = Driver()
    async with driver.client() as session:
        wish = {"generation": 2, "attempt": 3, f"{pool}Replicas": count}
        async with session.put("/v1/desired", json=wish) as answer:
            assert answer.status == code, await answer.text()
    found = driver.scorers if pool == "rewardModel" else driver.judges
    assert found.wanted == (count if code == 200 else 1)


@pytest.mark.parametrize(
    ("mode", "desired", "why"),
    [
        ("fullyAsync", {"rollout_replicas": 0}, "with 0 engines the run would wait forever"),
        ("fullyAsync", {"reward_model_replicas": 0}, "with 0 replicas samples would wait forever"),
        ("sync", {"reward_model_replicas": 2}, "this job has no pool for reward models"),
        ("sync", {"settings": LiveSettings(max_age=2)}, "with pipeline.mode sync no setting can be changed live"),
    ],
)
async def test_wishes_that_the_job_cannot_fulfil_are_refused(mode: str, desired: dict[str, Any], why: str) -> None:
    driver = Driver(mode)
    async with driver.client() as session:
        code, answer = await tell(session, **desired)
    assert code == 422
    assert why in answer
    assert driver.steering.generation == 1


async def test_bad_bodies_are_refused_and_large_ones_not_read() -> None:
    async with Driver().client() as session:
        for body, code in (
            (b"", 422),
            (b"not json", 422),
            (b"[" * 10_000, 422),
            (b"\x80\x04\x95", 422),
            (b'{"generation": 2, "attempt": 3, "evil": 1}', 422),
            (b'{"generation": "2", "attempt": 3}', 422),
            (b"x" * 20_000, 413),
        ):
            async with session.put("/v1/desired", data=body) as answer:
                assert answer.status == code, (body[:20], await answer.text())
        async with session.post("/v1/desired", data=b"{}") as answer:
            assert answer.status == 405


async def test_without_a_token_there_are_no_commands_and_only_the_loopback_device() -> None:
    driver = Driver()
    async with driver.client(token=None) as session:
        async with session.get("/v1/status") as answer:
            assert answer.status == 200
        assert (await tell(session, suspend=True))[0] == 403
    assert not driver.stop
    with pytest.raises(ServiceError, match="requires a token"):
        Listening(0, host="0.0.0.0")
    with pytest.raises(ServiceError, match="at least 16"):
        Listening(0, token="short")


async def test_a_port_that_is_taken_is_named() -> None:
    driver = Driver()
    answers = Answers(driver.status, str, driver.steering.take)
    async with serving(Listening(0), answers) as port:
        with pytest.raises(ServiceError, match=rf"cannot serve on 127.0.0.1:{port}"):
            async with serving(Listening(port), answers):
                await asyncio.sleep(0)


async def test_the_end_is_served_until_it_was_read() -> None:
    driver = Driver()
    end = End(kind="succeeded", exit_code=0, reason="done", time=datetime.now(UTC))
    statuses = [driver.status()]
    answers = Answers(lambda: statuses[-1], lambda: "", driver.steering.take)
    leaving = asyncio.Event()
    serving_on: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with serving(Listening(0, token=TOKEN, farewell=3600), answers) as port:
            serving_on.set_result(port)
            await leaving.wait()

    running = asyncio.create_task(run())
    url = f"http://127.0.0.1:{await serving_on}/v1/status"
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        async with session.get(url) as answer:
            assert DriverStatus.model_validate_json(await answer.read()).end is None
        leaving.set()
        statuses.append(driver.status().model_copy(update={"end": end}))
        async with asyncio.timeout(30):
            async with session.get(url) as answer:
                assert DriverStatus.model_validate_json(await answer.read()).end == end
            await running


async def test_nobody_to_tell_is_waited_for_only_so_long() -> None:
    driver = Driver()
    answers = Answers(driver.status, lambda: "", driver.steering.take)
    async with asyncio.timeout(30), serving(Listening(0, token=TOKEN, farewell=0.05), answers):
        pass
