"""The actor's weights at the beginning of a version: what pi_old is computed with where a version has several pulls.

After the first pull the actor has moved. Scored with what it is then, each pull would be anchored to itself: the ratio
to pi_old would begin at 1 each time, and nothing would hold the version as a whole near the policy that was published
(decoupled PPO, arXiv 2505.24298). So a copy of the weights waits in host memory, pinned where it comes from a GPU, and
changes places with them for that score.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.moves import Resting


class Anchor:
    """A rank's copy of its part of a module's trained parameters."""

    def __init__(self, module: nn.Module, layout: Layout, resting: Resting | None = None) -> None:
        self._module, self._layout = module, layout
        self._resting = resting or Resting()
        self._kept: list[torch.Tensor] | None = None
        self.version: int | None = None
        """The policy version that the kept weights are; None: none, or nobody has said which."""

    @torch.no_grad()
    def keep(self, version: int | None) -> None:
        """The present weights, which are those of ``version``, are what ``in_place`` brings back from now on."""
        self.version = version
        self._kept = self._resting.rest("anchor", self._shards())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the module has the weights that were kept. Raises ``ValueError`` when there are none."""
        if self._kept is None:
            raise ValueError("a score with the version's first weights was asked for, but the update kept none")
        self._exchange(self._kept)
        try:
            yield
        finally:
            self._exchange(self._kept)

    @torch.no_grad()
    def _exchange(self, kept: list[torch.Tensor]) -> None:
        """A tensor at a time, so that no second copy of all is anywhere. A GPU's copies are made in their order."""
        shards = self._shards()
        for shard, other in zip(shards, kept, strict=True):
            present = shard.clone()
            shard.copy_(other, non_blocking=True)
            other.copy_(present, non_blocking=True)
        if any(shard.is_cuda for shard in shards):
            torch.cuda.synchronize()

    def _shards(self) -> list[torch.Tensor]:
        """Sharing memory with the module; anew each time, since it may have been moved."""
        self._layout.release(self._module)
        trained = (parameter for parameter in self._module.parameters() if parameter.requires_grad)
        return [self._layout.local(parameter.detach()) for parameter in trained]
