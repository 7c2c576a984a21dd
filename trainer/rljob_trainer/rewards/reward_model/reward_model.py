"""A term of the reward that a model with a head computes, on replicas beside the driver or on the job's pool."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.fixed import fixed_model
from rljob_trainer.rewards.reward_model.process import ScorerProcess
from rljob_trainer.rewards.reward_model.replica import ScorerReplica
from rljob_trainer.rewards.reward_model.scorers import ReplicaSupply, Scorers
from rljob_trainer.rewards.reward_model.served import ServedModel
from rljob_trainer.rewards.rules import RewardVerdict
from rljob_trainer.rewards.terms import RewardFailure
from rljob_trainer.telemetry import run_folder
from rljob_trainer.telemetry.names import metric
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from rljob_api.spec.reward_model import RewardModelSpec
    from rljob_trainer.rewards.reward_model.scorer import Row
    from rljob_trainer.rewards.terms import Response, TermSpec

log = logging.getLogger(__name__)

_REMEDY = "give the driver more memory, or lower rewardModel.batchTokens"


class RewardModel:
    """Scores for one term of the reward; open from ``open`` to ``close``."""

    def __init__(
        self,
        spec: TermSpec,
        model: RewardModelSpec,
        base: Path,
        output: Path | None,
        *,
        pool: Scorers | None = None,
        waits: Waits | None = None,
    ) -> None:
        """``base`` is where a relative path starts; ``output`` the run's folder, which says what the
        run began with (None: nothing does). ``pool``: who computes it; None: processes beside the driver."""
        self.spec = spec
        self._model = model
        self._base = base
        self._record = None if output is None else output / run_folder.REWARD_MODELS
        self._own = None if pool is not None else _beside_driver(spec, model, waits)
        self._scorers = pool or self._own
        self.version = ""
        """A digest of its files (``version.py``), once it is open."""

    async def open(self) -> None:
        """Raises ``JobFileError`` for what is no reward model, or another one than the run began with, and
        ``RewardWorkerError`` when nobody comes up to compute it."""
        assert self._scorers is not None
        field = f"{self.spec.place}.rewardModel.source"
        files = await asyncio.to_thread(fixed_model, field, self._model.source, self._model.revision, self._base)
        self.version = files.version
        log.info("reward %s: version %s of %s", self.spec.name, self.version, self._model.source)
        known = {} if self._record is None else await asyncio.to_thread(self._known_versions, self._record)
        await self._scorers.serve(ServedModel(self.spec.name, self._model, files))
        if self._record is not None:
            # Only now: what is no reward model is nothing that a run began with.
            await asyncio.to_thread(run_folder.write_whole, self._record, json.dumps(known, indent=1) + "\n")

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()

    async def score(self, response: Response) -> RewardVerdict | RewardFailure:
        """The model's score, or why there is none. Raises ``RewardWorkerError`` when nobody can compute it."""
        assert self._scorers is not None
        said = await self._scorers.score(self.spec.name, row_of(response))
        if isinstance(said, RewardFailure):
            return said
        return RewardFailure(self.spec.name, said) if isinstance(said, str) else RewardVerdict(said)

    def take_counts(self) -> dict[str, float]:
        """Metrics, since the last call."""
        assert self._scorers is not None
        part, counts = self.spec.name, self._scorers.take_counts(self.spec.name)
        told = {
            metric("reward_model/<part>/rows", part=part): float(counts.rows),
            metric("reward_model/<part>/tokens", part=part): float(counts.tokens),
            metric("reward_model/<part>/seconds", part=part): counts.seconds,
            metric("reward_model/<part>/queue/max", part=part): float(counts.most),
            metric("reward_model/<part>/losses", part=part): float(counts.losses),
        }
        if counts.taken:
            told[metric("reward_model/<part>/wait_seconds/mean", part=part)] = counts.waited / counts.taken
            told[metric("reward_model/<part>/wait_seconds/max", part=part)] = counts.longest
        return told

    def _known_versions(self, record: Path) -> dict[str, str]:
        """What the run's record says, with this model: a run that goes on is rewarded by the one that it began with."""
        known: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
        before = known.setdefault(self.spec.name, self.version)
        if before != self.version:
            raise JobFileError(
                f"{self.spec.place}.rewardModel.source: the model (version {self.version}) differs from the one that "
                f"the run started with ({before}, {record}); restore that model, or use another output folder"
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


def _beside_driver(spec: TermSpec, model: RewardModelSpec, waits: Waits | None) -> Scorers:
    """Processes for one model alone."""

    async def start(name: str) -> ScorerReplica:
        return await ScorerProcess.start()

    return Scorers(model.workers, ReplicaSupply(start, f"reward {spec.name}", _REMEDY), waits)
