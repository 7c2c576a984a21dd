"""A torch engine inside a learner rank's process, sampling from the rank's own weights without a copy.

The functions of this module run in that process (``LearnerGroup.run``). The rank and the engine take turns: the engine
has no request while the learner updates, so an optimizer step never happens under a sample.
"""

from __future__ import annotations

from typing import Any

from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.torch_engine import TorchEngine

_NAME = "engine"


def start_engine(rank: LearnerRank, *, max_concurrent: int, max_context: int, version: int) -> None:
    """Builds the engine beside the models."""
    rank.attachments[_NAME] = EngineLoop(
        lambda: TorchEngine.from_model(
            rank.actor_model, version=version, max_concurrent=max_concurrent, max_context=max_context
        ),
        f"{rank.rank} (colocated)",
    )


def call_engine(rank: LearnerRank, method: str, *args: Any) -> Any:
    """A method of ``EngineLoop`` by its name."""
    return getattr(rank.attachments[_NAME], method)(*args)


def serve_version(rank: LearnerRank, version: int) -> None:
    """What a publication is between a model and itself: the weights are there, the version is new."""
    engine: EngineLoop = rank.attachments[_NAME]
    engine.update(lambda _: None, version)
