"""The work queue: one worker a key, no change lost, pauses after errors."""

from __future__ import annotations

import asyncio

from rljob_operator.work_queue import FIRST_PAUSE, RetryError, WorkQueue


async def run_until(queue: WorkQueue[str], done: asyncio.Event) -> None:
    task = asyncio.create_task(queue.run())
    await asyncio.wait_for(done.wait(), 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_change_during_the_work_causes_exactly_one_more_look() -> None:
    looks, done = [], asyncio.Event()

    async def work(key: str) -> float | None:
        looks.append(key)
        if len(looks) == 1:
            for _ in range(100):
                queue.add(key)
            await asyncio.sleep(0)
        else:
            done.set()
        return None

    queue: WorkQueue[str] = WorkQueue(work)
    queue.add("a")
    await run_until(queue, done)
    assert looks == ["a", "a"]
    assert queue.idle


async def test_a_key_is_never_worked_on_by_two_at_once() -> None:
    active, most, count, done = 0, 0, 0, asyncio.Event()

    async def work(key: str) -> float | None:
        nonlocal active, most, count
        active += 1
        most = max(most, active)
        queue.add(key)
        await asyncio.sleep(0.001)
        active -= 1
        count += 1
        if count == 20:
            done.set()
        return None

    queue: WorkQueue[str] = WorkQueue(work, workers=8)
    queue.add("a")
    await run_until(queue, done)
    assert most == 1


async def test_different_keys_are_worked_on_together() -> None:
    together, done = asyncio.Barrier(5), asyncio.Event()

    async def work(_key: str) -> float | None:
        await together.wait()
        done.set()
        return None

    queue: WorkQueue[str] = WorkQueue(work, workers=5)
    for key in "abcde":
        queue.add(key)
    await run_until(queue, done)


async def test_when_what_was_in_the_way_of_all_has_passed_the_pauses_begin_anew() -> None:
    """Or the first hiccup of a server that has just come back would cost a minute."""
    looks: list[float] = []
    done = asyncio.Event()

    async def work(_key: str) -> float | None:
        looks.append(asyncio.get_running_loop().time())
        if len(looks) == 2:
            done.set()
            return None
        raise RetryError("no answer")

    queue: WorkQueue[str] = WorkQueue(work)
    queue._failures["a"] = 20
    queue.relieve()
    queue.add("a")
    await run_until(queue, done)
    assert looks[1] - looks[0] < 2 * FIRST_PAUSE


async def test_an_error_brings_the_key_back_and_leaves_the_others_alone() -> None:
    looks: dict[str, int] = {"bad": 0, "good": 0}
    errors, done = [], asyncio.Event()

    async def work(key: str) -> float | None:
        looks[key] += 1
        if key == "bad":
            if looks[key] == 1:
                raise RetryError("passing")
            done.set()
        return None

    queue: WorkQueue[str] = WorkQueue(work)
    queue.on_error = lambda key, error: errors.append((key, str(error)))
    queue.add("bad")
    queue.add("good")
    await run_until(queue, done)
    assert looks == {"bad": 2, "good": 1}
    assert errors == [("bad", "passing")]


async def test_what_is_due_later_comes_back_and_what_is_forgotten_does_not() -> None:
    looks, done = [], asyncio.Event()

    async def work(key: str) -> float | None:
        looks.append(key)
        if looks.count("a") == 3:
            done.set()
        return 0.01

    queue: WorkQueue[str] = WorkQueue(work)
    queue.add("a")
    queue.add_later("b", 0.02)
    queue.forget("b")
    await run_until(queue, done)
    assert "b" not in looks


async def test_what_may_succeed_in_a_moment_is_tried_ten_times_as_soon_and_the_pauses_grow_all_the_same() -> None:
    pauses: dict[str, list[float]] = {"busy": [], "overtaken": []}
    done = asyncio.Event()

    async def work(key: str) -> float | None:
        raise RetryError("somebody else wrote first", soon=key == "overtaken")

    def note(key: str, seconds: float) -> None:
        pauses[key].append(seconds)
        if len(pauses[key]) < 4:
            asyncio.get_running_loop().call_soon(queue.add, key)
        elif all(len(those) == 4 for those in pauses.values()):
            done.set()

    queue: WorkQueue[str] = WorkQueue(work)
    queue.add_later = note  # type: ignore[method-assign]
    for key in pauses:
        queue.add(key)
    await run_until(queue, done)
    for first, those in ((FIRST_PAUSE, pauses["busy"]), (FIRST_PAUSE / 10, pauses["overtaken"])):
        for tried, pause in enumerate(those):
            assert 0.75 <= pause / (first * 2**tried) <= 1.25
