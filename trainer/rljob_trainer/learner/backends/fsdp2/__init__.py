"""The backend ``fsdp2``: PyTorch's fully sharded data parallelism.

Every rank trains on sequences of its own. With ``trainer.parallelism.context`` as many ranks as it says train on the
same ones, each on a part of their tokens (``learner/context.py``), and with ``trainer.parallelism.tensor`` as many
neighbours, each with a part of every matrix (``learner/tensor.py``).

build.py      models, meshes and layout of one rank
mesh.py       the ranks as a mesh, modules cut up layer by layer
tensor.py     which matrices are divided among tensor ranks, and how modules compute with parts
layout.py     a rank's part of a tensor, and back
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rljob_trainer.learner.backend import Placement, RowRules
from rljob_trainer.learner.cpu.lanes import halved_from

if TYPE_CHECKING:
    from rljob_trainer.learner.rank import LearnerRank
    from rljob_trainer.learner.settings import LearnerSettings


class Fsdp2:
    """A ``Backend``."""

    def placement(self, settings: LearnerSettings) -> tuple[Placement, ...]:
        each = settings.context * settings.tensor
        return tuple(Placement(rank // each, returns_outputs=not rank % each) for rank in range(settings.ranks))

    def rules(self, settings: LearnerSettings) -> RowRules:
        return RowRules(
            settings.micro_batch_tokens,
            settings.share_prefixes,
            length_multiple=settings.context,
            halved_from=halved_from(settings),
        )

    def has_live_model(self, settings: LearnerSettings) -> bool:
        return settings.ranks == 1 and settings.lora is None

    def start(
        self, settings: LearnerSettings, rank: int = 0, address: str = "", timeout_seconds: float = 1800.0
    ) -> LearnerRank:
        """One rank. ``address`` is not needed where one plain rank is all there is."""
        # Only here: the driver, which imports this module too, needs no model library.
        from rljob_trainer.learner.backends.fsdp2.build import build_rank

        placement, rules = self.placement(settings)[rank], self.rules(settings)
        return build_rank(settings, rank, address, timeout_seconds, placement, rules)
