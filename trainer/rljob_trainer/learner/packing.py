"""Which data index trains which sequences, in which micro-batches, and how a micro-batch becomes one packed row.

Pure numpy, no torch. A micro-batch is one row of tokens ``[N]`` without padding. Two things make the row shorter than
the sum of its sequences: a prompt that several of them share stands there once, and the last response token, whose
output nobody reads, is left out. What the row needs inside attention (which rows are queries, which are keys) is
described here as blocks of equal work; ``attention.py`` turns them into tensors. The last layer needs less: of a prompt
only its last row predicts anything.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from rljob_trainer.learner.protocol import Int64Array, SequenceBatch

Bins = list[Int64Array]

_BALANCED = 1.05
"""A partition whose fullest bin is within 5 % of the mean is not improved further by cutting prompt groups."""

_BLOCK_OVERHEAD = 4096
"""Cost of one more attention block, in attention scores (query times key): measured on a CPU, fewer are slower."""

_MAX_CUTS = 16


def ranges(starts: npt.ArrayLike, lengths: Int64Array) -> Int64Array:
    """The concatenation of ``arange(start, start + length)``, ``[sum(lengths)]``; ``starts`` may be one number."""
    ends = np.cumsum(lengths)
    shift = np.asarray(starts, dtype=np.int64) - (ends - lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(np.broadcast_to(shift, lengths.shape), lengths) + np.arange(total, dtype=np.int64)


def offsets_of(lengths: Int64Array) -> Int64Array:
    """``[S + 1]`` offsets of flat streams whose parts have these lengths."""
    result = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=result[1:])
    return result


def check_batch(batch: SequenceBatch) -> None:
    """Raises ``ValueError`` naming the stream whose length does not fit, or the sequence without a prompt."""
    if len(batch.prompt_lengths) != len(batch.response_lengths):
        raise ValueError(
            f"{len(batch.prompt_lengths)} prompt lengths but {len(batch.response_lengths)} response lengths"
        )
    if len(batch) and int(batch.prompt_lengths.min()) < 1:
        raise ValueError(f"sequence {int(batch.prompt_lengths.argmin())} has no prompt token; it needs at least one")
    total = int(batch.prompt_lengths.sum() + batch.response_lengths.sum())
    if len(batch.token_ids) != total:
        raise ValueError(f"token_ids has {len(batch.token_ids)} entries but the lengths sum to {total}")
    if batch.routed_experts is not None and len(batch.routed_experts) != total:
        raise ValueError(f"routed_experts has {len(batch.routed_experts)} entries but there are {total} tokens")
    tokens = int(batch.response_lengths.sum())
    for name in STREAMS:
        stream = getattr(batch, name)
        if stream is not None and len(stream) != tokens:
            raise ValueError(f"{name} has {len(stream)} entries but there are {tokens} response tokens")


STREAMS = tuple(
    f.name
    for f in fields(SequenceBatch)
    if f.name not in ("token_ids", "prompt_lengths", "response_lengths", "routed_experts")
)
"""The per-response-token fields of a batch."""


def take(batch: SequenceBatch, indices: Int64Array) -> SequenceBatch:
    """The sequences ``indices``, in that order, with all their streams."""
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths)[indices]
    tokens = ranges(offsets_of(batch.response_lengths)[indices], batch.response_lengths[indices])
    rows = ranges(starts, (batch.prompt_lengths + batch.response_lengths)[indices])
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        routed_experts=None if batch.routed_experts is None else batch.routed_experts[rows],
        prompt_lengths=batch.prompt_lengths[indices],
        response_lengths=batch.response_lengths[indices],
        **{name: stream[tokens] for name in STREAMS if (stream := getattr(batch, name)) is not None},
    )


def prompt_keys(batch: SequenceBatch) -> Int64Array:
    """``[S]`` numbers that are equal exactly where two sequences have the same prompt tokens."""
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths)[:-1]
    ids = np.ascontiguousarray(batch.token_ids)
    seen: dict[bytes, int] = {}
    keys = [
        seen.setdefault(ids[start : start + length].tobytes(), len(seen))
        for start, length in zip(starts.tolist(), batch.prompt_lengths.tolist(), strict=True)
    ]
    return np.asarray(keys, dtype=np.int64)


# --- who trains what -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """What planning needs to know of a batch; all ``[S]``."""

    prompts: Int64Array
    responses: Int64Array
    keys: Int64Array

    @classmethod
    def of(cls, batch: SequenceBatch) -> Lengths:
        return cls(batch.prompt_lengths, batch.response_lengths, prompt_keys(batch))

    def take(self, indices: Int64Array) -> Lengths:
        return Lengths(self.prompts[indices], self.responses[indices], self.keys[indices])

    def row_tokens(self, indices: Int64Array) -> int:
        """Upper bound of the row's length for these sequences: shared prompts count once."""
        _, first = np.unique(self.keys[indices], return_index=True)
        return int(self.prompts[indices[first]].sum() + self.responses[indices].sum())


def plan(
    lengths: Lengths, data_indices: int, token_budget: int, halved_from: int | None = None, count_multiple: int = 1
) -> list[Bins]:
    """Cuts one mini-batch: micro-batches ``[data index][micro-batch]``, each an array of positions (empty ones
    allowed).

    Data indices get about equal numbers of tokens; all have the same number of micro-batches, a multiple of
    ``count_multiple``, so collectives inside the model always meet; no micro-batch exceeds ``token_budget`` unless one
    sequence alone does. From ``halved_from`` row tokens on there are two micro-batches at least.
    """
    everything = np.arange(len(lengths.keys), dtype=np.int64)
    shares = balance(lengths, everything, data_indices)
    halved = halved_from is not None and len(everything) > 1 and lengths.row_tokens(everything) >= halved_from
    packed: list[Bins] = []
    count = 2 if halved else 1
    # Asked for more bins, a data index cuts its groups finer and may then need even more: until all agree.
    while not packed or len({len(bins) for bins in packed}) > 1 or len(packed[0]) % count_multiple:
        count = -(-max(count, *map(len, packed), 0) // count_multiple) * count_multiple
        packed = [pack(lengths, share, token_budget, at_least=count) for share in shares]
    return packed


def balance(lengths: Lengths, indices: Int64Array, bins: int) -> Bins:
    """Splits sequences into ``bins`` parts of about equal row length, keeping prompt groups together where it can."""
    if bins == 1:
        return [indices]
    best: Bins = []
    best_load = -1
    total = lengths.row_tokens(indices)
    for parts in (1, 2, 4, 8, 16):
        pieces = _pieces(lengths, indices, max(1, total // (bins * parts)))
        candidate = _longest_first(pieces, _sizes(lengths, pieces), bins)
        load = max(lengths.row_tokens(part) if len(part) else 0 for part in candidate)
        if best_load < 0 or load < best_load:
            best, best_load = candidate, load
        if best_load * bins <= _BALANCED * total:
            break
    return best


def pack(lengths: Lengths, indices: Int64Array, token_budget: int, at_least: int = 1) -> Bins:
    """Splits a data index's sequences into micro-batches under the budget, as few as that takes, evenly filled."""
    total = lengths.row_tokens(indices) if len(indices) else 0
    if total <= token_budget and at_least == 1:
        return [indices]
    count = max(at_least, -(-total // token_budget))
    # A piece of half the budget at most keeps bins full; only a single sequence can be longer than that.
    pieces = _pieces(lengths, indices, max(1, min(token_budget // 2, -(-total // count))))
    sizes = _sizes(lengths, pieces)
    limit = max([token_budget, *sizes])
    while True:
        bins = _longest_first(pieces, sizes, count)
        if count >= len(pieces) or all(lengths.row_tokens(part) <= limit for part in bins if len(part)):
            return bins
        count += 1


def _pieces(lengths: Lengths, indices: Int64Array, limit: int) -> list[Int64Array]:
    """Prompt groups, cut evenly where a group is longer than ``limit`` tokens (a sequence is never cut)."""
    order = indices[np.argsort(lengths.keys[indices], kind="stable")]
    cuts = np.flatnonzero(np.diff(lengths.keys[order])) + 1
    if len(order) == len(cuts) + 1:
        return list(order[:, None])
    pieces: list[Int64Array] = []
    for group in np.split(order, cuts):
        if not len(group):
            continue
        prompt = int(lengths.prompts[group[0]])
        responses = int(lengths.responses[group].sum())
        parts = 1
        if len(group) > 1 and prompt + responses > limit:
            # Each part repeats the prompt, so only what is left of the limit holds responses.
            parts = min(len(group), max(1, -(-responses // max(1, limit - prompt))))
        by_length = group[np.argsort(-lengths.responses[group], kind="stable")] if parts > 1 else group
        pieces.extend(by_length[part::parts] for part in range(parts))
    return pieces


def _sizes(lengths: Lengths, pieces: list[Int64Array]) -> list[int]:
    """Row tokens of each piece, whose sequences share a prompt."""
    if not pieces:
        return []
    starts = np.cumsum([0, *map(len, pieces)])[:-1]
    order = np.concatenate(pieces)
    sizes: list[int] = (lengths.prompts[order[starts]] + np.add.reduceat(lengths.responses[order], starts)).tolist()
    return sizes


def _longest_first(pieces: list[Int64Array], sizes: list[int], bins: int) -> Bins:
    """Longest processing time first: each piece goes to the bin that holds the fewest tokens so far."""
    heap = [(0, b) for b in range(bins)]
    chosen: list[list[Int64Array]] = [[] for _ in range(bins)]
    for piece in sorted(range(len(pieces)), key=lambda i: (-sizes[i], i)):
        load, b = heapq.heappop(heap)
        chosen[b].append(pieces[piece])
        heapq.heappush(heap, (load + sizes[piece], b))
    return [np.sort(np.concatenate(c)) if c else np.empty(0, dtype=np.int64) for c in chosen]


# --- one packed row --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """B segments whose attention is computed together. They stand one after the other in the packed row.

    Without ``key_rows`` a segment attends to itself, causally; its last ``query_lengths[b]`` rows ask. With it,
    segment b (a response whose prompt is shared) attends to ``key_rows[b]``, of which its own tokens are the last
    ``query_lengths[b]``.
    """

    query_lengths: Int64Array  # [B]
    key_lengths: Int64Array  # [B]
    key_rows: Int64Array | None  # [B, max(key_lengths)], padded with 0


@dataclass(frozen=True, slots=True)
class Row:
    """S sequences as one row of N tokens."""

    source: Int64Array  # [N] index into the batch's token_ids
    positions: Int64Array  # [N]
    blocks: tuple[Block, ...]  # their queries cover the row, in order
    last_blocks: tuple[Block, ...]  # the same segments with those queries only that the last layer needs
    last_rows: Int64Array  # [M] where those stand, ascending
    output_rows: Int64Array  # [tokens] the row whose output predicts each response token
    targets: Int64Array  # [tokens] index into the batch's token_ids
    stream: Int64Array  # [tokens] index into the batch's response streams
    offsets: Int64Array  # [S + 1] of the streams of this row
    final_rows: Int64Array | None  # [S] the row at each sequence's last token


def build_row(lengths: Lengths, indices: Int64Array, *, final: bool = False, multiple: int = 1) -> Row:
    """Lays sequences ``indices`` of a batch out as one row. ``final`` keeps the last response token of each.

    The row's length is a multiple of ``multiple``: a segment that nobody reads, of the batch's first token, fills it
    up. An empty ``indices`` gives a row of such tokens alone: what a rank runs when it has no work left but must take
    part in the collectives of the others.
    """
    if not len(indices):
        none = np.empty(0, dtype=np.int64)
        zero = np.zeros(1, dtype=np.int64)
        block = (Block(np.array([multiple]), np.array([multiple]), None),)
        last = (Block(np.ones(1, dtype=np.int64), np.array([multiple]), None),)
        source, positions = np.zeros(multiple, dtype=np.int64), np.arange(multiple, dtype=np.int64)
        rows = np.array([multiple - 1])
        return Row(source, positions, block, last, rows, none, none, none, zero, none if final else None)

    starts = offsets_of(lengths.prompts + lengths.responses)[indices]
    prompts, responses = lengths.prompts[indices], lengths.responses[indices]
    tails = responses if final else np.maximum(responses - 1, 0)  # response tokens that stand in the row
    _, first, group, count = np.unique(
        lengths.keys[indices], return_index=True, return_inverse=True, return_counts=True
    )
    shared = count[group] > 1
    heads = first[shared[first]]  # one sequence of each shared prompt stands for it
    alone = np.flatnonzero(~shared)
    branches = np.flatnonzero(shared & (tails > 0))

    # Segments that attend to themselves: sequences with a prompt of their own, and shared prompts.
    whole = np.concatenate([alone, heads])
    whole_lengths = np.concatenate([prompts[alone] + tails[alone], prompts[heads]])
    whole_last = np.concatenate([1 + tails[alone], np.ones(len(heads), dtype=np.int64)])
    filling = -(int(whole_lengths.sum()) + int(tails[branches].sum())) % multiple
    if filling:
        # Belongs to no sequence: number S.
        whole, whole_lengths = np.append(whole, len(indices)), np.append(whole_lengths, filling)
        whole_last = np.append(whole_last, 1)
    whole_blocks = _blocks(whole_lengths, whole_lengths)
    # Segments that continue a shared prompt.
    branch_lengths = tails[branches]
    branch_blocks = _blocks(branch_lengths, prompts[branches] + branch_lengths)

    order = np.concatenate([*whole_blocks]) if whole_blocks else np.empty(0, dtype=np.int64)
    branch_order = np.concatenate([*branch_blocks]) if branch_blocks else np.empty(0, dtype=np.int64)
    seg_lengths = np.concatenate([whole_lengths[order], branch_lengths[branch_order]])
    seg_starts = offsets_of(seg_lengths)
    seg_last = np.concatenate([whole_last[order], branch_lengths[branch_order]])

    # Where in the row each sequence's prompt and the tokens after it begin.
    prompt_row = np.zeros(len(indices) + 1, dtype=np.int64)
    prompt_row[whole[order]] = seg_starts[: len(order)]
    prompt_row = prompt_row[:-1]
    prompt_row = np.where(shared, prompt_row[first][group], prompt_row)
    tail_row = prompt_row + prompts
    tail_row[branches[branch_order]] = seg_starts[len(order) : -1]

    blocks = [Block(whole_lengths[part], whole_lengths[part], None) for part in whole_blocks]
    last_blocks = [Block(whole_last[part], whole_lengths[part], None) for part in whole_blocks]
    for part in branch_blocks:
        member = branches[part]
        queries, keys = branch_lengths[part], prompts[member] + branch_lengths[part]
        column = np.arange(int(keys.max()), dtype=np.int64)[None]
        head = prompts[member][:, None]
        rows = np.where(column < head, prompt_row[member][:, None] + column, tail_row[member][:, None] + column - head)
        blocks.append(Block(queries, keys, np.where(column < keys[:, None], rows, 0)))
        last_blocks.append(blocks[-1])

    source_starts = np.concatenate([np.append(starts, 0)[whole[order]], (starts + prompts)[branches[branch_order]]])
    source = ranges(source_starts, seg_lengths)
    if filling:
        begin = int(seg_starts[np.flatnonzero(whole[order] == len(indices))[0]])
        source[begin : begin + filling] = 0
    position_starts = np.concatenate([np.zeros(len(order), dtype=np.int64), prompts[branches[branch_order]]])
    step = ranges(0, responses)  # 0 .. R - 1 within each response
    last_prompt_row = np.repeat(prompt_row + prompts - 1, responses)
    return Row(
        source=source,
        positions=ranges(position_starts, seg_lengths),
        blocks=tuple(blocks),
        last_blocks=tuple(last_blocks),
        last_rows=ranges(seg_starts[1:] - seg_last, seg_last),
        output_rows=np.where(step == 0, last_prompt_row, np.repeat(tail_row, responses) + step - 1),
        targets=ranges(starts + prompts, responses),
        stream=ranges(offsets_of(lengths.responses)[indices], responses),
        offsets=offsets_of(responses),
        final_rows=np.where(responses > 0, tail_row + responses - 1, prompt_row + prompts - 1) if final else None,
    )


def _blocks(queries: Int64Array, keys: Int64Array) -> list[Int64Array]:
    """Groups segments of similar length so that padding plus a fixed cost per block is small.

    The best contiguous cut of the sorted segments by dynamic programming over at most ``_MAX_CUTS`` cut positions.
    Returns index arrays that cover ``arange(len(queries))``.
    """
    if not len(queries):
        return []
    best: tuple[float, list[Int64Array]] | None = None
    orders = [np.lexsort((keys, queries))]
    if not np.array_equal(queries, keys):
        orders.append(np.lexsort((queries, keys)))
    for order in orders:
        q, k = queries[order], keys[order]
        ends = np.flatnonzero((np.diff(q) != 0) | (np.diff(k) != 0)) + 1
        if len(ends) > _MAX_CUTS:
            ends = ends[np.linspace(0, len(ends) - 1, _MAX_CUTS).astype(np.int64)]
        edges = np.concatenate([[0], ends, [len(q)]])
        q_max, k_max = np.maximum.reduceat(q, edges[:-1]), np.maximum.reduceat(k, edges[:-1])
        cost = np.zeros(len(edges))
        back = np.zeros(len(edges), dtype=np.int64)
        for j in range(1, len(edges)):
            q_block = np.maximum.accumulate(q_max[:j][::-1])[::-1]  # longest query of segments i .. j
            k_block = np.maximum.accumulate(k_max[:j][::-1])[::-1]
            options = cost[:j] + _BLOCK_OVERHEAD + (edges[j] - edges[:j]) * q_block * k_block
            back[j] = int(options.argmin())
            cost[j] = options[back[j]]
        if best is None or cost[-1] < best[0]:
            parts: list[Int64Array] = []
            j = len(edges) - 1
            while j > 0:
                parts.append(order[edges[back[j]] : edges[j]])
                j = int(back[j])
            best = (float(cost[-1]), parts[::-1])
    assert best is not None
    return best[1]
