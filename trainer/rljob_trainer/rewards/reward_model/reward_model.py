"""The driver's side of a reward model: rows wait for a free process, which takes as many as there are.

A process that is lost (out of memory, say) is started again, and its rows are asked again; after three losses they have
no score, and neither row nor model need be at fault (``RewardFailure.lost``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import JobFileError, RewardWorkerError
from rljob_trainer.models.materialise import fetch
from rljob_trainer.rewards.frames import GarbledError, Ready, Unframing, frame
from rljob_trainer.rewards.reward_model.version import version_of
from rljob_trainer.rewards.rules import RewardVerdict
from rljob_trainer.rewards.terms import RewardFailure
from rljob_trainer.telemetry import run_folder
from rljob_trainer.telemetry.names import metric

if TYPE_CHECKING:
    from rljob_api.spec.reward_model import RewardModelSpec
    from rljob_trainer.rewards.reward_model.scorer import Row, ScorerSettings
    from rljob_trainer.rewards.terms import Response, TermSpec

log = logging.getLogger(__name__)

_TRIES = 3
_MOST_ROWS = 512
"""In one message: what a process is at when others come is waited for."""
_READ_BYTES = 1 << 16


class _LostError(Exception):
    """The process is no more."""


@dataclass(slots=True)
class _Waiting:
    row: Row
    done: asyncio.Future[float | str | RewardFailure]
    losses: int = 0

    def lost(self) -> int:
        """Counts a process that was lost with it."""
        self.losses += 1
        return self.losses


class _Process:
    """One process, started on demand."""

    def __init__(self, settings: ScorerSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._unframing = Unframing()

    async def start(self) -> None:
        """Raises ``JobFileError`` for what is no reward model, ``RewardWorkerError`` when it is lost at once."""
        self._unframing = Unframing()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "rljob_trainer.rewards.reward_model.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Ray says so on a cluster anyway; more processes are how more cores are used.
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            ready = await self._asked(self._settings)
        except (OSError, _LostError) as problem:
            await self.kill()
            raise RewardWorkerError(
                f"{self._settings.field}: the process of the reward model does not start: {problem}; see the output "
                "above, give it more memory if that may have run out, and try again"
            ) from problem
        assert isinstance(ready, Ready)
        if ready.problem is not None:
            await self.kill()
            raise JobFileError(ready.problem)

    async def scores(self, rows: Sequence[Row]) -> tuple[list[float | str], int, float]:
        """Scores or problems, tokens, seconds. Raises ``_LostError``, and what ``start`` raises."""
        if self._process is None or self._process.returncode is not None:
            await self.start()
        answer: tuple[list[float | str], int, float] = await self._asked(list(rows))
        return answer

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _asked(self, message: Any) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(frame(message))
            await process.stdin.drain()
            while data := await process.stdout.read(_READ_BYTES):
                for answer in self._unframing.messages(data):
                    return answer
        except (ConnectionError, GarbledError) as error:
            raise _LostError(f"{type(error).__name__}") from error
        raise _LostError(f"it ended with exit code {await process.wait()}")


class RewardModel:
    """Scores for one term of the reward; open from ``open`` to ``close``."""

    def __init__(self, spec: TermSpec, model: RewardModelSpec, base: Path, output: Path | None) -> None:
        """``base`` is where a relative path starts; ``output`` the run's folder, which says what the
        run began with (None: nothing does)."""
        self.spec = spec
        self._model = model
        self._base = base
        self._record = None if output is None else output / run_folder.REWARD_MODELS
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._processes: list[_Process] = []
        self._serving: list[asyncio.Task[None]] = []
        self._rows = self._tokens = 0
        self._seconds = 0.0
        self.version = ""
        """A digest of its files (``version.py``), once it is open."""

    async def open(self) -> None:
        """Raises ``JobFileError`` for what is no reward model, or another one than the run began with."""
        from rljob_trainer.rewards.reward_model.scorer import ScorerSettings

        field = f"{self.spec.place}.rewardModel.source"
        folder = await asyncio.to_thread(
            fetch, self._model.source, field, base=self._base, revision=self._model.revision
        )
        self.version = await asyncio.to_thread(version_of, folder)
        log.info("reward %s: version %s of the reward model in %s", self.spec.name, self.version, folder)
        settings = ScorerSettings(
            folder,
            field,
            self._model.dtype,
            self._model.batch_tokens,
            self._model.max_length,
            self._model.trust_remote_code,
        )
        known = {} if self._record is None else await asyncio.to_thread(self._known_versions, self._record)
        self._processes = [_Process(settings) for _ in range(self._model.workers)]
        await asyncio.gather(*(process.start() for process in self._processes))
        if self._record is not None:
            # Only now: what is no reward model is nothing that a run began with.
            await asyncio.to_thread(run_folder.write_whole, self._record, json.dumps(known, indent=1) + "\n")
        self._serving = [asyncio.create_task(self._serve(p), name="reward model") for p in self._processes]

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._processes))
        while self._waiting:
            self._waiting.popleft().done.cancel()

    async def score(self, response: Response) -> RewardVerdict | RewardFailure:
        """The model's score, or why there is none. Raises ``RewardWorkerError`` when no process can be started."""
        waiting = _Waiting(row_of(response), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        said = await waiting.done
        if isinstance(said, RewardFailure):
            return said
        return RewardFailure(self.spec.name, said) if isinstance(said, str) else RewardVerdict(said)

    def take_counts(self) -> dict[str, float]:
        """Metrics, since the last call."""
        part = self.spec.name
        told = {
            metric("reward_model/<part>/rows", part=part): float(self._rows),
            metric("reward_model/<part>/tokens", part=part): float(self._tokens),
            metric("reward_model/<part>/seconds", part=part): self._seconds,
        }
        self._rows = self._tokens = 0
        self._seconds = 0.0
        return told

    async def _serve(self, process: _Process) -> None:
        while True:
            await self._arrived.wait()
            batch = self._take()
            if not batch:
                self._arrived.clear()
                continue
            try:
                scores, tokens, seconds = await process.scores([waiting.row for waiting in batch])
            except _LostError as lost:
                log.warning("reward %s: the process of the reward model was lost: %s", self.spec.name, lost)
                await process.kill()
                self._ask_again(batch, str(lost))
                continue
            except (JobFileError, RewardWorkerError) as error:
                for waiting in batch:
                    if not waiting.done.done():
                        waiting.done.set_exception(error)
                continue
            self._rows += len(batch)
            self._tokens += tokens
            self._seconds += seconds
            for waiting, score in zip(batch, scores, strict=True):
                if not waiting.done.done():
                    waiting.done.set_result(score)

    def _take(self) -> list[_Waiting]:
        """A fair share of what waits, and of that what somebody still wants."""
        share = min(_MOST_ROWS, math.ceil(len(self._waiting) / len(self._processes)))
        taken: list[_Waiting] = []
        while self._waiting and len(taken) < share:
            waiting = self._waiting.popleft()
            if not waiting.done.done():
                taken.append(waiting)
        return taken

    def _ask_again(self, batch: Sequence[_Waiting], problem: str) -> None:
        for waiting in reversed(batch):
            if waiting.lost() < _TRIES:
                self._waiting.appendleft(waiting)
            elif not waiting.done.done():
                waiting.done.set_result(
                    RewardFailure(
                        self.spec.name,
                        f"the process of the reward model was lost {_TRIES} times: {problem}; give the driver more "
                        "memory, or lower rewardModel.batchTokens",
                        ended=True,
                        lost=True,
                    )
                )
        self._arrived.set()

    def _known_versions(self, record: Path) -> dict[str, str]:
        """What the run's record says, with this model: a run that goes on is rewarded by the one that it began with."""
        known: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
        before = known.setdefault(self.spec.name, self.version)
        if before != self.version:
            raise JobFileError(
                f"{self.spec.place}.rewardModel.source: the model is another one (version {self.version}) than the run "
                f"began with ({before}, {record}); put that back, or give this job another output folder"
            )
        return known


def row_of(response: Response) -> Row:
    """The chat that is scored: that of an episode of many turns, else prompt and response."""
    if response.conversation:
        return [_message(message) for message in response.conversation]
    asked = response.messages or [{"role": "user", "content": response.prompt}]
    return [*map(_message, asked), {"role": "assistant", "content": response.response}]


def _message(message: Any) -> dict[str, str]:
    return {"role": str(message.get("role", "user")), "content": str(message.get("content") or "")}
