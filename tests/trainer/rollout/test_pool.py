"""The pool over real Ray actors: results in order, engines that die, leave and come, work that moves on."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_episodes import named

from rljob_trainer.driver.local_ray import ray_for_run
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.receipts import check_answer
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.pools import dispatch
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.pools.size import in_hand
from rljob_trainer.rollout.actor import EnginePlace, EngineSpec
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineHandle, EngineLostError, RayEngine
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.weights.manifest import Version


@pytest.fixture(scope="module", autouse=True)
def _ray(forked_workers: None) -> Iterator[None]:
    with ray_for_run(cpus=4):
        yield


@pytest.fixture(scope="module")
def spec(llama_folder: Path) -> EngineSpec:
    return EngineSpec("torch", str(llama_folder), max_concurrent=8)


@pytest.fixture(scope="module")
def slow(llama_folder: Path) -> EngineSpec:
    """One request at a time: whatever a test does to it, it does in the middle of the work."""
    return EngineSpec("torch", str(llama_folder), max_concurrent=1)


def group(number: int, length: int = 60, size: int = 4) -> list[GenerationRequest]:
    sampling = SamplingSettings(max_tokens=length)
    return [
        GenerationRequest(named(f"{number}/{i}"), (1, 2, number % 97), sampling, seed=10 * number + i)
        for i in range(size)
    ]


def tokens(groups: list[list[GenerationResult]]) -> list[list[list[int]]]:
    return [[result.tokens.ids.tolist() for result in results] for results in groups]


def expected(folder: str, groups: list[list[GenerationRequest]]) -> list[list[list[int]]]:
    """What one engine in this process makes of the same requests."""
    engine = TorchEngine.from_folder(folder)
    made: dict[str, list[int]] = {}
    for request in (request for requests in groups for request in requests):
        engine.add(request)
    while engine.has_work:
        made.update((result.id.purpose, result.tokens.ids.tolist()) for result in engine.step())
    return [[made[request.id.purpose] for request in requests] for requests in groups]


def deliver(pool: RolloutPool, version: Version) -> None:
    """As a publication does."""
    names = [engine.name for engine in pool.engines]
    pool.delivered(names, version)
    pool.present(version)
    pool.activate(names)


@asynccontextmanager
async def pool_of(spec: EngineSpec, count: int, **options: Any) -> AsyncIterator[RolloutPool]:
    async with RolloutPool(**options) as pool:
        handles = await asyncio.gather(*(RayEngine.start(str(i), spec, num_cpus=0) for i in range(count)))
        for handle in handles:
            pool.add(handle)
        pool.activate([handle.name for handle in handles])
        yield pool


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (the pool has no event for every condition of a test)
            await asyncio.sleep(0.01)


async def made_by(name: str, pool: RolloutPool, more_than: int = 0) -> None:
    """Until an engine has made so many tokens."""
    async with asyncio.timeout(60):
        while {s.name: s.tokens_made for s in await pool.status()}[name] <= more_than:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def process_of(handle: EngineHandle) -> int:
    assert handle.place is not None
    process = handle.place.process
    return process


async def test_results_come_in_the_order_of_the_requests_from_several_engines(spec: EngineSpec) -> None:
    groups = [group(number, length=10 + number) for number in range(12)]
    async with pool_of(spec, 2) as pool:
        began = time.monotonic()
        results = await asyncio.gather(*map(pool.generate, groups))
        assert all(0 < result.seconds <= time.monotonic() - began for result in chain(*results))
        assert tokens(results) == expected(spec.folder, groups)
        made = [status.tokens_made for status in await pool.status()]
        assert min(made) > 0.3 * sum(made), f"the work was not shared: {made}"
        assert pool.waiting_for() == "no request is running"


async def test_each_result_is_told_of_once_with_its_position_while_siblings_run(slow: EngineSpec) -> None:
    told: dict[int, GenerationResult] = {}
    finished: list[list[int]] = []
    requests = [*group(1, length=1)[:1], *group(2, length=200)[:2]]

    def tell(position: int, result: GenerationResult) -> None:
        assert position not in told
        told[position] = result
        finished.append(pool.progress())

    async with pool_of(slow, 1) as pool:
        results = await pool.generate(requests, tell)
    assert [told[position] is result for position, result in enumerate(results)] == [True] * 3
    assert next(iter(told)) == 0
    assert finished == [[1], [2], [3]]


async def test_fixed_dispatch_is_bitwise_repeatable(spec: EngineSpec) -> None:
    groups = [group(number, length=20) for number in range(7)]
    async with pool_of(spec, 2, fixed_dispatch=True) as pool:
        first = await asyncio.gather(*map(pool.generate, groups))
        second = await asyncio.gather(*map(pool.generate, groups))
    for a, b in zip(chain(*first), chain(*second), strict=True):
        assert np.array_equal(a.tokens.ids, b.tokens.ids)
        assert np.array_equal(a.tokens.log_probs, b.tokens.log_probs)


async def test_all_requests_finish_though_an_engine_is_killed_and_another_takes_its_place(
    slow: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a test may take: a death that only the end of a poll shows is never noticed.
    monkeypatch.setattr(dispatch, "_POLL_SECONDS", 1000.0)
    replaced: list[str] = []
    reissued: list[str] = []

    async def replace(name: str) -> EngineHandle:
        replaced.append(name)
        return await RayEngine.start(f"{name} again", slow, num_cpus=0)

    groups = [group(number, length=200) for number in range(6)]
    async with pool_of(slow, 2, replace=replace, made_again=reissued.extend) as pool:
        victim = pool.engines[0]
        process = await process_of(victim)
        running = asyncio.gather(*map(pool.generate, groups))
        await made_by("0", pool)
        assert re.fullmatch(r"oldest running \d+ s on engine [01]", pool.waiting_for())
        (left,) = [standing.running for standing in pool.standings() if standing.name == "0"]
        os.kill(process, signal.SIGKILL)
        await until(lambda: bool(pool.lost))
        assert tokens(await running) == expected(slow.folder, groups)
        await until(lambda: len(pool.serving) == 2)
        assert pool.lost == replaced == ["0"]
        # Either engine had three of the six groups, whose four siblings are together. What it had not answered is made
        # again, each once; one answer may have been on its way when it died.
        assert max(1, left - 1) <= len(reissued) == len(set(reissued)) <= left <= 3 * 4
        groups_made_again = {id.purpose.partition("/")[0] for id in reissued}
        assert -(-len(reissued) // 4) <= len(groups_made_again) <= 3
        assert [engine.name for engine in pool.engines] == ["0 again", "1"]


async def test_an_engine_that_dies_idle_is_noticed_and_replaced_before_anybody_asks_for_it(spec: EngineSpec) -> None:
    async def replace(name: str) -> EngineHandle:
        return await RayEngine.start(f"{name} again", spec, num_cpus=0)

    async with pool_of(spec, 2, replace=replace) as pool:
        os.kill(await process_of(pool.engines[0]), signal.SIGKILL)
        await until(lambda: [engine.name for engine in pool.serving] == ["0 again", "1"])
        assert pool.lost == ["0"]
        assert tokens([await pool.generate(group(1))]) == expected(spec.folder, [group(1)])


async def test_engines_that_end_with_the_pool_are_not_lost(slow: EngineSpec, caplog: pytest.LogCaptureFixture) -> None:
    """Also in the middle of their work: nobody is told of a loss, and no engine is started in their place."""
    replaced: list[str] = []

    async def replace(name: str) -> EngineHandle:
        replaced.append(name)
        return await RayEngine.start(f"{name} again", slow, num_cpus=0)

    async with pool_of(slow, 2, replace=replace) as pool:
        running = asyncio.gather(*(pool.generate(group(number, length=250, size=30)) for number in range(2)))
        await until(lambda: all(standing.running for standing in pool.standings()))
        await asyncio.sleep(0.2)  # until the results are being waited for
    with pytest.raises(EngineError, match="the pool has been closed"):
        await running
    assert (pool.lost, replaced) == ([], [])
    assert "lost" not in caplog.text


class Paced:
    """An engine in this process whose steps take time, behind the handle of a pool."""

    def __init__(self, name: str, folder: str, seconds: float) -> None:
        self.name, self.place = name, EnginePlace("here", os.getpid())
        engine = TorchEngine.from_folder(folder, max_concurrent=2)
        step = engine.step

        def paced() -> list[GenerationResult]:
            time.sleep(seconds)
            return step()

        engine.step = paced  # type: ignore[method-assign]
        self.loop = EngineLoop(lambda: engine, name)

    async def within(self, seconds: float, method: Any, *args: Any) -> Any:
        return await asyncio.to_thread(method, self.loop, *args)

    def kill(self) -> None:
        self.loop.close()


async def test_an_engine_that_ends_with_the_pool_while_it_is_asked_something_is_not_lost(
    spec: EngineSpec, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a run is suspended: the engine is told of cancelled groups, and the pool ends before it answers."""
    engine = Paced("slow", spec.folder, 0.3)
    async with RolloutPool() as pool:
        pool.add(engine)
        pool.activate(["slow"])
        running = asyncio.create_task(pool.generate(group(1)))
        await until(lambda: engine.loop.status().running > 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0)  # until it is being told
    assert (pool.lost, pool.standings()) == ([], [])
    assert "lost" not in caplog.text


async def test_no_replacement_is_started_for_a_pool_that_ends(spec: EngineSpec) -> None:
    starting, ending, started = asyncio.Event(), asyncio.Event(), []

    class Last(Paced):
        async def within(self, seconds: float, method: Any, *args: Any) -> Any:
            if method is EngineLoop.close:
                ending.set()
                await asyncio.sleep(0.05)  # long enough for a start that had only waited for this
            return await super().within(seconds, method, *args)

    async def replace(name: str) -> EngineHandle:
        starting.set()
        await ending.wait()
        started.append(name)
        return Paced(f"{name}.1", spec.folder, 0.01)

    async with RolloutPool(replace=replace) as pool:
        pool.add(Last("0", spec.folder, 0.01))
        pool.add(Paced("1", spec.folder, 0.01))
        pool.report_lost("1", "a test says so")
        await starting.wait()
    assert (started, pool.standings()) == ([], [])


async def test_work_goes_past_a_slow_engine_to_one_that_has_room(spec: EngineSpec) -> None:
    groups = [group(number, length=20, size=1) for number in range(60)]
    async with RolloutPool(max_outstanding=in_hand(2)) as pool:
        for handle in (Paced("fast", spec.folder, 0.002), Paced("slow", spec.folder, 0.02)):
            pool.add(handle)
        pool.activate(["fast", "slow"])
        running = asyncio.gather(*map(pool.generate, groups))
        most = 0
        while pool.queued or not running.done():
            statuses = await pool.status()
            most = max(most, *(status.running + status.waiting for status in statuses))
            await asyncio.sleep(0.01)
        made = {status.name: status.tokens_made for status in await pool.status()}
        assert tokens(await running) == expected(spec.folder, groups)
        assert made["fast"] + made["slow"] == 60 * 20
        assert made["slow"] < 0.3 * made["fast"], made
        assert most == 3, "what waits inside an engine waits for that one"


async def test_the_last_engine_s_death_fails_whoever_waits(slow: EngineSpec) -> None:
    async with pool_of(slow, 1) as pool:
        process = await process_of(pool.engines[0])
        running = asyncio.create_task(pool.generate(group(1, length=250, size=30)))
        await made_by("0", pool)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(EngineError, match="no engine is left: 0 was the last one"):
            await running
        with pytest.raises(EngineError, match="the pool has failed"):
            await pool.generate(group(2))


async def test_a_drained_engine_s_requests_go_on_elsewhere_from_where_they_are(slow: EngineSpec) -> None:
    groups = [group(number, length=200) for number in range(4)]
    async with pool_of(slow, 2) as pool:
        leaving = pool.engines[0]
        running = asyncio.gather(*map(pool.generate, groups))
        await made_by("0", pool)
        await pool.remove("0")
        assert tokens(await running) == expected(slow.folder, groups)
        made = (await pool.status())[0].tokens_made
        assert made < 4 * 4 * 200, "the tokens that the engine had made were made again"
        with pytest.raises(EngineLostError, match="engine 0 is gone"):
            await leaving.within(20, EngineLoop.status)


async def test_a_lent_engine_answers_only_its_borrower_and_gets_no_weights(slow: EngineSpec) -> None:
    groups = [group(number, length=200) for number in range(6)]
    borrowed = [group(number, length=30) for number in range(10, 14)]
    brought: list[str] = []

    async with pool_of(slow, 2) as pool:

        async def bring_up(handle: EngineHandle) -> None:
            brought.append(handle.name)
            pool.delivered([handle.name], Version(1, "ab"))
            pool.activate([handle.name])

        pool.bring_up_by(bring_up)
        running = asyncio.gather(*map(pool.generate, groups))
        await made_by("0", pool)
        lent = await pool.lend(2)
        assert lent is not None
        (name,) = (member.handle.name for member in lent.members)  # one stays
        assert [engine.name for engine in pool.lent] == [name]
        assert name not in [engine.name for engine in (*pool.engines, *pool.serving)]
        assert await pool.lend(1) is None
        asked = asyncio.gather(*map(lent.generate, borrowed))
        await asyncio.sleep(0.1)
        # A publication interrupts the others and takes no notice of the lent one.
        await pool.pause(interrupt=True)
        await pool.wait_idle(30)
        assert {standing.name: standing.state for standing in pool.standings()}[name] == "lent"
        deliver(pool, Version(1, "ab"))
        pool.resume()
        assert tokens(await asked) == expected(slow.folder, borrowed)
        assert brought == []
        lent.give_back()
        await until(lambda: len(pool.serving) == 2)
        assert brought == [name]
        assert tokens(await running) == expected(slow.folder, groups)


async def test_a_lent_engine_that_dies_is_replaced_and_its_borrower_is_told(
    slow: EngineSpec, caplog: pytest.LogCaptureFixture
) -> None:
    async def replace(name: str) -> EngineHandle:
        return await RayEngine.start(f"{name} again", slow, num_cpus=0)

    async with pool_of(slow, 2, replace=replace) as pool:
        lent = await pool.lend(1)
        assert lent is not None
        asked = asyncio.create_task(lent.generate(group(1, length=250, size=30)))
        await asyncio.sleep(0.2)
        os.kill(await process_of(lent.members[0].handle), signal.SIGKILL)
        with pytest.raises(EngineLostError, match="engine 0 is lost"):
            await asked
        assert "validation requests fail" in caplog.text
        with pytest.raises(EngineLostError, match="the engines lent to validation are lost"):
            await lent.generate(group(2))
        lent.give_back()
        await until(lambda: [engine.name for engine in pool.serving] == ["0 again", "1"])
        results = await asyncio.gather(*map(pool.generate, [group(3), group(4)]))
        assert tokens(results) == expected(slow.folder, [group(3), group(4)])


async def test_an_engine_that_joins_serves_once_it_is_activated(spec: EngineSpec) -> None:
    async with RolloutPool() as pool:
        running = asyncio.create_task(pool.generate(group(1)))
        pool.add(await RayEngine.start("0", spec, num_cpus=0))
        await asyncio.sleep(0.05)
        assert pool.waiting_for() == "4 requests wait for an engine (0 of 1 engines are serving)"
        deliver(pool, Version(3, "ab"))
        assert pool.version == 3
        assert len(await running) == 4
        with pytest.raises(ValueError, match="already has an engine 0"):
            pool.add(pool.engines[0])


async def test_an_engine_without_the_manifest_of_what_was_published_serves_nothing(spec: EngineSpec) -> None:
    async with pool_of(spec, 2) as pool:
        deliver(pool, Version(1, "ab"))
        await pool.hold("0")
        # The number is the same; what it has is not.
        pool.delivered(["0"], Version(1, "cd"))
        with pytest.raises(EngineError, match=r"engine 0 cannot serve version 1 \(manifest ab\): it holds version 1 "):
            pool.activate(["0"])
        assert [engine.name for engine in pool.serving] == ["1"]
        pool.add(await RayEngine.start("2", spec, num_cpus=0))
        with pytest.raises(EngineError, match="it holds no known version"):
            pool.activate(["2"])
        pool.delivered(["0", "2"], Version(1, "ab"))
        pool.activate(["0", "2"])
        assert [engine.name for engine in pool.serving] == ["0", "1", "2"]


async def test_interrupted_requests_keep_their_tokens_and_go_on_after_the_pause(slow: EngineSpec) -> None:
    groups = [group(number, length=200) for number in range(4)]
    async with pool_of(slow, 2) as pool:
        running = asyncio.gather(*map(pool.generate, groups))
        await made_by("0", pool)
        await pool.pause(interrupt=True)
        assert "the pool is paused" in pool.waiting_for()
        assert all(status.running == 0 for status in await pool.status())
        before = sum(status.tokens_made for status in await pool.status())
        pool.resume()
        assert tokens(await running) == expected(slow.folder, groups)
        total = sum(status.tokens_made for status in await pool.status())
        assert 0 < before < total == 4 * 4 * 200


async def test_what_a_held_engine_made_of_the_present_version_is_made_again_elsewhere(slow: EngineSpec) -> None:
    groups = [group(number, length=200) for number in range(4)]
    async with pool_of(slow, 2) as pool:
        running = asyncio.gather(*map(pool.generate, groups))
        await made_by("0", pool)
        await pool.hold("0")
        assert pool.standings()[0].state == "joining"
        # What it had finished by then may still be on its way, and stands.
        await until(lambda: pool.standings()[0].running == 0)
        wrong = next(status.tokens_made for status in await pool.status() if status.name == "0")
        assert tokens(await running) == expected(slow.folder, groups)
        assert 0 < sum(status.tokens_made for status in await pool.status()) - 4 * 4 * 200 <= wrong
        pool.activate(["0"])
        assert len(pool.serving) == 2


async def test_interrupted_responses_wait_on_the_shelf(slow: EngineSpec, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, least_bytes=1)
    async with pool_of(slow, 1, shelf=shelf) as pool:
        # So many that they are at it for longer than a busy machine keeps this process from interrupting them.
        running = asyncio.create_task(pool.generate(group(1, length=250, size=8)))
        await made_by("0", pool)
        written = []
        for _ in range(2):
            await pool.pause(interrupt=True)
            begun = [request.begun for request in await pool.begun() if len(request.begun)]
            assert begun
            # Their versions are all the same, so they are no array of their own.
            arrays = [array for one in begun for array in (one.ids, one.log_probs)]
            assert all(np.may_share_memory(array, shelf._bytes) for array in arrays)
            written.append(shelf._end)
            # Once more without a token in between: what is there already is not written again.
            await pool.begun()
            assert shelf._end == written[-1]
            pool.resume()
            await made_by("0", pool, more_than=sum(map(len, begun)))
        assert written[1] > written[0]
        assert tokens([await running]) == expected(slow.folder, [group(1, length=250, size=8)])


async def test_waiting_for_the_engines_to_be_idle_says_what_still_runs(slow: EngineSpec) -> None:
    async with pool_of(slow, 1) as pool:
        running = asyncio.create_task(pool.generate(group(1, length=250)))
        await made_by("0", pool)
        with pytest.raises(
            DeadlineError,
            match=r"none did within 0\.001 s .*: oldest running 0 s on engine 0.*partialRollout: recompute",
        ):
            await pool.wait_idle(0.001)
        await pool.wait_idle(60)
        assert len(await running) == 4


async def test_waiting_for_idle_engines_does_not_wait_for_what_a_lost_one_had(slow: EngineSpec) -> None:
    """Its requests return to the queue of a paused pool, which hands them out only after the publication."""
    async with pool_of(slow, 2) as pool:
        running = asyncio.gather(*(pool.generate(group(number, length=250)) for number in range(2)))
        await made_by("0", pool)
        await pool.pause()
        pool.report_lost("0", "as the test wants it")
        await pool.wait_idle(60)
        assert "the pool is paused" in pool.waiting_for()
        pool.resume()
        assert [len(results) for results in await running] == [4, 4]


async def test_cancelled_groups_free_the_engine(slow: EngineSpec) -> None:
    async with pool_of(slow, 1) as pool:
        running = asyncio.create_task(pool.generate(group(1, length=250)))
        await made_by("0", pool)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        deadline = time.monotonic() + 20
        while (status := (await pool.status())[0]).running + status.waiting:
            assert time.monotonic() < deadline, f"still there: {status}"
        assert len((await pool.generate(group(2)))[0].tokens.ids) == 60


async def test_a_request_that_no_engine_can_run_fails_alone(spec: EngineSpec) -> None:
    async with pool_of(spec, 1) as pool:
        good, bad, other = (asyncio.create_task(pool.generate(group(i, length=n))) for i, n in enumerate((60, 255, 60)))
        with pytest.raises(ValueError, match=r"of 1/0: .* do not fit the context of 256"):
            await bad
        assert len(await good) == len(await other) == 4


async def test_an_engine_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"engine x: it failed to initialize: .*config\.json") as raised:
        await RayEngine.start("x", EngineSpec("torch", str(tmp_path)), num_cpus=0)
    assert not isinstance(raised.value, EngineLostError)  # another start would fail as this one did


async def test_requests_that_are_over_end_with_what_they_have_and_others_go_on(slow: EngineSpec) -> None:
    """One runs, its siblings have not begun: these end with one token. What the engine made is what it would have."""
    over, other = group(1, length=250, size=8), group(2, length=20)
    whole = expected(slow.folder, [over, other])
    told: list[int] = []
    async with pool_of(slow, 1, max_outstanding=2) as pool:
        running = asyncio.gather(pool.generate(over, lambda position, _: told.append(position)), pool.generate(other))
        await made_by("0", pool, more_than=5)
        await pool.cut(lambda id: id in {request.id for request in over})
        ended, untouched = await running
    assert sorted(told) == list(range(8))
    assert tokens([untouched]) == [whole[1]]
    assert len(ended[0].tokens) > 5
    assert (ended[-1].finish, len(ended[-1].tokens)) == ("deadline", 1)
    assert sum(len(result.tokens) for result in ended) < sum(len(tokens) for tokens in whole[0])
    for request, result, all_of_it in zip(over, ended, whole[0], strict=True):
        assert result.tokens.ids.tolist() == all_of_it[: len(result.tokens)]
        assert result.receipt is not None
        check_answer(request, result)
        assert result.seconds > 0


async def test_an_interrupted_request_in_the_queue_ends_without_an_engine(slow: EngineSpec) -> None:
    requests = group(1, length=200, size=1)
    async with pool_of(slow, 1) as pool:
        for made in range(0, 20 * 200, 200):  # on a busy machine an engine may be done before it is asked to stop
            running = asyncio.create_task(pool.generate(requests))
            await made_by("0", pool, more_than=made + 5)
            await pool.pause(interrupt=True)
            if pool.queued:
                break
            await running
            pool.resume()
        assert pool.queued == 1
        await pool.cut(lambda id: True)
        (result,) = await running
    assert result.finish == "deadline"
    assert len(result.tokens) > 5
    assert result.receipt is not None
    check_answer(requests[0], result)


@pytest.mark.parametrize("fixed", [False, True])
async def test_what_continues_an_episode_goes_to_the_engine_that_has_it(spec: EngineSpec, fixed: bool) -> None:
    """Turn after turn, whatever order they come in, and though the other engine has less to do."""

    def turn(sample: int, number: int) -> GenerationRequest:
        id = EpisodeId("training", sample, 0, number)
        return GenerationRequest(id, (1, 2, 3) * (number + 1), SamplingSettings(max_tokens=8), seed=sample)

    async with pool_of(spec, 2, fixed_dispatch=fixed) as pool:
        await asyncio.gather(*(pool.generate([turn(sample, 0)]) for sample in range(4)))
        homes = [pool.homes.of(turn(sample, 1)) for sample in range(4)]
        assert sorted(homes, key=str) == ["0", "0", "1", "1"]
        for number in (1, 2):
            for sample in (3, 1, 0, 2):
                await pool.generate([turn(sample, number)])
        assert [pool.homes.of(turn(sample, 3)) for sample in range(4)] == homes
        lost = next(handle for handle in pool.engines if handle.name == "1")
        os.kill(await process_of(lost), signal.SIGKILL)
        await until(lambda: [standing.name for standing in pool.standings()] == ["0"])
        await asyncio.gather(*(pool.generate([turn(sample, 3)]) for sample in range(4)))
        assert {pool.homes.of(turn(sample, 4)) for sample in range(4)} == {"0"}
        # The torch engine keeps nothing from one request to the next.
        assert pool.homes.take_counts()["rollout/recomputed_ratio"] > 0
