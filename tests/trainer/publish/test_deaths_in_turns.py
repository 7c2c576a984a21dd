"""Engines that die on devices which they share with the learner: whoever's turn it is, their successors never meet it.

A GPU of ``played_gpus`` refuses whoever does not fit: an engine that starts beside anything of the learner, a KV cache
beside the actor, weights beside the optimizer's state.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random

import pytest
from played_gpus import GROUPS, MOVE, START, UPDATE, N, PlayedEngine, Trouble, World

from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.publish.engines_turn import EnginesTurn
from rljob_trainer.simulation.clock import run_virtual
from rljob_trainer.waits import Waits

WALKS = int(os.environ.get("RLJOB_TURNS", "60"))


def once(what: str, name: str, times: int = 1, after: int = 0) -> Trouble:
    """That engine's ``what`` goes wrong so many ``times``, when it has gone well ``after`` times."""
    asked = 0

    def trouble(now: str, engine: PlayedEngine) -> bool:
        nonlocal asked
        if (now, engine.name) != (what, name):
            return False
        asked += 1
        return after < asked <= after + times

    return trouble


async def whole(world: World, folder: Path, steps: int = 3) -> None:
    """All steps are made, from samples of the version that was served, and engines as many as GPUs are left."""
    async with world.started(folder):
        await world.train(steps)
        await asyncio.sleep(10 * START)
        assert world.steps == [(version, GROUPS * N) for version in range(steps)]
        assert len(world.run.pool.serving) == len(world.gpus)
        assert [engine.version for engine in world.engines.values()] == [steps] * len(world.gpus)


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("what", ["sleep", "wake_weights", "join_weights", "receive_weights", "wake"])
@pytest.mark.parametrize("after", [0, 1])
def test_an_engine_that_dies_in_a_hand_over_is_replaced_and_the_run_goes_on(
    tmp_path: Path, gpus: int, what: str, after: int, sleeps: bool
) -> None:
    world = World(gpus, sleeps=sleeps, trouble=once(what, "0", after=after))
    run_virtual(whole(world, tmp_path))
    asked = sleeps or what in ("receive_weights", "join_weights")
    # A group of the same engines meets once.
    happens = asked and (what != "join_weights" or after == 0)
    assert world.run.pool.lost == (["0"] if happens else [])


@pytest.mark.parametrize("what", ["sleep", "wake_weights", "receive_weights"])
def test_so_is_its_successor_that_dies_of_the_same(tmp_path: Path, what: str) -> None:
    def trouble(now: str, engine: PlayedEngine) -> bool:
        return now == what and engine.name in ("0", "0.1")

    world = World(trouble=trouble)
    run_virtual(whole(world, tmp_path))
    assert world.run.pool.lost == ["0", "0.1"]


@pytest.mark.parametrize("what", ["sleep", "wake_weights", "receive_weights", "wake"])
def test_but_not_for_ever(tmp_path: Path, what: str) -> None:
    world = World(trouble=lambda now, engine: now == what)
    with pytest.raises(EngineError, match="3 times in a row" if what != "receive_weights" else "no engine is left"):
        run_virtual(whole(world, tmp_path))
    # Their successors are the only ones that are started for want of an engine.
    assert len(world.run.pool.lost) >= 3


def test_nor_for_those_that_die_while_the_learner_comes(tmp_path: Path) -> None:
    """No call of a hand-over meets such an engine: only the pool knows of its death."""
    world = World()
    come = world.happens

    def happens(what: str) -> None:
        come(what)
        if what == "the learner wakes":
            for engine in list(world.engines.values()):
                engine.kill()

    world.happens = happens  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="3 engines in a row were lost after their start"):
        run_virtual(whole(world, tmp_path))
    assert world.run.pool.lost == ["0", "0.1", "0.2", "0.3"]


@pytest.mark.parametrize("kills", [1, 2, 3])
def test_a_successor_that_is_killed_in_its_start_is_followed_by_another(tmp_path: Path, kills: int) -> None:
    left = kills

    def trouble(what: str, engine: PlayedEngine) -> bool:
        nonlocal left
        if what == "start" and "." in engine.name and left:
            left -= 1
            engine.kill()
        return (what, engine.name) == ("wake_weights", "0")

    world = World(trouble=trouble)
    if kills == 3:
        with pytest.raises(EngineError, match="no engine is left"):
            run_virtual(whole(world, tmp_path))
    else:
        run_virtual(whole(world, tmp_path))
        assert f"engine 0.{kills + 1} has version 3" in world.seen


def test_the_last_engine_s_successor_that_does_not_start_ends_the_run(tmp_path: Path) -> None:
    world = World(trouble=lambda now, engine: (now, engine.name) in (("wake_weights", "0"), ("start", "0.1")))
    with pytest.raises(EngineError, match="no engine is left"):
        run_virtual(whole(world, tmp_path))


async def killed_in_update(world: World, name: str, folder: Path, steps: int = 2) -> None:
    async with world.started(folder):
        training = asyncio.create_task(world.train(steps))
        await world.until("the update begins")
        world.engines[name].kill()
        await asyncio.sleep(UPDATE / 2)
        assert [wait.sentence for wait in world.waits.beside.values()] == [
            f"the successor of engine {name} waits for the learner to release the shared devices"
        ]
        await training
        await asyncio.sleep(10 * START)
        assert len(world.run.pool.serving) == len(world.gpus)


def test_the_successor_of_one_of_two_starts_when_the_others_sample_again(tmp_path: Path) -> None:
    world = World(2)
    run_virtual(killed_in_update(world, "1", tmp_path))
    since = world.seen[world.seen.index("the update begins") :]
    assert since[:5] == [
        "the update begins",
        "the update ends",
        "the actor stays",
        "engine 0 has version 1",
        "the learner rests",
    ]
    # The samples are there before it is. The learner waits for it, and it is given what the others are.
    assert since[5:8] == ["engine 1.1 starts", "the learner wakes", "the update begins"]
    assert since[10:12] == ["engine 0 has version 2", "engine 1.1 has version 2"]


def test_the_successor_of_the_last_starts_while_the_learner_is_off_the_device(tmp_path: Path) -> None:
    world = World()
    run_virtual(killed_in_update(world, "0", tmp_path))
    since = world.seen[world.seen.index("the update begins") :]
    assert since[:9] == [
        "the update begins",
        "the update ends",
        "the actor stays",
        "the learner rests",
        "engine 0.1 starts",
        "the learner wakes",
        "the actor stays",
        "engine 0.1 has version 1",
        "the learner rests",
    ]
    assert world.steps == [(0, GROUPS * N), (1, GROUPS * N)]


@pytest.mark.parametrize("what", ["join_weights", "receive_weights"])
def test_the_only_successor_that_dies_of_its_first_weights_has_one_too(tmp_path: Path, what: str) -> None:
    async def main() -> None:
        async with world.started(tmp_path):
            training = asyncio.create_task(world.train(2))
            await world.until("the learner rests")
            await asyncio.sleep(MOVE)
            world.engines["0"].kill()
            await training
            assert world.run.pool.lost == ["0", "0.1"]
            assert world.steps == [(0, GROUPS * N), (1, GROUPS * N)]

    world = World(trouble=once(what, "0.1"))
    run_virtual(main())


@pytest.mark.parametrize("lost", ["0", "01"])
def test_those_that_are_lost_before_the_first_publication_get_no_weights_in_their_sleep(
    tmp_path: Path, lost: str
) -> None:
    """Pool and learner then agree about the version from the beginning."""

    async def main() -> None:
        async with world.started(tmp_path):
            for name in lost:
                world.engines[name].kill()
            await asyncio.sleep(START / 2)
            await world.train(1)
            assert world.steps == [(0, GROUPS * N)]

    world = World(2)
    run_virtual(main())


@pytest.mark.parametrize("seconds", [0.0, START / 2, START + 0.5, START + 2.0])
def test_a_start_or_first_weights_under_way_are_waited_for(tmp_path: Path, seconds: float) -> None:
    """The learner's turn comes so long after the loss."""

    async def main() -> None:
        async with world.started(tmp_path):
            await world.train(1)
            world.engines["0"].kill()
            await asyncio.sleep(seconds)
            if seconds:
                assert "engine 0.1 starts" in world.seen
            turn = asyncio.create_task(world.turns.to_learner())
            await asyncio.sleep(0)
            wait = world.waits.latest
            if 0 < seconds < START:
                assert wait is not None
                assert wait.sentence == (
                    "trainer waits for the successor of engine 0 to finish, so that the learner can take the shared "
                    "devices"
                )
            await turn
            assert all(gpu.learner and not any(gpu.engines.values()) for gpu in world.gpus)

    world = World(2)
    run_virtual(main())


@pytest.mark.parametrize("waits", ["at the gate", "in its start", "as the last"])
def test_a_run_that_ends_meanwhile_leaves_nobody(tmp_path: Path, waits: str) -> None:
    async def main() -> None:
        async with world.started(tmp_path):
            training = asyncio.create_task(world.train(3))
            await world.until("the update begins")
            if waits == "in its start":
                await world.until("the learner rests")
                await asyncio.sleep(MOVE)
            world.engines["0"].kill()
            await asyncio.sleep(UPDATE + 8.0 if waits == "as the last" else UPDATE / 4)
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
        assert not world.engines
        assert not world.waits.beside
        assert world.waits.latest is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    world = World(1 if waits == "as the last" else 2)
    run_virtual(main())


def test_a_start_that_hangs_does_not_keep_the_learner_for_ever() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        waits = Waits(loop.time)
        turn = EnginesTurn(waits, start_seconds=600)

        async def start() -> None:
            async with turn.starting("3"):
                await asyncio.Event().wait()

        starting = asyncio.create_task(start())
        await asyncio.sleep(100)
        ending = asyncio.create_task(turn.end())
        await asyncio.sleep(50)
        assert waits.latest is not None
        # Whoever starts an engine gives each of two calls so long.
        assert waits.left(waits.latest) == pytest.approx(2 * 600 - 150)
        await ending
        assert loop.time() == pytest.approx(2 * 600)
        with pytest.raises(DeadlineError, match=r"the successor of engine 3 .* 1200 s"):
            await starting

    run_virtual(main())


class Walk:
    """Engines that die at random moments, and now and then one that does not start."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.world = World(1 + seed % 3, sleeps=seed % 5 > 0, trouble=self._trouble)
        self.steps = 4
        self.failed = False
        """Whether a start has failed, which is not tried again."""
        self.unstarted = 0
        """Starts in which a process was killed: one engine's are tried three times."""
        self._left = self.rng.randint(0, 5)
        """Deaths in the middle of something that are still to come: two in a row at most."""
        self._likely = self.rng.choice([0.05, 0.2])
        self._fails = self.rng.choice([0.0, 0.0, 0.1])
        self._in_a_row = 0

    def _trouble(self, what: str, engine: PlayedEngine) -> bool:
        if what == "start":
            wrong = "." in engine.name and self.rng.random() < self._fails
            self.failed = self.failed or wrong
            return wrong
        wrong = self._left > 0 and self._in_a_row < 2 and self.rng.random() < self._likely
        self._left -= wrong
        self._in_a_row = self._in_a_row + 1 if wrong else 0
        return wrong

    async def _kills(self) -> None:
        for _ in range(self.rng.choice([0, 2, 4])):
            await asyncio.sleep(self.rng.expovariate(1 / 60))
            if self.world.engines:
                engine = self.world.engines[self.rng.choice(sorted(self.world.engines))]
                self.unstarted += engine not in self.world.run.pool.engines
                engine.kill()

    async def walk(self, folder: Path) -> str:
        """How it ended."""
        world = self.world
        async with world.started(folder):
            kills = asyncio.create_task(self._kills())
            error = None
            try:
                await world.train(self.steps)
            except EngineError as raised:
                error = raised
            finally:
                kills.cancel()
                await asyncio.gather(kills, return_exceptions=True)
            if error is not None:
                lost = len(world.run.pool.lost)
                assert self.failed or self.unstarted >= 3 or lost - world.lost_before >= 3 or _in_a_row(lost, error)
                return "ended"
            assert world.steps == [(version, GROUPS * N) for version in range(self.steps)]
            return f"lost {min(2, len(world.run.pool.lost))}"


def _in_a_row(lost: int, error: EngineError) -> bool:
    return lost >= 3 and "3 times in a row" in str(error)


@pytest.mark.parametrize("part", range(6))
def test_whenever_engines_die_the_run_goes_on(tmp_path: Path, part: int) -> None:
    """``RLJOB_TURNS=10000`` walks for longer."""
    for seed in range(part, WALKS, 6):
        try:
            run_virtual(Walk(seed).walk(tmp_path))
        except BaseException as error:
            error.add_note(f"walk {seed}")
            raise


@pytest.mark.slow(stands_for="test_whenever_engines_die_the_run_goes_on")
def test_the_walks_are_what_they_are_meant_to_be(tmp_path: Path) -> None:
    ends = [run_virtual(Walk(seed).walk(tmp_path)) for seed in range(40)]
    assert set(ends) == {"ended", "lost 0", "lost 1", "lost 2"}
    assert ends.count("ended") < 8
