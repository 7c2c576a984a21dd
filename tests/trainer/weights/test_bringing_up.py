"""An engine that joins waits for a moment in which the learner can send, and not for ever; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.publish.publication import WeightPublication
from rljob_trainer.rollout.actor import EnginePlace
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.simulation.clock import run_virtual
from rljob_trainer.stores import serve_store
from rljob_trainer.waits import Waits
from rljob_trainer.weights.learner_side import Failure
from rljob_trainer.weights.manifest import Version
from rljob_trainer.weights.receiver import ReceiveReport
from rljob_trainer.weights.sender import SendReport


def sent(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ranks answer that have nothing to send."""
    return [SendReport(Version(args[0], "ab"), 0, 1.0, 0.0, 0) if function.__name__ == "publish" else None]


class Ranks:
    """A learner that takes a hundred seconds for whatever it is asked."""

    async def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        await asyncio.sleep(100)
        return ["127.0.0.1:1"] if function.__name__ == "open_publisher" else sent(function, *args)


class Engine:
    """One that answers whatever it is asked."""

    name = "3"
    place: EnginePlace | None = None

    def within(self, seconds: float, method: Any, *args: Any) -> Coroutine[Any, Any, Any]:
        received = (
            ReceiveReport(Version(args[0], "ab"), 0, 0.0, 0.0, 0) if method is EngineLoop.receive_weights else None
        )
        return self._answer(1 if method is EngineLoop.weight_ranks else received)

    async def _answer(self, answer: Any) -> Any:
        return answer

    def kill(self) -> None:
        return


def test_an_engine_that_the_learner_is_never_free_for_ends_in_an_error_that_names_it() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        waits, pool, engine = Waits(loop.time), RolloutPool(), Engine()
        pool.add(engine)
        publication = WeightPublication(Ranks(), pool, bucket_bytes=1, seconds=300, holds=tuple, waits=waits)
        coming = asyncio.create_task(publication.bring_up(engine))
        await asyncio.sleep(100)
        wait = waits.beside["engine 3"]
        assert wait.sentence == "engine 3 waits for weights: the learner is busy with an update or a publication"
        assert waits.left(wait) == pytest.approx(200)
        with pytest.raises(DeadlineError, match=r"engine 3 got no weights within 300 s.*deadlines\.progressSeconds"):
            await coming
        assert loop.time() == pytest.approx(300, abs=1)
        await pool.close()

    run_virtual(main())


def test_each_part_of_a_publication_is_a_wait_of_whoever_it_is_for() -> None:
    async def main() -> None:
        waits, pool, engine = Waits(asyncio.get_running_loop().time), RolloutPool(), Engine()
        pool.add(engine)
        publication = WeightPublication(Ranks(), pool, bucket_bytes=1, seconds=300, waits=waits)
        coming = asyncio.create_task(publication.bring_up(engine))
        await asyncio.sleep(50)
        assert waits.beside["engine 3"].sentence == "engine 3 waits for engine 3 and the learner to connect"
        await asyncio.sleep(200)
        wait = waits.beside["engine 3"]
        assert wait.sentence == "engine 3 waits for engine 3 to load version 0 from the learner"
        assert waits.left(wait) == pytest.approx(260)
        assert waits.latest is None
        publishing = asyncio.create_task(publication.publish(1))
        await asyncio.sleep(10)
        assert waits.latest is not None
        assert waits.latest.sentence == "trainer waits for its turn, while engine 3 gets its first weights"
        await asyncio.sleep(60)
        assert waits.latest.sentence == "trainer waits for engine 3 to load version 1 from the learner"
        await asyncio.gather(coming, publishing)
        assert waits.latest is None
        await pool.close()

    run_virtual(main())


class Dying(Engine):
    """One that is lost when it is to meet the learner."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def _answer(self, answer: Any) -> Any:
        raise EngineError(f"engine {self.name} is gone")


@pytest.mark.parametrize("sound_from", [1, None])
def test_a_publication_waits_for_successors_of_the_last_engine_but_not_for_ever(sound_from: int | None) -> None:
    started: list[str] = []

    async def replace(name: str) -> Engine:
        await asyncio.sleep(20)
        started.append(name)
        return Engine() if len(started) == sound_from else Dying(f"3.{len(started)}")

    async def main() -> None:
        waits = Waits(asyncio.get_running_loop().time)
        pool = RolloutPool(replace=replace)
        pool.add(Dying("3"))
        publication = WeightPublication(Ranks(), pool, bucket_bytes=1, seconds=300, waits=waits)
        pool.bring_up_by(publication.bring_up)
        publishing = asyncio.create_task(publication.publish(1))
        await asyncio.sleep(110)
        assert waits.latest is not None
        assert waits.latest.sentence == "trainer waits for an engine to take version 1: all engines are lost"
        if sound_from is None:
            with pytest.raises(EngineError, match="no engine is left to take version 1"):
                await publishing
            assert len(started) == 2
        else:
            await publishing
            assert (pool.version, [engine.name for engine in pool.serving]) == (1, ["3"])
        await pool.close()

    run_virtual(main())


class WithoutIpc(Ranks):
    """Ranks on a machine that lets no process reach another's device memory."""

    def __init__(self) -> None:
        self.backends: list[str] = []
        self.store, self.address = serve_store("127.0.0.1")

    async def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if function.__name__ == "connect":
            self.backends.append(args[0].backend)
            if args[0].backend == "ipc":
                return [Failure("invalid device context")]
        return [self.address] if function.__name__ == "open_publisher" else sent(function, *args)


async def test_where_devices_cannot_be_shared_weights_go_by_broadcast_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, ranks = RolloutPool(), WithoutIpc()
    pool.add(Engine())
    publication = WeightPublication(ranks, pool, bucket_bytes=1, beside=lambda name, workers: range(workers))
    await publication.publish(1)
    await publication.publish(2)
    assert ranks.backends == ["ipc", "gloo"]
    await pool.close()
    (said,) = [record.getMessage() for record in caplog.records if "handed over" in record.getMessage()]
    assert "invalid device context" in said
    assert "they are sent by gloo through host memory" in said
