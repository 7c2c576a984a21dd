"""What a rank's models are made of changes in updates and nowhere else; this looks whether that is so.

After each update a digest of every parameter and of the optimizer's state is kept, and compared before the next one.
A reference, or the model beside which an adapter is trained, has the digest of its first day. What an update was to
move and left as it was is told of as well.
A look reads parameters and moments once, an update takes two looks: all in all about what an optimizer step reads and
writes. Only the models of an update are looked at, which are on the device then; a reference that rests in host memory
at that time is looked at in one update of ``_RARELY``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rljob_trainer.errors import LearnerError
from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.trained import Trained
from rljob_trainer.weights.manifest import manifest_of

_NAMED = 3
_RARELY = 32
_SMALLEST = 1e-6
"""A learning rate below this share of a parameter may be lost in its rounding."""
_REMEDY = (
    "only an update may change this memory. Start again: the run continues from its last checkpoint; if it happens "
    "again, check that machine's memory and what else writes to that process"
)


class Untouched:
    """The memory of one rank. ``reference`` None: there is none."""

    def __init__(self, rank: int, trained: Sequence[Trained], reference: nn.Module | None, layout: Layout) -> None:
        self._rank, self._trained, self._reference = rank, tuple(trained), reference
        self._layout = layout
        self._of_frozen = self._look_at_reference() | self._look_at_bases()
        self._kept: dict[str, int] = {}
        self._still: set[str] = set()
        """Parameters that the last update of their model left as they were."""
        self._told: set[str] = set()
        self._updates = 0

    @torch.no_grad()
    def check(self, work: Sequence[Trained]) -> None:
        """Before an update of ``work``. Raises ``LearnerError`` naming what has changed since the last one."""
        found = self._look(work)
        rests = self._reference is not None and next(self._reference.parameters()).device != self._device(work)
        seen = {} if rests and self._updates % _RARELY else self._look_at_reference()
        self._updates += 1
        moved = [name for name, digest in seen.items() if self._of_frozen[name] != digest]
        if moved:
            raise LearnerError(
                f"learner rank {self._rank}: the reference has changed: {_listed(moved)}. KL to it is meaningless; "
                + _REMEDY
            )
        moved = [name for name, digest in self._look_at_bases().items() if self._of_frozen[name] != digest]
        if moved:
            raise LearnerError(
                f"learner rank {self._rank}: frozen weights under an adapter have changed: {_listed(moved)}; " + _REMEDY
            )
        self._kept = found | self._kept
        changed = [name for name, digest in found.items() if self._kept.get(name, digest) != digest]
        if changed:
            raise LearnerError(
                f"learner rank {self._rank}: {_listed(changed)} changed in memory after the last update: {_REMEDY}"
            )

    @torch.no_grad()
    def keep(self) -> None:
        """What is there now counts, whatever it was before: after a state was read."""
        self._kept = self._look(self._trained)

    @torch.no_grad()
    def updated(self, work: Sequence[Trained], largest_norm: Mapping[str, float]) -> list[str]:
        """After an update of ``work``: a sentence for each model that it left as it was, or of which it and the update
        before left some parameters so, once. (One update alone may: a critic whose head begins at 0 sends no gradient
        further down until the head has moved.)

        ``largest_norm``: of the gradients of the optimizer steps that were taken, by model; without one none was.
        """
        former, self._kept = self._kept, self._kept | self._look(work)
        notes = []
        for trained in work:
            if largest_norm.get(trained.name, 0.0) <= 0.0 or trained.rate <= 0.0:
                continue
            names = [f"{trained.name}.model.{name}" for name, _ in trained.parameters()]
            still = {name for name in names if former.get(name) == self._kept[name]}
            parameters = dict(trained.parameters())
            whole = len(still) == len(names)
            told = [
                name
                for name in names
                if name in (still if whole else still & self._still)
                and self._is_to_move(parameters[name.partition(".model.")[2]], trained.rate)
            ]
            self._still = self._still.difference(names) | still
            new = [name for name in told if name not in self._told]
            self._told.update(new)
            if new and whole:
                notes.append(
                    f"the {trained.name}'s optimizer steps changed none of its {len(names)} parameters, although the "
                    f"gradient norm was {largest_norm[trained.name]:.3g}: nothing is learned"
                )
            elif new:
                notes.append(
                    f"the {trained.name}'s optimizer steps did not change {_listed(new)}: no gradient reaches them; "
                    "find out what freezes them or removes them from the loss"
                )
        return notes

    @staticmethod
    def _device(work: Sequence[Trained]) -> torch.device:
        return next(work[0].module.parameters()).device

    @staticmethod
    def _look(work: Sequence[Trained]) -> dict[str, int]:
        shards = [shard for trained in work for shard in trained.state()]
        return dict(manifest_of((shard.name, shard.tensor) for shard in shards).sums)

    def _look_at_reference(self) -> dict[str, int]:
        if self._reference is None:
            return {}
        self._layout.release(self._reference)
        named = self._reference.named_parameters()
        return dict(manifest_of((name, self._layout.local(p.detach())) for name, p in named).sums)

    def _look_at_bases(self) -> dict[str, int]:
        """At what is not trained of the models that are."""
        found: dict[str, int] = {}
        for trained in self._trained:
            self._layout.release(trained.module)
            frozen = ((name, p) for name, p in trained.module.named_parameters() if not p.requires_grad)
            named = ((f"{trained.name}.model.{name}", self._layout.local(p.detach())) for name, p in frozen)
            found |= manifest_of(named).sums
        return found

    def _is_to_move(self, parameter: torch.Tensor, rate: float) -> bool:
        """Whether a step of this rate is more than rounding for all of its numbers."""
        mine = self._layout.local(parameter.detach())
        return parameter.requires_grad and mine.numel() > 0 and rate > _SMALLEST * float(mine.abs().max())


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
