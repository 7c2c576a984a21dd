"""Who starts beside whom: the learner and the engines are played, whoever starts them is the real thing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny_job import copy_job

from rljob_api import load_jobs, resolve
from rljob_trainer.driver import engines as engines_of_run
from rljob_trainer.driver import starting
from rljob_trainer.driver.together import together
from rljob_trainer.errors import EngineError
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.waits import Waits

SECONDS = 30.0
"""More than anything here takes that does not hang."""


class Played:
    """A learner of one rank and engines, and what became of them, in order."""

    bundles = None

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.call_seconds = SECONDS
        self.ranks, self.has_live_model = 1, True
        self.held = asyncio.Event()
        """Until it is set, no learner is ready."""

    async def start_learner(self, *_: Any) -> Played:
        self.seen.append("learner begins")
        try:
            await asyncio.wait_for(self.held.wait(), SECONDS)
        except asyncio.CancelledError:
            self.seen.append("learner undone")
            raise
        self.seen.append("learner is there")
        return self

    async def start_engine(self, name: str, *_: Any, **__: Any) -> Any:
        self.seen.append(f"engine {name} is there")
        if name == "1":
            # The learner's start goes on only when all engines are there.
            self.held.set()
        return Engine(name, self.seen)

    async def close(self) -> None:
        self.seen.append("learner closed")


class Engine:
    place = None

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name = name
        self.seen = seen

    async def within(self, _: float, method: Any, *args: Any) -> None:
        self.seen.append(f"engine {self.name}: {method.__name__}")

    def kill(self) -> None:
        self.seen.append(f"engine {self.name} killed")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    parts = Played()
    monkeypatch.setattr(starting.starting, "start_learner", parts.start_learner)
    monkeypatch.setattr(engines_of_run.RayEngine, "start", parts.start_engine)
    publication = SimpleNamespace(between=None, resend=None, bring_up=None, admit_by=None)
    monkeypatch.setattr(engines_of_run, "WeightPublication", lambda *_, **__: publication)
    return parts


async def start(folder: Path, stack: AsyncExitStack, **spec: Any) -> list[str]:
    """Returns what was reported."""
    spec["rollout"] = {"engine": "torch", "maxResponseTokens": 3} | spec.get("rollout", {})
    [job] = load_jobs(yaml.safe_dump(copy_job(**spec)))
    model: Any = SimpleNamespace(path=folder, address=None, context_length=64)
    told: list[str] = []
    await starting.start_learner_and_engines(
        resolve(job),
        model,
        base=folder,
        holds=tuple,
        shelf=Shelf(folder),
        waits=Waits(),
        stack=stack,
        by_role=False,
        report=told.append,
    )
    return told


async def test_what_has_devices_of_its_own_starts_at_once(played: Played, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        (told,) = await start(tmp_path, stack, placement="separate", rollout={"replicas": 2})
        assert played.seen == ["learner begins", "engine 0 is there", "engine 1 is there", "learner is there"]
        assert told.startswith("the learner was ready after ")
        played.seen.clear()
    # The engines first: what they serve is the learner's.
    assert (
        played.seen.index("engine 0: close")
        < played.seen.index("engine 1: close")
        < played.seen.index("learner closed")
    )
    assert {"engine 0 killed", "engine 1 killed"} < set(played.seen)


async def test_one_engine_is_waited_for_in_the_singular(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    wait = Waits.wait

    def noted(self: Waits, who: str, reason: str, *args: Any) -> Any:
        waited.append(reason)
        return wait(self, who, reason, *args)

    monkeypatch.setattr(Waits, "wait", noted)
    played.held.set()
    async with AsyncExitStack() as stack:
        await start(tmp_path, stack, placement="separate", rollout={"replicas": 1})
        await start(tmp_path, stack, placement="separate", rollout={"replicas": 2})
    assert {reason for reason in waited if "to start" in reason} == {
        "1 engine to start",
        "1 learner rank to start",
        "2 engines to start",
    }


async def test_colocated_engines_come_after_the_learner(played: Played, tmp_path: Path) -> None:
    played.held.set()
    async with AsyncExitStack() as stack:
        await start(tmp_path, stack, placement="colocated", rollout={"engine": "vllm"})
        assert played.seen == ["learner begins", "learner is there", "engine 0 is there"]


async def test_an_engine_that_fails_ends_the_learner_s_start(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(name: str, *_: Any, **__: Any) -> None:
        await asyncio.sleep(0)
        raise EngineError(f"engine {name} does not fit")

    monkeypatch.setattr(engines_of_run.RayEngine, "start", fail)
    async with AsyncExitStack() as stack:
        with pytest.raises(EngineError, match="engine 0 does not fit"):
            await start(tmp_path, stack, placement="separate", rollout={"replicas": 1})
    assert played.seen == ["learner begins", "learner undone"]


async def test_engines_that_are_there_end_with_a_learner_that_is_not(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        await asyncio.wait_for(played.held.wait(), SECONDS)
        # The engines' start has ended by then.
        await asyncio.sleep(0.05)
        raise RuntimeError("no room for the learner")

    monkeypatch.setattr(starting.starting, "start_learner", fail)
    async with AsyncExitStack() as stack:
        with pytest.raises(RuntimeError, match="no room for the learner"):
            await start(tmp_path, stack, placement="separate", rollout={"replicas": 2})
    assert sorted(played.seen[2:]) == ["engine 0 killed", "engine 1 killed"]


async def test_who_is_cancelled_meanwhile_has_undone_what_it_began_before_the_failure_is_told() -> None:
    undone: list[int] = []

    async def begin(number: int) -> int:
        try:
            await asyncio.sleep(SECONDS)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            undone.append(number)
            raise
        return number

    async def fail() -> int:
        raise EngineError("first")

    with pytest.raises(EngineError, match="first"):
        await together(begin(1), fail(), begin(2))
    assert sorted(undone) == [1, 2]
    task = asyncio.create_task(together(begin(3), begin(4)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(undone) == [1, 2, 3, 4]


async def test_results_come_in_the_order_of_the_starts() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await together(after(3), after(0), after(1)) == [3, 0, 1]


def test_the_driver_needs_no_model_library() -> None:
    """Its imports are part of every start and every retry; ranks and engines import that for themselves."""
    program = (
        "import sys, rljob_trainer.driver.run; "
        "print({'transformers', 'torch._dynamo', 'torch.distributed.tensor', 'vllm'} & set(sys.modules) or 'none')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"
