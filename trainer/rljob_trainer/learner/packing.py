"""Which data index trains which sequences, in which micro-batches, and how a micro-batch becomes one packed row.

Pure numpy, no torch. A micro-batch is one row of tokens ``[N]`` without padding. Two things make the row shorter than
the sum of its sequences: what several of them begin with (a prompt, whole turns: ``prefixes.py``) stands there once,
and the last response token, whose output nobody reads, is left out. What the row needs inside attention (which rows are
queries, which are keys) is described here as blocks of equal work; ``attention.py`` turns them into tensors. The last
layer needs less: of a prompt only its last row predicts anything.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rljob_trainer.learner.prefixes import Lengths, offsets_of
from rljob_trainer.learner.protocol import Int64Array, SequenceBatch

Bins = list[Int64Array]

_BALANCED = 1.05
"""A partition whose fullest bin is within 5 % of the mean is not improved further by cutting groups."""

_BLOCK_OVERHEAD = 4096
"""Cost of one more attention block, in attention scores (query times key): measured on a CPU, fewer are slower."""

_MAX_CUTS = 16

_SPREAD = 3
"""A row may hold sequences that would be so many times its tokens if whole prompts alone were shared. In attention each
has a copy of all keys that it sees, and a row is planned to have those of whole prompts (``LargestRow``)."""


def ranges(starts: npt.ArrayLike, lengths: Int64Array) -> Int64Array:
    """The concatenation of ``arange(start, start + length)``, ``[sum(lengths)]``; ``starts`` may be one number."""
    ends = np.cumsum(lengths)
    shift = np.asarray(starts, dtype=np.int64) - (ends - lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(np.broadcast_to(shift, lengths.shape), lengths) + np.arange(total, dtype=np.int64)


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


# --- who trains what -------------------------------------------------------------------------------------------------


def plan(
    lengths: Lengths, data_indices: int, token_budget: int, halved_from: int | None = None, count_multiple: int = 1
) -> list[Bins]:
    """Cuts one mini-batch: micro-batches ``[data index][micro-batch]``, each an array of positions (empty ones
    allowed).

    Data indices get about equal numbers of tokens; all have the same number of micro-batches, a multiple of
    ``count_multiple``, so collectives inside the model always meet; no micro-batch exceeds ``token_budget`` unless one
    sequence alone does. From ``halved_from`` row tokens on there are two micro-batches at least.
    """
    everything = np.arange(len(lengths), dtype=np.int64)
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
    """Splits sequences into ``bins`` parts of about equal row length, keeping those that begin alike together where it
    can."""
    if bins == 1:
        return [indices]
    best: Bins = []
    best_load = -1
    total = lengths.row_tokens(indices)
    for parts in (1, 2, 4, 8, 16):
        pieces = _pieces(lengths, indices, max(1, total // (bins * parts)), repeats=False)
        candidate, _ = _longest_first(pieces, _sizes(lengths, pieces), bins)
        load = max(lengths.row_tokens(part) if len(part) else 0 for part in candidate)
        if best_load < 0 or load < best_load:
            best, best_load = candidate, load
        if best_load * bins <= _BALANCED * total:
            break
    return best


def pack(lengths: Lengths, indices: Int64Array, token_budget: int, at_least: int = 1) -> Bins:
    """Splits a data index's sequences into micro-batches under the budget, as few as that takes, evenly filled."""
    order, common = lengths.sorted(indices)
    total = int(lengths.totals[indices].sum() - common.sum())
    spread = int(_spread(lengths, indices[order], common).sum())
    if total <= token_budget and spread <= _SPREAD * token_budget and at_least == 1:
        return [indices]
    count = max(at_least, -(-total // token_budget))
    # Pieces of half the budget at most keep bins full; larger ones compute less twice.
    halves = _packed(lengths, indices, token_budget, count, max(1, min(token_budget // 2, -(-total // count))))
    if total == int(lengths.totals[indices].sum()):  # nothing is computed twice
        return halves
    wholes = _packed(lengths, indices, token_budget, count, token_budget)
    return min(halves, wholes, key=lambda bins: (len(bins), sum(lengths.row_tokens(part) for part in bins)))


def _packed(lengths: Lengths, indices: Int64Array, token_budget: int, count: int, piece: int) -> Bins:
    """``count`` bins under the budget, or more, of pieces of so many tokens; only a single sequence can be longer."""
    pieces = _pieces(lengths, indices, piece)
    sizes = _sizes(lengths, pieces)
    spreads = np.zeros(len(lengths), dtype=np.int64)
    order, common = lengths.sorted(indices)
    spreads[indices[order]] = _spread(lengths, indices[order], common)
    limit = max([token_budget, *sizes])
    widest = max([_SPREAD * token_budget, *(int(spreads[part].sum()) for part in pieces)])

    def filled(count: int) -> Bins | None:
        bins, loads = _longest_first(pieces, sizes, count)
        # What two pieces of one bin have in common counts once: such a bin may hold more than it seems.
        full = [part for part, load in zip(bins, loads, strict=True) if load > limit]
        fits = all(lengths.row_tokens(part) <= limit for part in full)
        fits = fits and all(spreads[part].sum() <= widest for part in bins)
        return bins if fits or count >= len(pieces) else None

    # Each try takes time by the number of pieces: in growing steps until one fits, and then back.
    too_few, found = count - 1, filled(count)
    while found is None:
        too_few, count = count, count + max(1, count // 16)
        found = filled(count)
    while count - too_few > 1:
        between = (count + too_few) // 2
        fewer = filled(between)
        if fewer is None:
            too_few = between
        else:
            count, found = between, fewer
    return found


def _spread(lengths: Lengths, order: Int64Array, common: Int64Array) -> Int64Array:
    """``[n]`` the tokens that each of these sorted sequences adds where whole prompts alone are shared."""
    prompts = lengths.prompts[order]
    again: Int64Array = np.where(common >= prompts, prompts, 0)
    return lengths.totals[order] - again


def _pieces(lengths: Lengths, indices: Int64Array, limit: int, *, repeats: bool = True) -> list[Int64Array]:
    """Groups of sequences that begin alike, cut evenly where a group is longer than ``limit`` tokens (a sequence is
    never cut). ``repeats``: whether what all parts of a group begin with counts for each of them, and their keys."""
    order, common = lengths.sorted(indices)
    order = indices[order]
    starts = np.flatnonzero(common == 0)
    if len(starts) == len(order):
        return list(order[:, None])
    group = _Sorted(lengths.totals[order] - common, common, _spread(lengths, order, common), limit, repeats)
    pieces: list[Int64Array] = []
    for start, stop in pairwise([*starts.tolist(), len(order)]):
        if stop - start == 1 or group.fits(start, stop):
            pieces.append(order[start:stop])
        else:
            pieces += [order[part] for part in group.cut(start, stop)]
    return pieces


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Sorted sequences that are to be cut into parts."""

    own: Int64Array
    """``[n]`` the tokens that each adds to the one before it."""
    common: Int64Array
    """``[n]`` those that it does not."""
    spread: Int64Array
    """``[n]`` those that it would add if whole prompts alone were shared."""
    limit: int
    repeats: bool

    def fits(self, start: int, stop: int) -> bool:
        """Whether ``start .. stop`` are short enough together."""
        return self.own[start:stop].sum() <= self.limit and self._narrow(self.spread[start:stop].sum())

    def _narrow(self, spread: int) -> bool:
        return not self.repeats or spread <= _SPREAD * self.limit

    def cut(self, start: int, stop: int) -> list[Int64Array]:
        """Cuts the group ``start .. stop`` where it first goes separate ways, and what is too long even then where that
        goes separate ways. Returns the places of each part's sequences."""
        pieces: list[Int64Array] = []
        left = [(start, stop)]
        while left:
            start, stop = left.pop()
            behind = self.common[start + 1 : stop]
            shared = int(behind.min())
            edges = np.concatenate([[start], np.flatnonzero(behind == shared) + start + 1, [stop]])
            counts = np.diff(edges)
            sizes = np.add.reduceat(self.own[:stop], edges[:-1])
            sizes[0] -= shared - int(self.common[start])
            spreads = np.add.reduceat(self.spread[:stop], edges[:-1])
            # Each part repeats what is shared, so only what is left of the limit holds what follows.
            room = max(1, self.limit - shared) if self.repeats else self.limit
            too_long = (sizes > room) | [not self._narrow(spread) for spread in spreads.tolist()]
            # What goes separate ways further on is cut there, and a single sequence is a part of its own.
            left += [(int(edges[n]), int(edges[n + 1])) for n in np.flatnonzero(too_long & (counts > 1))]
            pieces += [np.arange(edges[n], edges[n + 1]) for n in np.flatnonzero(too_long & (counts == 1))]
            small = np.flatnonzero(~too_long)
            by_size = small[np.argsort(-sizes[small], kind="stable")]
            parts = min(len(small), max(1, -(-int(sizes[small].sum()) // room)))
            while (
                self.repeats
                and parts < len(small)
                and not all(
                    sizes[by_size[n::parts]].sum() <= room and self._narrow(spreads[by_size[n::parts]].sum())
                    for n in range(parts)
                )
            ):
                parts += 1
            for part in range(parts):
                taken = np.sort(by_size[part::parts])
                pieces.append(ranges(edges[taken], counts[taken]))
        return pieces


def _sizes(lengths: Lengths, pieces: list[Int64Array]) -> list[int]:
    """Row tokens of each piece, whose sequences are sorted."""
    if not pieces:
        return []
    starts = offsets_of(np.array([len(piece) for piece in pieces]))[:-1]
    order = np.concatenate(pieces)
    common = lengths.between(lengths.places[order])
    common[starts] = 0
    sizes: list[int] = np.add.reduceat(lengths.totals[order] - common, starts).tolist()
    return sizes


def _longest_first(pieces: list[Int64Array], sizes: list[int], bins: int) -> tuple[Bins, list[int]]:
    """Longest processing time first: each piece goes to the bin that holds the fewest tokens so far. Returned with the
    bins' tokens, piece by piece."""
    heap = [(0, b) for b in range(bins)]
    chosen: list[list[Int64Array]] = [[] for _ in range(bins)]
    for piece in sorted(range(len(pieces)), key=lambda i: (-sizes[i], i)):
        load, b = heap[0]
        chosen[b].append(pieces[piece])
        heapq.heapreplace(heap, (load + sizes[piece], b))
    loads = [0] * bins
    for load, b in heap:
        loads[b] = load
    return [np.sort(np.concatenate(c)) if c else np.empty(0, dtype=np.int64) for c in chosen], loads


# --- one packed row --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """B segments whose attention is computed together. They stand one after the other in the packed row.

    Without ``key_rows`` a segment attends to itself, causally; its last ``query_lengths[b]`` rows ask. With it,
    segment b (what a sequence adds to those that begin alike) attends to ``key_rows[b]``, of which its own tokens are
    the last ones, and of those the last ``query_lengths[b]`` ask.
    """

    tokens: int  # rows of all segments, those that do not ask too
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
        block = (Block(multiple, np.array([multiple]), np.array([multiple]), None),)
        last = (Block(multiple, np.ones(1, dtype=np.int64), np.array([multiple]), None),)
        source, positions = np.zeros(multiple, dtype=np.int64), np.arange(multiple, dtype=np.int64)
        rows = np.array([multiple - 1])
        return Row(source, positions, block, last, rows, none, none, none, zero, none if final else None)

    starts = offsets_of(lengths.totals)[indices]
    prompts, responses = lengths.prompts[indices], lengths.responses[indices]
    tails = responses if final else np.maximum(responses - 1, 0)  # response tokens that stand in the row
    held = prompts + tails
    # What each sequence adds to the one before it in the sorted order is a segment: "own" of its tokens, behind those
    # "common" ones that stand in the row already.
    in_order, among = lengths.sorted(indices)
    among[1:] = np.minimum(among[1:], np.minimum(held[in_order][1:], held[in_order][:-1]))
    common = np.empty_like(among)
    common[in_order] = among
    own = held - common

    # Segments that attend to themselves: whole sequences. And those that go on from what others begin with.
    whole = np.flatnonzero(common == 0)
    whole_lengths = own[whole]
    branches = np.flatnonzero((common > 0) & (own > 0))
    filling = -int(own.sum()) % multiple
    if filling:
        # Belongs to no sequence: number S.
        whole, whole_lengths = np.append(whole, len(indices)), np.append(whole_lengths, filling)
    whole_blocks = _blocks(whole_lengths, whole_lengths)
    branch_blocks = _blocks(own[branches], held[branches])
    segments = np.concatenate([*(whole[part] for part in whole_blocks), *(branches[part] for part in branch_blocks)])
    seg_lengths = np.append(own, filling)[segments]
    seg_starts = offsets_of(seg_lengths)
    own_start = np.zeros(len(indices) + 1, dtype=np.int64)
    own_start[segments] = seg_starts[:-1]

    # Where in the row the tokens of each sequence stand, whoever added them: [sum(held)], sequence by sequence.
    begin = offsets_of(held)[:-1]
    where = _places_in_row(in_order, common, own, begin, own_start)
    output_rows = where[ranges(begin + prompts - 1, responses)]
    final_rows = where[begin + prompts + responses - 1] if final else None
    read = np.zeros(int(seg_starts[-1]), dtype=bool)
    read[output_rows] = True
    if final_rows is not None:
        read[final_rows] = True
    # A segment of which nothing is read asks its last row all the same.
    first_read = np.minimum.reduceat(np.where(read, np.arange(len(read)), len(read)), seg_starts[:-1])
    seg_last = seg_starts[1:] - np.minimum(first_read, seg_starts[1:] - 1)

    blocks, last_blocks = [], []
    start = 0
    for part in whole_blocks:
        queries, asking = whole_lengths[part], seg_last[start : start + len(part)]
        tokens, start = int(queries.sum()), start + len(part)
        blocks.append(Block(tokens, queries, queries, None))
        last_blocks.append(Block(tokens, asking, queries, None))
    for part in branch_blocks:
        member = branches[part]
        queries, keys, asking = own[member], held[member], seg_last[start : start + len(part)]
        tokens, start = int(queries.sum()), start + len(part)
        column = np.arange(int(keys.max()), dtype=np.int64)[None]
        real = column < keys[:, None]
        rows = np.where(real, where[np.where(real, begin[member][:, None] + column, 0)], 0)
        blocks.append(Block(tokens, queries, keys, rows))
        last_blocks.append(blocks[-1] if np.array_equal(asking, queries) else Block(tokens, asking, keys, rows))

    # What fills the row up has the batch's first token, again and again.
    steps = ranges(np.append(common, 0)[segments], seg_lengths)
    return Row(
        source=np.where(np.repeat(segments, seg_lengths) == len(indices), 0, steps)
        + np.repeat(np.append(starts, 0)[segments], seg_lengths),
        positions=steps,
        blocks=tuple(blocks),
        last_blocks=tuple(last_blocks),
        last_rows=ranges(seg_starts[1:] - seg_last, seg_last),
        output_rows=output_rows,
        targets=ranges(starts + prompts, responses),
        stream=ranges(offsets_of(lengths.responses)[indices], responses),
        offsets=offsets_of(responses),
        final_rows=final_rows,
    )


def _places_in_row(
    in_order: Int64Array, common: Int64Array, own: Int64Array, begin: Int64Array, own_start: Int64Array
) -> Int64Array:
    """The row of every token of every sequence, ``[sum(common + own)]``; those of sequence s are at ``begin[s]``.

    ``common [S]`` tokens are the first ones of a sequence before it ``in_order``, and ``own [S]`` are in the row from
    ``own_start [S]`` on.
    """
    where = np.empty(int((common + own).sum()), dtype=np.int64)
    where[ranges(begin + common, own)] = ranges(own_start[: len(own)], own)
    if not common.any():
        return where
    # The last sequence before it that has fewer tokens in common with its own predecessor has added the last of the
    # common ones, and has (or has copied) the others.
    path: list[tuple[int, int]] = []
    depths: list[list[tuple[int, int]]] = []
    for sequence, tokens in zip(in_order.tolist(), common[in_order].tolist(), strict=True):
        while path and path[-1][1] >= tokens:
            path.pop()
        if path:
            if len(depths) < len(path):
                depths.append([])
            depths[len(path) - 1].append((sequence, path[-1][0]))
        path.append((sequence, tokens))
    for depth in depths:
        sequences, before = np.array(depth).T
        count = common[sequences]
        where[ranges(begin[sequences], count)] = where[ranges(begin[before], count)]
    return where


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
