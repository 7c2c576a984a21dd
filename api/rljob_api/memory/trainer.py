"""A trainer rank's memory, moment by moment, on its device.

What is there follows rljob_trainer/learner: float32 masters and moments cut over the shard ranks, parameters gathered
layer by layer in the compute dtype with the outer ones (embedding, last norm, output matrix) gathered for the whole
pass, gradients summed in float32. One rank in float32 has plain parameters: nothing is gathered, nothing summed.

Beside an adapter the model is there in the compute dtype, cut and gathered like the rest; masters, moments and
gradients are the adapter's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rljob_api.memory import parts
from rljob_api.memory.activations import FLOAT, OutputHead, RowPass, cpu_chunk, gpu_chunk
from rljob_api.memory.adapter import AdapterShape
from rljob_api.memory.parts import Moment
from rljob_api.memory.rows import LargestRow
from rljob_api.memory.shape import ModelShape, TensorShape, numbers


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How ranks share the work: ``replicate`` copies of the parameters, each cut over ``shard`` groups of ranks. A
    group of ``context`` x ``tensor`` ranks computes each of its rows together; ``tensor`` of them have the same tokens
    and a part of each matrix."""

    shard: int = 1
    replicate: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.shard * self.replicate * self.context * self.tensor

    @property
    def cut(self) -> int:
        """Into how many parts a copy of what a tensor rank computes with is cut."""
        return self.shard * self.context

    @property
    def data_indices(self) -> int:
        """Groups of ranks that have sequences of their own."""
        return self.shard * self.replicate


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """All that the memory of one rank depends on."""

    shape: ModelShape
    layout: ShardLayout
    row: LargestRow
    itemsize: int
    """Bytes of a number of the compute dtype."""
    on_cpu: bool = False
    accumulates: bool = True
    """Whether a mini-batch has several rows on a rank: gradients of the first are there while the others pass."""
    checkpointing: bool = False
    offload: bool = False
    chunk: int | None = None
    """``trainer.logProbChunkTokens``."""
    memory: int | None = None
    """Of the GPU, which the size of a chunk follows."""
    muon: bool = False
    critic: bool = False
    critic_shape: ModelShape | None = None
    """Of a critic that starts from another model; None: the policy's."""
    reference: bool = False
    full_kl: bool = False
    adapter: AdapterShape | None = None
    deterministic: bool = False

    @property
    def divided(self) -> ModelShape:
        """What the rank has a part in computing."""
        return self.shape.part(self.layout.tensor)

    @property
    def of_critic(self) -> TrainerRank:
        """This rank with the critic's model in place of the policy's."""
        return self if self.critic_shape is None else replace(self, shape=self.critic_shape, critic_shape=None)

    # --- what is kept from step to step -------------------------------------------------------------------------------

    @property
    def spread(self) -> bool:
        """Whether parameters are gathered for a pass (FSDP2)."""
        return self.layout.ranks > 1 or self.itemsize < FLOAT

    def _trained(self, shards: int, *, value_head: bool = False) -> int:
        """The numbers that are trained, on the rank that has most of them."""
        if self.adapter is None:
            return self.divided.shard(shards, value_head=value_head)
        head = numbers([(1, self.shape.hidden), (1,)], shards) if value_head else 0
        return self.shape.layers * numbers(self.adapter.layer_tensors(self.shape), shards) + head

    def masters(self, *, value_head: bool = False) -> int:
        return FLOAT * self._trained(self.layout.cut, value_head=value_head)

    @property
    def frozen(self) -> int:
        """The model beside which an adapter is trained."""
        return 0 if self.adapter is None else self.itemsize * self.divided.shard(self.layout.cut)

    @property
    def _frozen_critic(self) -> int:
        """The bytes of the frozen model of a critic, which has no output matrix."""
        if self.adapter is None:
            return 0
        head = numbers([(1, self.shape.hidden), (1,)], self.layout.cut)
        return self.itemsize * (self.divided.shard(self.layout.cut, value_head=True) - head)

    def moments(self, *, value_head: bool = False) -> int:
        """The bytes of the optimizer's state: AdamW has two numbers for each parameter, Muon one for each of its
        matrices'."""
        if not self.muon:
            return 2 * self.masters(value_head=value_head)
        matrices = FLOAT * self.divided.layers * numbers(self._matrices(self.divided), self.layout.cut)
        return 2 * self.masters(value_head=value_head) - matrices

    def _matrices(self, shape: ModelShape) -> list[TensorShape]:
        """The matrices of one layer that are trained."""
        return shape.layer_matrices() if self.adapter is None else self.adapter.layer_tensors(shape)

    @property
    def reference_shard(self) -> int:
        """An adapter's reference is the model without it."""
        if not self.reference or self.adapter is not None:
            return 0
        return self.itemsize * self.divided.shard(self.layout.cut)

    def weights(self) -> dict[str, int]:
        """The actor without its moments."""
        return {parts.FROZEN: self.frozen, parts.MASTERS: self.masters()}

    def at_rest(self) -> dict[str, int]:
        """All that the rank keeps between two steps."""
        own = {**self.weights(), parts.OPTIMIZER: self.moments(), parts.REFERENCE: self.reference_shard}
        if self.critic:
            own[parts.CRITIC] = self._critic + self.of_critic.moments(value_head=True)
        return own

    @property
    def _critic(self) -> int:
        return self.of_critic._frozen_critic + self.of_critic.masters(value_head=True)

    def _idle(self, working: str) -> dict[str, int]:
        """What is on the device during a phase: with ``offload`` only what works then, and the actor."""
        own = self.at_rest()
        if self.offload and not self.on_cpu:
            if working == "score":
                own.pop(parts.OPTIMIZER)
                if self.critic:
                    own[parts.CRITIC] = self._critic
            elif not self.full_kl:
                own.pop(parts.REFERENCE)
        return own

    # --- moments ------------------------------------------------------------------------------------------------------

    def all(self) -> Iterator[Moment]:
        """Every moment that may be the fullest."""
        own = self._idle("score")
        yield from self._scoring(own)
        if self.critic_shape is not None:
            yield self.of_critic._scoring_layer("score: layer of the critic", own)
        own = self._idle("update")
        if self.critic:
            yield from self.of_critic._training(own, value_head=True)
        yield from self._training(own, value_head=False)

    @property
    def head_chunk(self) -> int:
        """Tokens whose logits exist at once."""
        if self.chunk is not None:
            return self.chunk
        if self.on_cpu:
            return cpu_chunk(self.divided)
        return gpu_chunk(self.divided.vocabulary, self.memory or 1 << 62)

    @property
    def _head(self) -> OutputHead:
        given = self.chunk is not None
        frozen = self.adapter is not None
        return OutputHead(self.divided, self._pass.outputs, self.head_chunk, self.itemsize, given, self.on_cpu, frozen)

    @property
    def _pass(self) -> RowPass:
        context = self.layout.context
        return RowPass(self.divided, self.row, self.itemsize, self.on_cpu, context, self.adapter, self.deterministic)

    def _outer(self, *, value_head: bool) -> int:
        """Numbers outside of the layers."""
        return sum(map(math.prod, self.divided.outer_tensors(value_head=value_head)))

    @property
    def _layer(self) -> int:
        """Numbers of a layer, with its adapters."""
        own = [] if self.adapter is None else self.adapter.layer_tensors(self.divided)
        return sum(map(math.prod, self.divided.layer_tensors() + own))

    @property
    def _trained_layer(self) -> int:
        if self.adapter is None:
            return self._layer
        return sum(map(math.prod, self.adapter.layer_tensors(self.divided)))

    def _gathered(self, *, value_head: bool, layers: int) -> int:
        if not self.spread:
            return 0
        return self.itemsize * (self._outer(value_head=value_head) + layers * self._layer)

    def _scoring(self, own: Mapping[str, int]) -> Iterator[Moment]:
        """Nothing is kept but the stream, beside what the rank has, ``own``."""
        before = self._scored_before
        yield self._scoring_layer("score: layer", own)
        yield Moment(
            "score: head",
            {
                **own,
                parts.GATHERED: before + self._gathered(value_head=False, layers=0),
                parts.LOGITS: self._head.forward + self.itemsize * self._pass.outputs * self.divided.hidden,
            },
        )

    @property
    def _scored_before(self) -> int:
        """The outer parameters of a model that has scored stay gathered."""
        return self._gathered(value_head=False, layers=0) if self.reference_shard else 0

    def _scoring_layer(self, name: str, own: Mapping[str, int]) -> Moment:
        size, walk, before = self.itemsize, self._pass, self._scored_before
        # The widest that a layer makes of the stream: what goes into and comes out of the feed-forward part's product,
        # or what a norm of the queries (Qwen3), else of the stream, computes in float32.
        shape = self.divided
        normed = max(shape.queries, shape.hidden) if shape.norms_heads else shape.hidden
        norm = size * (shape.hidden + 2 * normed) + 2 * FLOAT * normed
        wide = size * (3 * shape.intermediate + 2 * shape.hidden)
        if shape.experts:  # what goes in, what comes out, times how much it counts, and in the tokens' order
            inside = max(4 * shape.hidden, shape.hidden + 4 * shape.expert_width)
            places = 5 * 8 * shape.experts_per_token
            wide = size * (shape.experts_per_token * inside + 3 * shape.hidden) + places + FLOAT * shape.experts
        return Moment(
            name,
            {
                **own,
                parts.GATHERED: before + self._gathered(value_head=False, layers=2),
                parts.ACTIVATIONS: walk.stream + walk.shared() + walk.tokens * max(norm, wide),
            },
        )

    def _training(self, own: Mapping[str, int], *, value_head: bool) -> Iterator[Moment]:
        """Beside all that the rank has then, ``own``."""
        name = "critic" if value_head else "actor"
        walk, head, size = self._pass, self._head, self.itemsize
        outer, layer = self._outer(value_head=value_head), self._trained_layer
        sums = self.masters(value_head=value_head)
        summed = sums if self.accumulates else 0
        kept = walk.layers(checkpointing=self.checkpointing) + walk.shared() + walk.after_layers()
        if not value_head:
            yield Moment(
                f"{name}: head backward",
                {
                    **own,
                    parts.GRADIENTS: summed,
                    parts.GATHERED: self._gathered(value_head=value_head, layers=1),
                    parts.ACTIVATIONS: kept,
                    parts.LOGITS: head.with_exact_kl(gathered=self.spread) if self.full_kl else head.backward,
                },
            )
        # The gradient of an output matrix of its own waits for the end of the backward pass.
        waiting = 0 if value_head else size * self.divided.vocabulary * self.divided.hidden
        stream = walk.layers(checkpointing=self.checkpointing) + walk.shared()
        again = walk.layer() if self.checkpointing else 0
        down = size * self.divided.hidden * self.divided.intermediate
        if self.divided.experts:
            down = 0
        if self.adapter is not None:
            waiting = down = 0
        yield Moment(
            f"{name}: layer backward",
            {
                **own,
                parts.GRADIENTS: summed + (waiting + down if self.spread else 0),
                parts.GATHERED: self._gathered(value_head=value_head, layers=2),
                parts.ACTIVATIONS: stream + again + walk.layer_backward(),
                # Of the layer before.
                parts.TRAVELLING: FLOAT * layer if self.spread else 0,
            },
        )
        if self.spread:
            yield Moment(
                f"{name}: sum of a layer's gradients",
                {
                    **own,
                    parts.GRADIENTS: summed + waiting + size * layer,
                    parts.GATHERED: self._gathered(value_head=value_head, layers=1),
                    parts.ACTIVATIONS: stream,
                    # What goes out, and this rank's part of the sum.
                    parts.TRAVELLING: FLOAT * layer + FLOAT * layer // self.layout.cut,
                },
            )
        if self.divided.experts and self.adapter is None and self.spread:
            stacks = size * sum(map(math.prod, self.divided.expert_stacks()))
            yield Moment(
                f"{name}: experts backward",
                {
                    **own,
                    parts.GRADIENTS: summed + waiting + stacks,
                    parts.GATHERED: self._gathered(value_head=value_head, layers=2),
                    parts.ACTIVATIONS: stream + again,
                    parts.TRAVELLING: FLOAT * layer,
                },
            )
        if self.divided.caps_scores or walk.flash:
            own_matrices = [*self._matrices(self.divided)]
            made = size * (sum(map(math.prod, own_matrices)) if self.adapter is None else 0)
            yield Moment(
                f"{name}: attention backward",
                {
                    **own,
                    parts.GRADIENTS: summed + (waiting + made if self.spread else 0),
                    parts.GATHERED: self._gathered(value_head=value_head, layers=2),
                    parts.ACTIVATIONS: stream + again - walk.feed_forward() + walk.attention_backward(),
                    parts.WORKSPACE: walk.attention_workspace(),
                },
            )
        if self.spread and self.adapter is None and self.divided.tied and not value_head:
            matrix = size * self.divided.vocabulary * self.divided.hidden
            yield Moment(
                f"{name}: embedding backward",
                {
                    **own,
                    # As the output matrix, as the embedding, and as both.
                    parts.GRADIENTS: summed + 3 * matrix,
                    parts.GATHERED: self._gathered(value_head=value_head, layers=0),
                    parts.TRAVELLING: FLOAT * layer,
                },
            )
        if self.spread and self.adapter is None:
            alone = FLOAT * outer if self.layout.cut == 1 else 0
            shard = FLOAT * numbers(self.divided.outer_tensors(value_head=value_head), self.layout.cut)
            yield Moment(
                f"{name}: sum of the outer gradients",
                {
                    **own,
                    parts.GRADIENTS: sums - (0 if self.accumulates else shard),
                    parts.TRAVELLING: FLOAT * outer + max(size * outer, shard + alone),
                },
            )
        if self.muon:
            yield Moment(f"{name}: optimizer", {**own, parts.GRADIENTS: sums, parts.MUON: self._orthogonal()})

    def _orthogonal(self) -> int:
        """Muon's directions, all of them whole in float32, and what the iterations need of the matrices of one size,
        which are computed together: once more in float32, twice in the iterations' precision, and three times their
        squares."""
        counts: Counter[TensorShape] = Counter()
        for matrix in self._matrices(self.shape):
            counts[matrix] += self.shape.layers
        every = sum(count * math.prod(shape) for shape, count in counts.items())
        size = FLOAT if self.on_cpu else 2
        most = max(
            count * (math.prod(shape) * (FLOAT + 2 * size) + 3 * size * math.prod(shape[:-2]) * min(shape[-2:]) ** 2)
            for shape, count in counts.items()
        )
        ahead = FLOAT * self.divided.layers * numbers(self._matrices(self.divided), self.layout.cut)
        return ahead + most + (FLOAT * every if self.layout.cut * self.layout.tensor > 1 else 0)
