"""What autograd keeps of a pass over one packed row, in bytes, and what its backward pass needs besides.

Counted from what the learner computes: transformers' layers over packed rows, in half precision with a flash kernel for
rows of different lengths, in float32 on CPUs by ``compute_in_rows`` (rljob_trainer/learner/cpu/plain_layer.py), and the
output head in chunks (rljob_trainer/learner/logprobs.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rljob_api.memory.adapter import AdapterShape
from rljob_api.memory.rows import LargestRow
from rljob_api.memory.shape import ModelShape

FLOAT = 4
"""Bytes of a float32."""
_INDEX = 8
_MOST_CHUNK_BYTES = 1 << 30
_CHUNK_SHARE = 64
_CACHE_BYTES = 2 << 20
_FEWEST_TOKENS = 32
_LARGE_WEIGHT_BYTES = 32 << 20
_TOKENS_OF_A_LARGE_WEIGHT = 512
_KEPT_BYTES = 16 << 20
_SCORES = 1 << 26
"""Capped scores of a piece of the queries (rljob_trainer/models/soft_capping.py)."""
_SCORE_BYTES = 14
"""Of each in the backward pass: the hyperbolic tangent, the probability and its gradient in float32, and one of them in
half precision."""
_FLASH_ROWS = 128
"""Queries of a block of flash attention's backward pass, which pads each segment by as many."""
_PROCESSORS = 148
"""Of the GPU with most of them (B200): deterministic gradients of queries are summed in parts where there are fewer
segments and heads."""
_KL_FLOATS = 6
"""Float32 matrices ``[chunk, vocabulary]`` at once in the backward pass of the exact KL."""


@dataclass(frozen=True, slots=True)
class RowPass:
    """One model's pass over one row."""

    shape: ModelShape
    row: LargestRow
    itemsize: int
    """Bytes of a number of the compute dtype."""
    on_cpu: bool = False
    context: int = 1
    """Ranks that compute the row together, each a part of its tokens, and in attention a part of the heads."""
    adapter: AdapterShape | None = None
    """What alone is trained; None: the whole model. A product with a frozen matrix keeps nothing of what it reads."""
    deterministic: bool = False
    """Whether gradients are summed in the same order each time."""

    @property
    def tokens(self) -> int:
        """The number of tokens of the row that this rank computes."""
        return -(-self.row.tokens // self.context)

    @property
    def last(self) -> int:
        """The tokens that the last layer computes beyond attention: with several ranks, and of a mixture, all."""
        return self.tokens if self.context > 1 or self.shape.experts else self.row.last

    @property
    def outputs(self) -> int:
        """Response tokens that are predicted here: at most all of the rank's."""
        return self.row.outputs if self.context == 1 else min(self.row.outputs, self.tokens)

    @property
    def keys(self) -> int:
        """The width of the keys of a rank's heads: heads of keys are repeated where there are fewer than ranks."""
        shape = self.shape
        return shape.head_width * math.lcm(shape.kv_heads, self.context) // self.context

    # --- one layer ----------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> int:
        """The residual stream between two layers."""
        return self.itemsize * self.tokens * self.shape.hidden

    def layer(self, *, last: bool = False) -> int:
        """What the backward pass of a layer reads."""
        shape, row, size = self.shape, self.row, self.itemsize
        asking = self.last if last else self.tokens
        norms = self.tokens * self._norm(shape.hidden, read=self._trains("q_proj", "k_proj", "v_proj"))
        norms += asking * self._norm(shape.hidden, read=self._trains("gate_proj", "up_proj"))
        if shape.sandwiched:
            norms += 2 * asking * self._norm(shape.hidden, read=False)
        heads = 0
        if shape.norms_heads:
            heads = self.tokens * (shape.heads + shape.kv_heads) * self._norm(shape.head_width, read=False)
        attention = size * (2 * asking * shape.queries + 2 * row.keys * self.keys)
        attention += 0 if shape.caps_scores else FLOAT * asking * shape.heads
        if self.on_cpu:
            attention += self._blocks(asking, last=last)
        elif self.context > 1:
            # What is exchanged comes in one piece, and the output once more as it is sent back.
            attention += size * self.tokens * shape.queries
            attention += size * row.tokens * 2 * self.keys if row.gathered else 0
        else:
            if shape.caps_scores and row.gathered:
                attention += self._in_two_blocks(asking)
            if last and not shape.experts:
                # Put back among the rows whose output nobody reads.
                attention += size * self.tokens * shape.queries
        feed_forward = (4 if self._trains("down_proj") else 3) * size * asking * shape.intermediate
        if shape.experts:
            feed_forward = self._mixture()
        return norms + heads + attention + feed_forward + self._scaled_matrices + self._within_adapters

    @property
    def _pairs(self) -> int:
        """The number of pairs of a token and an expert that it is sent to."""
        return self.tokens * self.shape.experts_per_token

    def _mixture(self) -> int:
        """The probabilities of all experts; of each pair what goes in, both that comes of it, their product, what goes
        out, how much it counts, and three places in the order by experts."""
        shape = self.shape
        trained = self.adapter is None
        pair = self.itemsize * ((2 if trained else 1) * shape.hidden + (4 if trained else 3) * shape.expert_width + 1)
        return FLOAT * self.tokens * shape.experts + self._pairs * (pair + 3 * _INDEX)

    def _trains(self, *names: str) -> bool:
        """Whether one of these linear layers, or an adapter beside it, gets a gradient, and so keeps what it reads."""
        return self.adapter is None or self.adapter.has(*names)

    @property
    def _within_adapters(self) -> int:
        """What each adapter has made of its input: B reads it."""
        if self.adapter is None:
            return 0
        return len(self.adapter.layers(self.shape)) * self.itemsize * self.tokens * self.adapter.rank

    def _blocks(self, asking: int, *, last: bool) -> int:
        """On a CPU a prompt's first sample is in another block than its siblings: what both gave is put together, and
        keys and values stay as they were before they were copied to each sibling. The last layer reads its rows out
        first."""
        read = FLOAT * asking * self.shape.hidden if last else 0
        return read + (self._in_two_blocks(asking) if self.row.gathered else 0)

    def _in_two_blocks(self, asking: int) -> int:
        own = (self.row.samples - self.row.groups) * (self.row.response - 1)
        return self.itemsize * (asking * self.shape.queries + 2 * own * self.shape.keys)

    def masks(self) -> int:
        """On a CPU, of the queries that do not see all of their keys' row: the last layer's, and one for all layers of
        a prompt's further samples."""
        row = self.row
        if not self.on_cpu:
            return 0
        queries = row.response + (row.response - 1 if row.gathered else 0)
        return FLOAT * queries * (row.prompt + row.response - 1)

    def _norm(self, width: int, *, read: bool) -> int:
        """What a norm keeps of one token: in float32 before it is scaled, as it was computed, which the gradient of the
        scale needs, and, where the next product's does, what that has ``read``."""
        if self.on_cpu and read:
            return FLOAT * (width + 1)
        copies = (1 if self.adapter is None else 0) + (1 if read else 0)
        if self.shape.sandwiched:  # scaled in float32, too
            wide = 2 if self.adapter is None else 1
            return FLOAT * (wide * width + 1) + (self.itemsize * width if read else 0)
        return FLOAT * (width + 1) + copies * self.itemsize * width

    @property
    def _scaled_matrices(self) -> int:
        """On a CPU a norm's scale is multiplied into the matrices that read it; the products are kept."""
        if not self.on_cpu:
            return 0
        shape = self.shape
        return FLOAT * shape.hidden * (shape.queries + 2 * shape.keys + 2 * shape.intermediate)

    def layer_backward(self) -> int:
        """What the backward pass of a layer needs at its fullest beside what was kept: three gradients of the feed-
        forward part's width, less what the first of its products has read. On a CPU gradients of matrices too, with
        and without the norm's scale."""
        shape = self.shape
        if shape.experts:  # of what goes out, before and after it is put in order, and times how much it counts
            return 3 * self.itemsize * self._pairs * shape.hidden
        matrices = 2 * FLOAT * shape.hidden * shape.intermediate if self.on_cpu else 0
        return self.itemsize * self.tokens * 2 * shape.intermediate + matrices

    def scores(self) -> int:
        """Capped scores that exist at once, of a piece of the queries."""
        row, heads = self.row, self.shape.heads
        keys = row.prompt + row.response - 1

        def of_block(segments: int, queries: int) -> int:
            rows = max(1, _SCORES // max(1, segments * heads * keys))
            return min(rows, queries) * segments * heads * keys

        return max(of_block(row.groups, keys), of_block(row.segments - row.groups, row.response - 1))

    def attention_backward(self) -> int:
        """What the backward pass of attention needs beside what was kept: the gradients of output, queries, keys and
        values. With capped scores those of keys and values are in float32, and a piece's scores come to them."""
        of_queries = 2 * self.itemsize * self.tokens * self.shape.queries
        if not self.shape.caps_scores:
            return of_queries + 2 * self.itemsize * self.row.keys * self.keys
        return _SCORE_BYTES * self.scores() + of_queries + 2 * FLOAT * self.row.keys * self.keys

    @property
    def flash(self) -> bool:
        """Whether attention is the flash kernel's."""
        return not self.on_cpu and self.itemsize < FLOAT and not self.shape.caps_scores

    def attention_workspace(self) -> int:
        """What the flash kernel takes for itself in its backward pass, beside the gradients that it gives: those of
        queries in float32, a number for each query and head, and, where heads of keys are fewer, gradients of keys and
        values for each head of queries (``mha_varlen_bwd`` in PyTorch's ATen/native/transformers/cuda/flash_attn/
        flash_api.cpp, which 2.13 has for Hopper as well, unless FlashAttention 3 is activated)."""
        if not self.flash:
            return 0
        shape, row = self.shape, self.row
        segments = row.segments
        heads = shape.heads // self.context
        width = shape.head_width
        rounded = -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
        splits = -(-_PROCESSORS // (segments * heads)) if self.deterministic else 1
        rows = heads * (row.tokens + _FLASH_ROWS * segments)
        repeated = 0 if self.keys == heads * width else 2 * self.itemsize * row.keys * heads * width
        return FLOAT * rows * (rounded * splits + 1) + repeated

    def feed_forward(self) -> int:
        """What is gone of a layer when the backward pass has come to attention."""
        shape = self.shape
        wide = (4 if self._trains("down_proj") else 3) * self.itemsize * shape.intermediate
        norm = self._norm(shape.hidden, read=self._trains("gate_proj", "up_proj"))
        norm += 2 * self._norm(shape.hidden, read=False) if shape.sandwiched else 0
        return self.tokens * norm + (self._mixture() if shape.experts else self.tokens * wide)

    # --- the whole model ----------------------------------------------------------------------------------------------

    def layers(self, *, checkpointing: bool) -> int:
        """What all layers keep until the backward pass; with ``checkpointing`` their inputs only."""
        count = self.shape.layers
        if checkpointing:
            return count * self.stream
        # Nothing that is trained is before the first norm of a frozen model.
        first = 0 if self.adapter is None else self.tokens * FLOAT * (self.shape.hidden + 1)
        return (count - 1) * self.layer() + self.layer(last=True) - first

    def after_layers(self) -> int:
        """The last norm, and the states that tokens are predicted from."""
        hidden = self.shape.hidden
        return self.last * self._norm(hidden, read=False) + self.itemsize * self.outputs * hidden

    def shared(self) -> int:
        """What all layers read: cosines and sines of all positions, and masks."""
        kinds = 2 if self.shape.family == "gemma3_text" else 1  # of layers that see all, and of those that see a window
        return kinds * 2 * self.itemsize * self.tokens * self.shape.head_width + self.masks()


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The output layer over the response tokens of one row, ``chunk`` at a time."""

    shape: ModelShape
    tokens: int
    chunk: int
    itemsize: int
    given: bool
    """Whether the chunk was given in the job, and bounds what is kept."""
    on_cpu: bool = False
    frozen: bool = False
    """Whether the matrix gets no gradient."""

    @property
    def _rows(self) -> int:
        return min(self.chunk, self.tokens)

    @property
    def kept(self) -> int:
        """Probabilities that are kept for the backward pass."""
        per_token = FLOAT * self.shape.vocabulary
        if self.shape.caps_logits:  # whose gradient needs more
            return 0
        if self.tokens <= self.chunk:
            return self.tokens * per_token
        if self.given or not self.on_cpu:
            return 0
        return min(self.tokens, _KEPT_BYTES // per_token // self.chunk * self.chunk) * per_token

    @property
    def room(self) -> int:
        """Two float32 matrices ``[chunk, vocabulary]``."""
        return 2 * FLOAT * self._rows * self.shape.vocabulary

    @property
    def forward(self) -> int:
        """At its fullest: with the logits as the matrix product gives them."""
        halves = self.itemsize * self._rows * self.shape.vocabulary if self.itemsize < FLOAT else 0
        return self.kept + self.room + halves

    @property
    def backward(self) -> int:
        """At its fullest, with the gradients of the states and of the matrix."""
        shape, several = self.shape, self.tokens > self.chunk
        matrix = 0 if self.frozen else shape.vocabulary * shape.hidden
        halves = self.itemsize < FLOAT
        logits = self.itemsize * self._rows * shape.vocabulary if halves else 0
        states = self.itemsize * self.tokens * shape.hidden
        # Of several chunks the gradient of the matrix is summed in float32. Beside it are one chunk's part of the sum
        # and that chunk's gradient of logits, which is let go of before the next one's logits.
        weights = FLOAT * matrix if several else self.itemsize * matrix
        if several and halves:
            weights += self.itemsize * matrix
        slopes = self.room // 2 if shape.caps_logits else 0
        return self.kept + self.room + slopes + logits + states + weights

    def with_exact_kl(self, *, gathered: bool) -> int:
        """At its fullest with the exact KL to a reference (``vocabulary_kl.py``), whose gradients are there before the
        head's: either a chunk's logits of both models and what is made of them, beside the gradient of the matrix and
        a chunk's part of it, or the head's own. The reference's states, and its matrix if it is ``gathered``, stay."""
        matrix = self.itemsize * self.shape.vocabulary * self.shape.hidden
        gradient = 0 if self.frozen else matrix
        states = self.itemsize * self.tokens * self.shape.hidden
        halves = 2 * self.itemsize if self.itemsize < FLOAT else 0
        of_chunk = self._rows * self.shape.vocabulary * (_KL_FLOATS * FLOAT + halves)
        fullest = max(self.kept + of_chunk + 2 * gradient, self.backward + gradient)
        return fullest + 2 * states + (matrix if gathered else 0)


def gpu_chunk(vocabulary: int, memory: int) -> int:
    """Tokens whose float32 logits take a 64th of a GPU's ``memory``, and 1 GiB at most."""
    return max(1, min(_MOST_CHUNK_BYTES, memory // _CHUNK_SHARE) // (FLOAT * vocabulary))


def cpu_chunk(shape: ModelShape) -> int:
    """Tokens whose logits stay in a CPU's cache, or make up for reading a large matrix anew."""
    if FLOAT * shape.vocabulary * shape.hidden > _LARGE_WEIGHT_BYTES:
        return _TOKENS_OF_A_LARGE_WEIGHT
    return max(_FEWEST_TOKENS, _CACHE_BYTES // (FLOAT * shape.vocabulary))
