"""Who waits, for what, and until when: the registry that status and live view read. Time is virtual."""

from __future__ import annotations

import asyncio

import pytest

from rljob_trainer.simulation.clock import run_virtual
from rljob_trainer.waits import Turn, Waits, patiently


def waits_of_this_loop() -> Waits:
    return Waits(asyncio.get_running_loop().time)


def test_what_the_run_waits_for_is_not_hidden_by_what_others_wait_for() -> None:
    waits = Waits(lambda: 0.0)
    assert waits.latest is None
    with waits.wait("trainer", "samples"), waits.wait("engine 3", "weights"):
        assert waits.latest is not None
        assert waits.latest.sentence == "trainer waits for samples"
        with waits.wait("engine 3", "the learner to connect"), waits.wait("rollout", "reward functions"):
            said = {who: wait.reason() for who, wait in waits.beside.items()}
        assert said == {"engine 3": "the learner to connect", "rollout": "reward functions"}
    assert waits.latest is None
    assert waits.beside == {}


def test_progress_moves_the_deadline() -> None:
    now, done_at = 10.0, 0.0
    waits = Waits(lambda: now)
    with waits.wait("trainer", "samples", 60, progress=lambda: done_at) as wait:
        now = 50.0
        assert waits.left(wait) == 20
        done_at = 45.0
        assert (waits.left(wait), waits.seconds(wait)) == (55, 40)
    with waits.wait("trainer", "a lock") as wait:
        assert waits.left(wait) is None


def test_patience_ends_when_nothing_has_moved_the_deadline() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        last = 0.0

        async def move() -> None:
            nonlocal last
            for _ in range(5):
                await asyncio.sleep(40)
                last = loop.time()

        moving = asyncio.create_task(move())
        with pytest.raises(TimeoutError):
            await patiently(asyncio.Event(), lambda: last + 60)
        assert loop.time() == pytest.approx(260)
        await moving
        happened = asyncio.Event()
        loop.call_later(5, happened.set)
        await patiently(happened, lambda: last + 600)
        assert loop.time() == pytest.approx(265)

    run_virtual(main())


def test_who_waits_for_a_turn_says_what_goes_on_and_shows_the_deadline_of_the_holder() -> None:
    async def main() -> None:
        waits = waits_of_this_loop()
        turn = Turn(waits)

        async def join() -> None:
            async with turn.taken("engine 3", "engine 3 gets its first weights", 300):
                await asyncio.sleep(100)

        joining = asyncio.create_task(join())
        await asyncio.sleep(1)
        assert waits.latest is None

        async def train() -> None:
            async with turn.taken("trainer", "step 2 begins", 0):
                assert waits.latest is None

        training = asyncio.create_task(train())
        await asyncio.sleep(10)
        wait = waits.latest
        assert wait is not None
        assert wait.sentence == "trainer waits for its turn, while engine 3 gets its first weights"
        assert (waits.seconds(wait), waits.left(wait)) == (10, 289)
        await asyncio.gather(joining, training)
        assert not turn.is_taken

    run_virtual(main())
