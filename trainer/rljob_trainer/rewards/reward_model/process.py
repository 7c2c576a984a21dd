"""A reward model in a process beside the driver, with one thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import JobFileError, RewardWorkerError
from rljob_trainer.rewards.frames import GarbledError, Ready, Unframing, frame
from rljob_trainer.rewards.reward_model.replica import BatchProblem, ScoredBatch, ScorerLostError

if TYPE_CHECKING:
    from rljob_trainer.rewards.reward_model.scorer import Row
    from rljob_trainer.rewards.reward_model.served import ServedModel

_READ_BYTES = 1 << 16


class ScorerProcess:
    """One process, for one model (``worker.py`` is what runs in it)."""

    pod = None

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._unframing = Unframing()
        self._loaded = False

    @classmethod
    async def start(cls) -> ScorerProcess:
        """Raises ``RewardWorkerError`` when it cannot be started."""
        try:
            return cls(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "rljob_trainer.rewards.reward_model.worker"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    # Ray says so on a cluster anyway; more processes are how more cores are used.
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            )
        except OSError as problem:
            raise RewardWorkerError(f"cannot start the process of a reward model: {problem}") from problem

    async def scores(self, model: ServedModel, rows: Sequence[Row]) -> ScoredBatch:
        if not self._loaded:
            ready = await self._asked(model)
            assert isinstance(ready, Ready)
            if ready.problem is not None:
                raise JobFileError(ready.problem)
            self._loaded = True
        if not rows:
            return ScoredBatch((), 0, 0.0)
        answer: ScoredBatch | BatchProblem = await self._asked(list(rows))
        if isinstance(answer, BatchProblem):
            raise RewardWorkerError(answer.problem)
        return answer

    async def ended(self) -> str:
        return f"it exited with code {await self._process.wait()}"

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _asked(self, message: Any) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(frame(message))
            await process.stdin.drain()
            while data := await process.stdout.read(_READ_BYTES):
                for answer in self._unframing.messages(data):
                    return answer
        except (ConnectionError, GarbledError) as error:
            raise ScorerLostError(f"{type(error).__name__}") from error
        raise ScorerLostError(await self.ended())
