"""From a share to gradients: forward, loss and backward of one mini-batch, micro-batch by micro-batch.

Gradients stay in the parameters; the optimizer's step comes after (``rank.py``). What comes back are sums of metrics:
shares that add up over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rljob_trainer.algorithms import PolicyInputs, Segments, actor_loss, critic_loss, policy_losses
from rljob_trainer.learner.models import PackedRow, Policy
from rljob_trainer.learner.packing import Row, build_row, offsets_of, ranges
from rljob_trainer.learner.parallel import full
from rljob_trainer.learner.protocol import Int64Array, LossSettings
from rljob_trainer.learner.work import Share

Sums = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MiniBatchReport:
    """What is told of a mini-batch beside its gradient."""

    sums: Sums
    log_probs: list[torch.Tensor] = field(default_factory=list)
    """[tokens] that the actor's loss was made of, micro-batch by micro-batch."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank computes, in which dtype, and whether its models' last layers leave out what nobody reads."""

    device: torch.device
    dtype: torch.dtype
    outputs_only: bool

    def row(self, share: Share, indices: Int64Array, *, final: bool = False) -> tuple[Row, PackedRow]:
        """Sequences ``indices`` of the share as one row."""
        row = build_row(share.lengths, indices, final=final)
        return row, PackedRow.of(row, share.batch.token_ids, self.device, self.dtype, outputs_only=self.outputs_only)


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
        return torch.from_numpy(values[self.row.stream]).to(self.device, non_blocking=True)

    def needed(self, name: str) -> torch.Tensor:
        """The same for a stream that must be there. Raises ``ValueError`` naming it."""
        stream = self.stream(name)
        if stream is None:
            raise ValueError(f"the update needs the stream {name!r}, which the batch lacks")
        return stream

    @property
    def segments(self) -> Segments:
        offsets = self.row.offsets
        return Segments(torch.from_numpy(offsets).to(self.device), int(offsets[-1]), int(np.diff(offsets).max()))


def micro_batches(share: Share, number: int, place: Place) -> Iterator[MicroBatch]:
    """The micro-batches of mini-batch ``number``."""
    for indices in share.micro_batches[number]:
        row, packed = place.row(share, indices)
        yield MicroBatch(share, row, packed, place.device)


def actor_gradient(
    policy: Policy, reference: Policy | None, share: Share, number: int, loss: LossSettings, place: Place, seed: int
) -> MiniBatchReport:
    """Adds the gradient of mini-batch ``number`` to the policy's parameters.

    ``seed`` is for losses that draw; it is the same on all ranks.
    """
    totals: Sums = {}
    seen: list[torch.Tensor] = []
    selections = _select(policy, share, number, loss, place, seed)
    exact = loss.kl_kind == "full"
    ref_weight = None
    if exact:
        if reference is None:
            raise ValueError("the KL kind full needs the reference model, which this job does not keep")
        ref_weight = full(reference.language_model.get_output_embeddings().weight)
    for micro in micro_batches(share, number, place):
        anchor = None
        if reference is not None and ref_weight is not None:
            with torch.no_grad():
                states = reference(micro.packed, loss.temperature, states=True).states
            anchor = (states, ref_weight)
        out = policy(micro.packed, loss.temperature, reference=anchor)
        selection = None if selections is None else next(selections)
        seen.append(out.log_probs.detach())
        if micro.empty:
            _connected_zero(out.log_probs).backward()
            continue
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
                selection=selection,
            ),
            loss,
            share.counts[number],
        )
        result.loss.backward()
        _add(totals, result.metrics)
    return MiniBatchReport(totals, seen)


def critic_gradient(critic: nn.Module, share: Share, number: int, loss: LossSettings, place: Place) -> MiniBatchReport:
    """The same for the critic, with the moments that its explained variance is made of."""
    totals: Sums = {}
    for micro in micro_batches(share, number, place):
        values, _ = critic(micro.packed)
        if micro.empty:
            _connected_zero(values).backward()
            continue
        returns, mask = micro.needed("returns"), micro.needed("mask")
        old = micro.stream("values") if loss.value_clip is not None else None
        result = critic_loss(values, returns, mask, micro.segments, loss, share.counts[number], old)
        result.loss.backward()
        target = torch.where(mask, returns, 0).double()
        error = target - torch.where(mask, values.detach(), 0).double()
        moments = {
            "moment/count": mask.sum().double(),
            "moment/return": target.sum(),
            "moment/return_squared": target.square().sum(),
            "moment/error": error.sum(),
            "moment/error_squared": error.square().sum(),
        }
        _add(totals, {**result.metrics, **moments})
    return MiniBatchReport(totals)


@torch.no_grad()
def _select(
    policy: Policy, share: Share, number: int, loss: LossSettings, place: Place, seed: int
) -> Iterator[torch.Tensor] | None:
    """For losses that pick tokens of the whole mini-batch: each micro-batch's part ``[tokens]`` bool; else None.

    Every rank puts its tokens into the mini-batch's own order, adds up with the others, and picks alike.
    """
    method = policy_losses[loss.policy_loss]
    if method.selector is None:
        return None
    lengths = share.lengths_of_all[number]
    offsets = offsets_of(lengths)
    names = ("advantages", "old_log_probs", "rollout_log_probs")
    given = [name for name in names if getattr(share.batch, name) is not None]
    whole = torch.zeros(2 + len(given), int(offsets[-1]), device=place.device)
    parts = []
    for micro, sequences in zip(micro_batches(share, number, place), share.places[number], strict=True):
        at = torch.from_numpy(ranges(offsets[sequences], lengths[sequences])).to(place.device)
        parts.append(at)
        log_probs = policy(micro.packed, loss.temperature).log_probs
        if not micro.empty:
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
    return iter([selection[at] for at in parts])


def on_host(sums: list[Sums]) -> list[dict[str, float]]:
    """All metrics of an update in one transfer."""
    flat = [value.double() for step in sums for value in step.values()]
    values = iter(torch.stack(flat).tolist() if flat else [])
    return [{name: next(values) for name in step} for step in sums]


def _connected_zero(stream: torch.Tensor) -> torch.Tensor:
    """A loss of 0 that still runs the backward pass, and with it the collectives that the other ranks wait for."""
    return stream.sum() * 0.0


def _add(totals: Sums, more: Sums) -> None:
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value
