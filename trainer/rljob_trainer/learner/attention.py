"""Attention over packed rows, registered with transformers under the name ``ATTENTION``.

A packed row ``[1, N]`` holds many sequences (``packing.build_row``); this module makes each token attend to its own
sequence only, at a cost that follows the real tokens: no ``[N, N]`` mask is ever built. On the CPU, and in float32,
each block of segments is padded and handed to SDPA; on a GPU in half precision one variable-length flash call does
all. Scores with a soft cap, which neither knows, are computed block by block everywhere (``models/soft_capping.py``).
The model passes the row's tensors through as the keyword argument ``packed``. Without it the function is
transformers' own SDPA, so that an engine can run the same live model its usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rljob_trainer.learner.context import Context
from rljob_trainer.learner.moves import upload
from rljob_trainer.learner.packing import Block, Row, ranges
from rljob_trainer.learner.prefixes import offsets_of
from rljob_trainer.models.soft_capping import capped_attention

ATTENTION = "rljob_packed"


class _Spread(torch.autograd.Function):
    """Copies rows of ``x [N, D]`` into padded places ``index [M]``; the gradient comes back from the places ``home``.

    For rows that are used once: ``home [n]`` is the place of each of the n rows from ``first`` on.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(home)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (home,) = ctx.saved_tensors
        return grad.index_select(0, home), None, None


class _Collect(torch.autograd.Function):
    """The opposite: takes the real rows out of a padded block; padding gets zero gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(home)
        ctx.rows = x.shape[0]
        return x.index_select(0, home)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (home,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, home, grad), None


class _SpreadInto(torch.autograd.Function):
    """Puts rows ``x [M, D]`` at ``rows [M]`` of ``[N, D]``; the others are zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return x.new_zeros(total, x.shape[1]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None


class _GatherRows(torch.autograd.Function):
    """``x[index]`` for rows that may be used many times.

    The gradient of a row is the sum over its uses, in a fixed order (repeatable, and several times faster than
    ``index_add``): ``order`` lists the uses row by row, ``starts [N]`` says where each row's uses begin.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(order, starts)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        order, starts = ctx.saved_tensors
        return F.embedding_bag(order, grad.contiguous(), starts, mode="sum"), None, None, None


_spread: Callable[..., torch.Tensor] = _Spread.apply
_collect: Callable[..., torch.Tensor] = _Collect.apply
_spread_into: Callable[..., torch.Tensor] = _SpreadInto.apply
_gather_rows: Callable[..., torch.Tensor] = _GatherRows.apply


_whole: Callable[..., torch.Tensor] = torch.ops.aten._unsafe_view
"""``whole(x, shape)``: x in that shape, and not as a view of something. A compiled program is made for what its input
is a view of, too, which differs with a row's blocks (``compiled.py``)."""


@dataclass(slots=True)
class Gather:
    """The tensors of one gather: rows that may be used many times."""

    index: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, index: np.ndarray, rows: int, real: np.ndarray | None = None) -> Gather:
        """``index [M]`` into ``rows`` rows; places where ``real [M]`` is False carry no gradient."""
        places = np.arange(len(index)) if real is None else np.flatnonzero(real)
        used = index[places]
        return cls(
            torch.from_numpy(index),
            torch.from_numpy(places[np.argsort(used, kind="stable")]),
            torch.from_numpy(offsets_of(np.bincount(used, minlength=rows))[:-1].copy()),
        )

    def to(self, device: torch.device) -> Gather:
        return Gather(*(upload(t, device) for t in (self.index, self.order, self.starts)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _gather_rows(x, self.index, self.order, self.starts)


@dataclass(slots=True)
class Spread:
    """The tensors that pad segments which stand one after the other."""

    index: torch.Tensor  # [B * longest] the row for each padded place
    home: torch.Tensor  # [rows] the padded place of each row

    @classmethod
    def of(cls, lengths: np.ndarray) -> Spread | None:
        """None means that no copy is needed: all segments have the same length."""
        longest = int(lengths.max())
        if int(lengths.min()) == longest:
            return None
        column = np.arange(longest)[None]
        starts = offsets_of(lengths)[:-1, None]
        index = np.where(column < lengths[:, None], starts + column, 0).reshape(-1)
        home = ranges(np.arange(len(lengths)) * longest, lengths)
        return cls(torch.from_numpy(index), torch.from_numpy(home))

    def to(self, device: torch.device) -> Spread:
        return Spread(upload(self.index, device), upload(self.home, device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _spread(x, self.index, self.home)


@dataclass(slots=True)
class PackedBlock:
    """A block's index tensors."""

    batch: int
    queries: int  # longest query of the block
    keys: int
    rows: int  # real query rows
    own_keys: int  # rows of the block's segments, whether they ask or not
    spread: Spread | None  # of the queries
    key_spread: Spread | None  # of keys and values, where there is no gather
    gather: Gather | None  # key rows of a branch block, from the whole row
    bound: torch.Tensor | None  # [B or 1, queries] last key position that each query sees; None: plain causal
    first: tuple[int, int]  # least and greatest position of a segment's first query
    masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, block: Block, row_tokens: int) -> PackedBlock:
        lengths, key_lengths = block.query_lengths, block.key_lengths
        longest, keys = int(lengths.max()), int(key_lengths.max())
        gather = key_spread = bound = None
        heads = np.unique(key_lengths - lengths)
        if block.key_rows is not None:
            real = np.arange(keys)[None] < key_lengths[:, None]
            gather = Gather.of(block.key_rows.reshape(-1), row_tokens, real.reshape(-1))
        else:
            key_spread = Spread.of(key_lengths)
        if not np.array_equal(lengths, key_lengths):
            first = heads if len(heads) == 1 else key_lengths - lengths
            # A padded query still sees the last key: a row without any would be NaN.
            bound = torch.from_numpy(np.minimum(first[:, None] + np.arange(longest)[None], keys - 1))
        return cls(
            batch=len(lengths),
            queries=longest,
            keys=keys,
            rows=int(lengths.sum()),
            own_keys=block.tokens,
            spread=Spread.of(lengths),
            key_spread=key_spread,
            gather=gather,
            bound=bound,
            first=(int(heads[0]), int(heads[-1])),
        )

    def to(self, device: torch.device) -> PackedBlock:
        return replace(
            self,
            spread=None if self.spread is None else self.spread.to(device),
            key_spread=None if self.key_spread is None else self.key_spread.to(device),
            gather=None if self.gather is None else self.gather.to(device),
            bound=None if self.bound is None else upload(self.bound, device),
            masks={},
        )

    def mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """Additive mask ``[B or 1, 1, queries, keys]``, made once per row and used by every layer; None: causal."""
        if window is not None and window >= self.keys:
            window = None
        if self.bound is None and window is None:
            return None
        key = (window, like.dtype)
        if key not in self.masks:
            bound = self.bound
            if bound is None:
                bound = torch.arange(self.queries, device=like.device)[None]
            column = torch.arange(self.keys, device=like.device)
            seen = column <= bound[:, :, None]
            if window is not None:
                seen &= column > bound[:, :, None] - window
            mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
            self.masks[key] = mask.masked_fill_(~seen, float("-inf"))[:, None]
        return self.masks[key]


@dataclass(slots=True)
class Varlen:
    """What the variable-length flash kernel wants: cumulative lengths, and key rows where sequences begin alike."""

    cu_queries: torch.Tensor  # [segments + 1] int32
    cu_keys: torch.Tensor
    max_queries: int
    max_keys: int
    gather: Gather | None

    @classmethod
    def of(cls, blocks: Sequence[Block], row_tokens: int) -> Varlen:
        queries = np.concatenate([b.query_lengths for b in blocks])
        keys = np.concatenate([b.key_lengths for b in blocks])
        gather = None
        if any(b.key_rows is not None for b in blocks):
            parts, start = [], 0
            for block in blocks:
                if block.key_rows is None:
                    rows = int(block.key_lengths.sum())
                    parts.append(np.arange(start, start + rows))
                    start += rows
                else:  # these stand behind all that attend to themselves
                    column = np.arange(block.key_rows.shape[1])[None]
                    parts.append(block.key_rows[column < block.key_lengths[:, None]])
            gather = Gather.of(np.concatenate(parts), row_tokens)
        cu_queries, cu_keys = (torch.from_numpy(offsets_of(lengths).astype(np.int32)) for lengths in (queries, keys))
        return cls(cu_queries, cu_keys, int(queries.max()), int(keys.max()), gather)

    def to(self, device: torch.device) -> Varlen:
        gather = None if self.gather is None else self.gather.to(device)
        cu_queries, cu_keys = upload(self.cu_queries, device), upload(self.cu_keys, device)
        return Varlen(cu_queries, cu_keys, self.max_queries, self.max_keys, gather)


@dataclass(slots=True)
class Packed:
    """Attention's view of one row: either blocks or the variable-length description."""

    blocks: list[PackedBlock]
    varlen: Varlen | None
    rows: torch.Tensor | None = None
    """[M] those that ask and whose output counts, ascending; None: all."""
    last: Packed | None = None
    """What the last layer needs, if that is less."""
    context: Context | None = None
    """Who else computes this row; None: nobody."""
    experts: torch.Tensor | None = None
    """[N, layers, k], of this rank's tokens: which experts they are sent to (``routing_replay.py``); None: those that
    the routers choose."""

    @classmethod
    def of(
        cls,
        row: Row,
        device: torch.device,
        dtype: torch.dtype,
        *,
        outputs_only: bool = False,
        context: Context | None = None,
        soft_capped: bool = False,
    ) -> Packed:
        """``dtype`` is the one that attention will compute in: flash kernels want half precision and a GPU.

        ``outputs_only``: with a description for a last layer that computes the outputs alone (``last_layer.py``).
        ``soft_capped``: for attention whose scores have a cap, which no flash kernel knows.
        """
        flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not soft_capped

        def described(blocks: Sequence[Block]) -> Packed:
            if flash:
                return cls([], Varlen.of(blocks, len(row.source)).to(device))
            return cls([PackedBlock.of(block, len(row.source)).to(device) for block in blocks], None)

        packed = described(row.blocks)
        packed.context = context
        if outputs_only and context is None and len(row.last_rows) < len(row.source):
            packed.last = described(row.last_blocks)
            packed.last.rows = upload(torch.from_numpy(row.last_rows), device)
        return packed

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """The rows ``[M, D]`` of ``x [N, D]`` whose output counts."""
        return x if self.rows is None else _collect(x, self.rows)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: Packed | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Query ``[1, H, N, D]``, key and value ``[1, KV, N, D]``; returns ``[1, N, H, D]`` and no weights.

    Of a row that several ranks compute, each gives and gets its own tokens (``context.py``).

    ``sliding_window`` is the number of positions a query sees, itself included; ``softcap`` the cap of the scores.
    Raises ``ValueError`` for variants of attention that this function does not compute (attention sinks; without
    packed rows a soft cap, and a window that is shorter than the sequence).
    """
    if packed is None:
        if softcap is not None or (sliding_window is not None and sliding_window < key.shape[2]):
            raise ValueError(f"{type(module).__name__}: soft caps and windows are supported only for packed rows")
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return out, None
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"packed rows do not support attention with s_aux ({type(module).__name__})")
    _, heads, tokens, dim = query.shape
    query, key, value = (x[0].transpose(0, 1).reshape(tokens, -1) for x in (query, key, value))
    out = attended(packed, packed.outputs(query), key, value, dim, scaling, sliding_window, softcap)
    if packed.rows is not None:
        out = _spread_into(out, packed.rows, tokens)
    return _whole(out.contiguous(), (1, tokens, heads, dim)), None


def attended(
    packed: Packed,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dim: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """``[M, H * dim]`` from the queries ``[M, H * dim]`` of the rows that ask, key and value ``[N, KV * dim]``.

    Of a row that several ranks compute, these are a rank's own tokens, and so is what it gets.
    """
    if packed.context is not None:
        alone = replace(packed, context=None)
        query, key, value = packed.context.to_heads(query, key, value, dim)
        return packed.context.to_rows(attended(alone, query, key, value, dim, scaling, window, softcap))
    rows = [query, key, value]
    if packed.varlen is not None:
        if softcap is not None:
            raise ValueError("attention has a soft cap, but its rows were described without one (soft_capped)")
        return _flash(rows, packed.varlen, dim, scaling, window)
    parts = list(_by_block(rows, packed.blocks, dim, scaling, window, softcap))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _by_block(
    rows: list[torch.Tensor],
    blocks: list[PackedBlock],
    dim: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Iterator[torch.Tensor]:
    """Yields each block's output rows ``[rows, H * D]``."""
    query, key, value = rows
    own_queries = query.split([block.rows for block in blocks])
    own_keys, own_values = (x.split([block.own_keys for block in blocks]) for x in (key, value))
    for block, q, k, v in zip(blocks, own_queries, own_keys, own_values, strict=True):
        if block.spread is not None:
            q = block.spread(q)
        if block.gather is not None:
            k, v = block.gather(key), block.gather(value)
        elif block.key_spread is not None:
            k, v = block.key_spread(k), block.key_spread(v)
        q, k, v = (
            x.view(block.batch, length, -1, dim).transpose(1, 2)
            for x, length in ((q, block.queries), (k, block.keys), (v, block.keys))
        )
        if softcap is not None:
            out = capped_attention(
                q,
                k,
                v,
                cap=softcap,
                scale=dim**-0.5 if scaling is None else scaling,
                window=window,
                seen=block.bound,
                first=block.first,
            )
        else:
            mask = block.mask(window, query)
            grouped = q.shape[1] != k.shape[1]
            if grouped and q.is_cuda:
                # Of CUDA's kernels only flash knows groups, which has neither float32 nor masks: the one that is left
                # would keep every score.
                k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
                grouped = False
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        out = out.transpose(1, 2).reshape(block.batch * block.queries, -1)
        yield out if block.spread is None else _collect(out, block.spread.home)


def _flash(
    rows: list[torch.Tensor], varlen: Varlen, dim: int, scaling: float | None, window: int | None
) -> torch.Tensor:
    """One variable-length flash call. Causal there means that the last query sees the last key of its segment."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = rows
    if varlen.gather is not None:
        key, value = varlen.gather(key), varlen.gather(value)
    tokens = query.shape[0]
    query, key, value = (x.view(x.shape[0], -1, dim) for x in (query, key, value))
    kernel: Callable[..., Any] = varlen_attn
    times, grouped = query.shape[1] // key.shape[1], dict[str, bool]()
    if times > 1 and "enable_gqa" in signature(varlen_attn).parameters:
        grouped = {"enable_gqa": True}
    elif times > 1:  # torch 2.11
        key, value = (x.repeat_interleave(times, 1) for x in (key, value))
    out = kernel(
        query,
        key,
        value,
        varlen.cu_queries,
        varlen.cu_keys,
        varlen.max_queries,
        varlen.max_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(out, torch.Tensor)
    return out.reshape(tokens, -1)


AttentionInterface.register(ATTENTION, packed_attention)
