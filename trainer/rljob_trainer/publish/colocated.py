"""A torch engine inside a learner rank's process: on one rank it samples from the rank's own weights without a copy.

The functions of this module run in that process (``RankedLearner.run``). The rank and the engine take turns: the engine
has no request while the learner updates, so an optimizer step never happens under a sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rljob_trainer.learner.cpu.side_by_side import take_share
from rljob_trainer.learner.protocol import RankedLearner
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.publish.delivery import check_unchanged, one_of
from rljob_trainer.rollout.actor import EngineSpec, build_engine
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.rollout.protocol import Engine
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.waits import Waits
from rljob_trainer.weights.manifest import Addition, Manifest, Version, manifest_of

if TYPE_CHECKING:
    from rljob_trainer.learner.backend import BackendRank


def start_engine(rank: BackendRank, spec: EngineSpec) -> None:
    """Builds the engine beside the models. A rank that has only a part of the actor gives it weights of its own."""
    threads = torch.get_num_threads()

    def build() -> Engine:
        # On the engine's thread. Rank and engine take turns, but the rank's threads are still there while it waits.
        take_share(threads)
        if rank.live_model is None:
            return build_engine(spec)
        return TorchEngine.from_model(
            rank.live_model,
            version=spec.version,
            max_concurrent=spec.max_concurrent,
            max_context=spec.max_context,
        )

    rank.attachments.put(EngineLoop(build, f"{rank.rank} (colocated)"))
    # The number is a thread's own once it has one, but the last one set is what new threads begin with.
    torch.set_num_threads(threads)


def call_engine(rank: BackendRank, method: str, *args: Any, **kwargs: Any) -> Any:
    """What a method of ``EngineLoop`` returns, which ``RayEngine`` sends by its name."""
    return getattr(rank.attachments.get(EngineLoop), method)(*args, **kwargs)


def take_weights(rank: BackendRank, version: int, is_new: bool) -> Version:
    """Gives the engine beside a rank the rank's weights, and the manifest of what it was given. Shared weights are
    there already: only the version is new, and its manifest is that of the weights themselves. ``is_new``: the rank's
    present weights become ``version``.

    Raises ``LearnerError`` when the rank has no weights of that version.
    """
    if is_new:
        rank.call_present(version)
    loop = rank.attachments.get(EngineLoop)

    def take(engine: Engine) -> Manifest:
        # On the engine's thread, while this one waits: all ranks gather together.
        if rank.live_model is not None:
            return manifest_of(rank.named_parameters_for_publish())
        addition = Addition()
        for item in rank.named_parameters_for_publish():
            addition.add([item])
            engine.load([item])
        return addition.manifest()

    with rank.holding(version):
        return loop.update(take, version).version(version)


class ColocatedPublication:
    """A ``Publication`` between each rank and the engine beside it."""

    def __init__(self, learner: RankedLearner, pool: RolloutPool, waits: Waits) -> None:
        self._learner, self._pool, self._waits = learner, pool, waits

    async def publish(self, version: int) -> dict[str, float]:
        names = [engine.name for engine in self._pool.engines]
        delivered = await self._take_over(version, is_new=True)
        self._pool.delivered(names, delivered)
        self._pool.present(delivered)
        self._pool.activate(names)
        return {}

    async def resend(self, engine: EngineHandle) -> None:
        """Gives one engine the pool's version once more; and the others, for ranks gather their weights together."""
        delivered = await self._take_over(self._pool.version, is_new=False)
        check_unchanged(delivered, self._pool.published)
        self._pool.delivered([engine.name for engine in self._pool.engines], delivered)

    async def _take_over(self, version: int, *, is_new: bool) -> Version:
        reason = f"the colocated engines to take over version {version}"
        with self._waits.wait("trainer", reason, self._learner.call_seconds):
            given = await self._learner.run(take_weights, version, is_new)
        return one_of(given)
