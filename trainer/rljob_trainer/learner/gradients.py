"""From a share to gradients: forward, loss and backward of one mini-batch, micro-batch by micro-batch.

Gradients stay in the parameters; the optimizer's step comes after (``rank.py``), which also says in which order, and in
which thread, the micro-batches run. What comes back are sums of metrics, shares that add up over ranks, and extremes
(names that end in /max or /min).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from rljob_trainer.algorithms import (
    LossCounts,
    PolicyInputs,
    Segments,
    actor_loss,
    aggregate,
    critic_loss,
    policy_losses,
)
from rljob_trainer.learner.context import Context
from rljob_trainer.learner.models import Critic, PackedRow, Policy
from rljob_trainer.learner.moves import upload
from rljob_trainer.learner.packing import Row, build_row, ranges
from rljob_trainer.learner.prefixes import offsets_of
from rljob_trainer.learner.protocol import Int64Array, LossSettings
from rljob_trainer.learner.reference import Reference
from rljob_trainer.learner.routing_replay import experts_in_row
from rljob_trainer.learner.work import Share

Sums = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MicroReport:
    """What is told of a micro-batch beside its gradient."""

    sums: Sums
    log_probs: torch.Tensor | None = None
    """[tokens] that the actor's loss was made of."""


@dataclass(frozen=True, slots=True)
class MiniBatchReport:
    """Metrics and log-probs summed over one mini-batch."""

    sums: Sums
    log_probs: list[torch.Tensor]
    """Micro-batch by micro-batch."""

    @classmethod
    def of(cls, micro_batches: Sequence[MicroReport]) -> MiniBatchReport:
        """``micro_batches`` in their order, whatever the order they ran in."""
        totals: Sums = {}
        for micro in micro_batches:
            for name, value in micro.sums.items():
                totals[name] = _joined(name, totals[name], value) if name in totals else value
        return cls(totals, [micro.log_probs for micro in micro_batches if micro.log_probs is not None])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank computes, in which dtype, and whether its models' last layers leave out what nobody reads."""

    device: torch.device
    dtype: torch.dtype
    outputs_only: bool
    soft_capped: bool = False
    """Whether attention scores have a cap."""
    returns_outputs: bool = True
    """Whether what this rank computes of its sequences counts where ranks add up (``Placement``)."""
    length_multiple: int = 1
    """Of a row's tokens (``RowRules``)."""
    context: Context | None = None
    """The ranks that compute every row together; None: each computes its own."""

    def row(self, share: Share, indices: Int64Array, *, final: bool = False) -> tuple[Row, PackedRow]:
        """Sequences ``indices`` of the share as one row."""
        row = build_row(share.lengths, indices, final=final, multiple=self.length_multiple)
        routed = share.batch.routed_experts
        packed = PackedRow.of(
            row,
            share.batch.token_ids,
            self.device,
            self.dtype,
            outputs_only=self.outputs_only,
            context=self.context,
            soft_capped=self.soft_capped,
            experts=None if routed is None else experts_in_row(row, routed),
        )
        return row, packed


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One row and the streams of its tokens."""

    share: Share
    row: Row
    packed: PackedRow
    device: torch.device

    @property
    def empty(self) -> bool:
        """Whether there is nothing to learn from: it only takes part in the collectives of the others."""
        return not len(self.row.stream)

    def stream(self, name: str) -> torch.Tensor | None:
        """A stream of the batch ``[tokens]``, or None if it has none."""
        values = getattr(self.share.batch, name)
        if values is None:
            return None
        return upload(torch.from_numpy(values[self.row.stream]), self.device)

    def needed(self, name: str) -> torch.Tensor:
        """The stream of a name, which must be there. Raises ``ValueError`` naming it."""
        stream = self.stream(name)
        if stream is None:
            raise ValueError(f"the update needs the stream {name!r}, which the batch lacks")
        return stream

    @property
    def segments(self) -> Segments:
        offsets, shares = self.row.offsets, self.share.batch.shares
        known = None
        if shares is not None:
            # That of any token is that of its sequence; one without tokens counts nowhere.
            first = np.minimum(offsets[:-1], max(len(self.row.stream) - 1, 0))
            known = torch.from_numpy(shares[self.row.stream][first] if self.row.stream.size else np.ones(len(first)))
            known = upload(known, self.device)
        on_device = upload(torch.from_numpy(offsets), self.device)
        return Segments(on_device, int(offsets[-1]), int(np.diff(offsets).max()), known)


def micro_batch(share: Share, number: int, micro: int, place: Place) -> MicroBatch:
    """Micro-batch ``micro`` of mini-batch ``number``."""
    row, packed = place.row(share, share.micro_batches[number][micro])
    return MicroBatch(share, row, packed, place.device)


TOKEN_WEIGHT = 2.0**-7
"""Of a token in the loss, while gradients are float16: seven bits below 1 for sums over tokens, and as many above the
smallest number for small probabilities."""


def loss_scale(loss: LossSettings, counts: LossCounts, dtype: torch.dtype) -> float:
    """What the loss of a mini-batch with these ``counts`` is multiplied by before its backward pass, and its gradient
    divided by after it: a power of two, so that nothing is rounded; 1 but for float16.

    A token's weight in the loss is one over the tokens of the mini-batch or so. The gradient of its logits is smaller
    still, and float16, which ends at 6e-8, loses it. Scaled, a token weighs about ``TOKEN_WEIGHT``.
    """
    if dtype != torch.float16 or not counts.tokens:
        return 1.0
    ones = torch.ones(max(1, round(counts.tokens / counts.sequences)))  # a sequence of the mean length
    segments = replace(Segments.from_lengths([len(ones)]), shares=torch.ones(1))
    total = aggregate(loss.aggregation, ones, segments, ones.bool(), counts, **loss.aggregation_params)
    return 2.0 ** round(math.log2(TOKEN_WEIGHT * len(ones) / float(total)))


class ActorGradient:
    """The actor's part of mini-batch ``number``; called for each micro-batch, in any order."""

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        share: Share,
        number: int,
        loss: LossSettings,
        place: Place,
        seed: int,
    ) -> None:
        """``seed`` is for losses that draw; it is the same on all ranks."""
        self.scale = loss_scale(loss, share.counts[number], place.dtype)
        """What gradients are too large by."""
        self._share, self._number, self._loss, self._place = share, number, loss, place
        self._selections = _select(policy, share, number, loss, place, seed)
        self._reference: Reference | None = None
        if loss.kl_kind == "full":
            if reference is None:
                raise ValueError("the KL kind full needs the reference model, which this job does not keep")
            self._reference = reference

    def __call__(self, policy: Policy, number: int) -> MicroReport:
        """Adds the gradient of micro-batch ``number`` to the policy's parameters."""
        micro = micro_batch(self._share, self._number, number, self._place)
        loss = self._loss
        compared = None if self._reference is None else self._reference(micro.packed, loss.temperature)
        out = policy(micro.packed, loss.temperature, reference=compared)
        if micro.empty or not policy.predicts:
            _connected_zero(out.log_probs).backward()
            return MicroReport({}, out.log_probs.detach())
        result = actor_loss(
            PolicyInputs(
                log_probs=out.log_probs,
                advantages=micro.needed("advantages"),
                mask=micro.needed("mask"),
                segments=micro.segments,
                old_log_probs=micro.stream("old_log_probs"),
                rollout_log_probs=micro.stream("rollout_log_probs"),
                ref_log_probs=micro.stream("ref_log_probs") if loss.kl_kind is not None else None,
                weights=micro.stream("weights"),
                rollout_share=micro.stream("rollout_share"),
                entropy=out.entropy if loss.entropy_coefficient != 0.0 else out.entropy.detach(),
                vocabulary_kl=out.vocabulary_kl,
                selection=None if self._selections is None else self._selections[number],
            ),
            loss,
            self._share.counts[self._number],
        )
        (result.loss * self.scale).backward()
        return MicroReport({**result.metrics, **result.extremes}, out.log_probs.detach())


class CriticGradient:
    """The gradient of the critic, with the moments that its explained variance is made of."""

    def __init__(self, share: Share, number: int, loss: LossSettings, place: Place) -> None:
        self.scale = loss_scale(loss, share.counts[number], place.dtype)
        self._share, self._number, self._loss, self._place = share, number, loss, place

    def __call__(self, critic: Critic, number: int) -> MicroReport:
        """Adds the gradient of micro-batch ``number`` to the critic's parameters."""
        micro = micro_batch(self._share, self._number, number, self._place)
        loss = self._loss
        values, _ = critic(micro.packed)
        if micro.empty or not critic.predicts:
            _connected_zero(values).backward()
            return MicroReport({})
        returns, mask = micro.needed("returns"), micro.needed("mask")
        old = micro.stream("values") if loss.value_clip is not None else None
        counts = self._share.counts[self._number]
        result = critic_loss(values, returns, mask, micro.segments, loss, counts, old)
        (result.loss * self.scale).backward()
        target = torch.where(mask, returns, 0).double()
        error = target - torch.where(mask, values.detach(), 0).double()
        moments = {
            "moment/count": mask.sum().double(),
            "moment/return": target.sum(),
            "moment/return_squared": target.square().sum(),
            "moment/error": error.sum(),
            "moment/error_squared": error.square().sum(),
        }
        return MicroReport({**result.metrics, **moments})


@torch.no_grad()
def _select(
    policy: Policy, share: Share, number: int, loss: LossSettings, place: Place, seed: int
) -> list[torch.Tensor] | None:
    """For losses that look at the whole mini-batch first: what they find, each micro-batch's part ``[tokens]``; else
    None.

    Every rank that returns outputs puts its tokens into the mini-batch's own order; all add up, and find the same.
    """
    method = policy_losses[loss.policy_loss]
    if not method.looks_ahead(loss.policy_loss_params):
        return None
    lengths = share.lengths_of_all[number]
    offsets = offsets_of(lengths)
    names = ("advantages", "old_log_probs", "rollout_log_probs")
    given = [name for name in names if getattr(share.batch, name) is not None]
    whole = torch.zeros(2 + len(given), int(offsets[-1]), device=place.device)
    parts = []
    for index, sequences in enumerate(share.places[number]):
        micro = micro_batch(share, number, index, place)
        at = upload(torch.from_numpy(ranges(offsets[sequences], lengths[sequences])), place.device)
        parts.append(at)
        log_probs = policy(micro.packed, loss.temperature).log_probs
        if place.returns_outputs and not micro.empty:
            mask = micro.needed("mask")
            streams = torch.stack([log_probs, *(micro.needed(name) for name in given)])
            whole[0, at] = mask.float()
            whole[1:, at] = torch.where(mask, streams, 0)
    if dist.is_initialized():
        dist.all_reduce(whole)
    segments = Segments.from_lengths(torch.tensor(lengths), place.device)
    of_all = dict(zip(("log_probs", *given), whole[1:], strict=True))
    inputs = PolicyInputs(mask=whole[0] > 0, segments=segments, **of_all)
    generator = torch.Generator().manual_seed(seed)
    selection = method.select_tokens(inputs, generator, **loss.policy_loss_params)
    return [selection[at] for at in parts]


def _joined(name: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A metric of two micro-batches together."""
    if name.endswith("/max"):
        return torch.maximum(one, other)
    return torch.minimum(one, other) if name.endswith("/min") else one + other


def on_host(sums: list[Sums]) -> list[dict[str, float]]:
    """All metrics of an update in one transfer."""
    flat = [value.double() for step in sums for value in step.values()]
    values = iter(torch.stack(flat).tolist() if flat else [])
    return [{name: next(values) for name in step} for step in sums]


def _connected_zero(stream: torch.Tensor) -> torch.Tensor:
    """A loss of 0 that still runs the backward pass, and with it the collectives that the other ranks wait for."""
    return stream.sum() * 0.0
