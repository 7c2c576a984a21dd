"""A linear sum of a tensor's bytes: whoever holds parts of the tensor adds up its own, and the parts' sums add up.

The bytes of a tensor, in row-major order, are words of 8 (little-endian, the last one filled up with zeros). Word i
counts in the tensor's sum, modulo 2^64, with an odd weight of i; its upper half counts once more with an odd weight of
its own. i counts through the whole tensor, wherever the word lies: a shard's words have the weights that they have in
the whole, and bytes that are only part of a word count as a word whose other bytes are zero. So the sum of a tensor is
the sum over its parts, however it is cut, and a change of some words changes it by the sum of the differences.

*Weights.* Words are laid out in rows of 2,040. A word has the product of its row's weight and its column's, which are
mixed odd numbers: one dot product for each row, nothing to be made for each word. The upper half is there because
whatever an odd weight does to the uppermost bit of a word, it stays the uppermost bit modulo 2^64, and of two that
change nothing would be left. Its weight is the product of the column's and of one for 32 rows together: these are added
up first, which saves the products.

*What shows for certain*: every change of one word that changes only one half of it, so of any one number of 32 bits or
fewer. *What shows up to chance* (one miss in 2^31 or fewer): numbers, rows and blocks that change places, are shifted,
doubled, stale or zero, and bits that flip in any number of places. *What does not show*: bytes of zero more or fewer at
the end (the shape, which stands beside a sum, says how many there are), and one sign that changes places with another
when both are the uppermost bits of words in the same column of the same 32 rows, a multiple of 16,320 bytes apart; of
other exchanges of the uppermost 16 bits of two such words one in 2^15 is missed. It is arithmetic against mistakes:
somebody who wants to can change words so that the sum stays.

Memory is read once. Pieces that a CPU's cache holds are read again there; the same operations work on a GPU.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor

_COLUMNS = 2040
"""A multiple of what a CPU takes at a time, and no power of two: matrices have rows of such sizes."""
_ROW_BYTES = 8 * _COLUMNS
_ROWS = 32
"""Rows whose upper halves are added up before they are weighed: 522 kB, which a CPU's cache holds."""
_FIRST_ROWS = 1 << 14
"""Their weights are kept: 267 MB of a tensor."""
_BLOCKS_AT_ONCE = 64
"""On a GPU: 33 MB, and intermediate results of the same size."""
_RUN_BYTES = 4 * _ROW_BYTES
"""Runs of bytes of a shard that are at least this long are added up one by one."""
_CANVAS_BYTES = {"cpu": 1 << 19, "cuda": 1 << 25}
_64_BITS = 2**64 - 1
_SIGN = 2**63
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN = -7046029254386353131
"""0x9E3779B97F4A7C15 as a signed number: 2^64 over the golden ratio."""
_OF_COLUMNS, _OF_ROWS, _OF_BLOCKS = 1, 1 << 40, 1 << 41
"""Where the numbers begin that weights of either kind are made of."""


def unsigned(number: int) -> int:
    """A sum as torch holds it, signed, as a number below 2^64."""
    return number & _64_BITS


def sums_of(tensors: Sequence[Tensor]) -> Tensor:
    """The sums ``[n]`` (signed int64) of whole tensors of one device. One that is not contiguous is copied for it."""
    return sums_at([(tensor, 0) for tensor in tensors])


def sums_at(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """What parts of tensors contribute to the sums of the whole ones ``[n]``: each part's elements follow one another
    there and begin at the given byte.

    The beginnings and ends of all parts are taken together: a small tensor costs next to nothing, and nothing is waited
    for on a GPU.
    """
    if not parts:
        return torch.zeros(0, dtype=torch.int64)
    device = parts[0][0].device
    totals = torch.zeros(len(parts), dtype=torch.int64, device=device)
    pieces: list[_Piece] = []
    for owner, (tensor, first) in enumerate(parts):
        data = tensor.detach().reshape(-1).view(torch.uint8)
        size = data.numel()
        row, within = divmod(first, _ROW_BYTES)
        if within + size <= _ROW_BYTES:  # most tensors of a model are as small as that
            if size:
                pieces.append(_Piece(owner, data, size, row, within))
            continue
        head = -within % _ROW_BYTES
        if head:
            pieces.append(_Piece(owner, data[:head], head, row, within))
            row += 1
        rows = (size - head) // _ROW_BYTES
        end = head + rows * _ROW_BYTES
        if rows:
            totals[owner] = _sum_of_rows(data[head:end], row)
        if end < size:
            pieces.append(_Piece(owner, data[end:], size - end, row + rows, 0))
    if pieces:
        owners = _sent([piece.owner for piece in pieces], device)
        totals.index_add_(0, owners, _sums_of_pieces(pieces, device))
    return totals


def sum_of_box(part: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """What a box out of a tensor of this ``shape`` contributes to its sum (a number on the part's device): ``part``
    holds the elements from ``offset`` on, in every dimension. That is what an owner has, whichever dimensions the
    tensor is cut along."""
    if part.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=part.device)
    cut = max((dim for dim in range(part.ndim) if part.shape[dim] != shape[dim]), default=0)
    # Elements from that dimension on follow one another in the whole tensor.
    starts = torch.zeros((), dtype=torch.int64)
    for dim in range(part.ndim):
        there = torch.arange(part.shape[dim] if dim < cut else 1) + offset[dim]
        starts = starts[..., None] + there * math.prod(shape[dim + 1 :])
    starts = starts.reshape(-1) * part.element_size()
    runs = part.detach().reshape(len(starts), -1).view(torch.uint8)
    if runs.shape[1] >= _RUN_BYTES or len(starts) == 1:
        return sums_at(list(zip(runs.unbind(0), starts.tolist(), strict=True))).sum()
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    at_once = max(1, _CANVAS_BYTES[part.device.type] // (runs.shape[1] + 16))
    for some, at in zip(runs.split(at_once), starts.to(part.device).split(at_once), strict=True):
        total += _sum_of_runs(some, at)
    return total


def sum_in_any_order(tensor: Tensor) -> int:
    """A number below 2^64 that is the same for the same elements in whatever order, and adds up over parts as well.
    Takes several times as long: to find a cause with, not to look in every step."""
    words = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    # In pieces: whole, it would take six times the memory of the tensor.
    for piece in words.split(_CANVAS_BYTES[words.device.type]):
        # Spread first: plain sums of patterns that differ in one bit each are often equal.
        spread = piece.to(torch.int64) * _GOLDEN
        total += (spread ^ (spread >> 29)).sum()
    return unsigned(int(total))


# ---------------------------------------------------------------------- weights


def _odd(numbers: Tensor) -> Tensor:
    """A mixed odd number of 64 bits for each of ``numbers`` (after Steele, Lea, Flood: "Fast splittable pseudorandom
    number generators", with arithmetic shifts)."""
    mixed = numbers * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed ^ (mixed >> 31)) | 1


@lru_cache(maxsize=16)
def _of_columns(device: torch.device) -> Tensor:
    return _odd(torch.arange(_COLUMNS, device=device) + _OF_COLUMNS)


@lru_cache(maxsize=16)
def _of_first_rows(device: torch.device) -> Tensor:
    return _odd(torch.arange(_FIRST_ROWS, device=device) + _OF_ROWS)


@lru_cache(maxsize=16)
def _of_first_blocks(device: torch.device) -> Tensor:
    return _odd(torch.arange(_FIRST_ROWS // _ROWS, device=device) + _OF_BLOCKS)


def _of_rows(rows: Tensor, last: int) -> Tensor:
    """Weights of rows of which none is beyond the ``last``. Most tensors have few: looked up, not made."""
    return _of_first_rows(rows.device)[rows] if last < _FIRST_ROWS else _odd(rows + _OF_ROWS)


def _of_blocks(rows: Tensor, last: int) -> Tensor:
    """Weights of the blocks in which these rows are."""
    blocks = rows >> _ROWS.bit_length() - 1
    return _of_first_blocks(rows.device)[blocks] if last < _FIRST_ROWS else _odd(blocks + _OF_BLOCKS)


class _Scratch(threading.local):
    """Intermediate results on a CPU, of each thread: memory that is new costs more than what is done in it."""

    def __init__(self) -> None:
        with torch.inference_mode(mode=False):  # what is made inside of it cannot be written to outside
            self.halves = torch.empty(_ROWS, _COLUMNS, dtype=torch.int64)
            self.half = torch.empty(_COLUMNS, dtype=torch.int64)
            self.upper = torch.empty(_COLUMNS, dtype=torch.int64)


_scratch = _Scratch()


# ---------------------------------------------------------------------- whole rows


def _sum_of_rows(data: Tensor, first: int) -> Tensor:
    """The sum of the bytes of whole rows, the first of which has this number: a number on the device."""
    return _sum_on_cpu(data, first) if data.device.type == "cpu" else _sum_elsewhere(data, first)


def _words(data: Tensor) -> Tensor:
    """Bytes ``[..., n]`` as words ``[..., n / 8]``: in place where they lie at a multiple of 8."""
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


def _sizes_of_blocks(first: int, rows: int) -> list[int]:
    """How many of ``rows`` that begin with ``first`` are in each block: 32 but for the first and the last."""
    ahead = min(rows, -first % _ROWS)
    whole, rest = divmod(rows - ahead, _ROWS)
    return [*([ahead] if ahead else []), *[_ROWS] * whole, *([rest] if rest else [])]


def _sum_on_cpu(data: Tensor, first: int) -> Tensor:
    rows = len(data) // _ROW_BYTES
    sizes = _sizes_of_blocks(first, rows)
    columns = _of_columns(data.device)
    numbers = torch.arange(first, first + rows)
    uppers = _of_blocks(numbers[torch.tensor([0, *accumulate(sizes[:-1])])], first + rows).tolist()
    sums = torch.empty(rows, dtype=torch.int64)
    half, upper = _scratch.half, _scratch.upper.zero_()
    in_place = data.storage_offset() % 8 == 0
    bytes_of_blocks = data.split([size * _ROW_BYTES for size in sizes])
    for piece, here, weight, size in zip(bytes_of_blocks, sums.split(sizes), uppers, sizes, strict=True):
        words = (piece if in_place else piece.clone()).view(torch.int64).view(size, _COLUMNS)
        halves = _scratch.halves if size == _ROWS else _scratch.halves[:size]
        torch.mv(words, columns, out=here)
        torch.bitwise_right_shift(words, 32, out=halves)
        torch.sum(halves, 0, out=half)
        upper.add_(half, alpha=weight)
    return torch.dot(sums, _of_rows(numbers, first + rows)) + torch.dot(upper, columns)


def _sum_elsewhere(data: Tensor, first: int) -> Tensor:
    """The sum by operations that there are on every device: a dot product of integers is not among them."""
    columns = _of_columns(data.device)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    sizes = _sizes_of_blocks(first, len(data) // _ROW_BYTES)
    row = 0
    for size, alike in groupby(sizes):
        blocks = len(list(alike))
        part = data[row * _ROW_BYTES : (row + blocks * size) * _ROW_BYTES].view(blocks, -1)
        row += blocks * size
        for some in part.split(_BLOCKS_AT_ONCE):
            last = first + len(some) * size
            words = _words(some).view(len(some), size, _COLUMNS)
            numbers = torch.arange(first, last, device=data.device)
            total += ((words * columns).sum(-1).view(-1) * _of_rows(numbers, last)).sum()
            upper = ((words >> 32).sum(1) * columns).sum(-1)
            total += (upper * _of_blocks(numbers[::size], last)).sum()
            first = last
    return total


# ---------------------------------------------------------------------- parts of rows


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes within one row of a tensor, from byte ``within`` of row ``row`` on."""

    owner: int
    data: Tensor
    size: int
    row: int
    within: int


def _sums_of_pieces(pieces: Sequence[_Piece], device: torch.device) -> Tensor:
    """``[n]``, with a handful of operations for all of them."""
    zeros = torch.zeros(8, dtype=torch.uint8, device=device)
    filled: list[Tensor] = []
    ends, shifts, counts, end = [], [], [], 0
    for piece in pieces:
        column, lead = divmod(piece.within, 8)
        count = (lead + piece.size + 7) // 8
        if lead:
            filled.append(zeros[:lead])
        filled.append(piece.data)
        if rest := 8 * count - lead - piece.size:
            filled.append(zeros[:rest])
        shifts.append(column - end)
        counts.append(count)
        end += count
        ends.append(end)
    words = _words(torch.cat(filled) if len(filled) > 1 else filled[0])
    rows = [piece.row for piece in pieces]
    row, shift, repeats, last = _sent([rows, shifts, counts, ends], device)
    column_of = torch.arange(end, device=device) + shift.repeat_interleave(repeats, output_size=end)
    weight = _of_columns(device)[column_of]
    last -= 1
    whole, upper = _between(words * weight, last), _between((words >> 32) * weight, last)
    return whole * _of_rows(row, max(rows)) + upper * _of_blocks(row, max(rows))


def _sent(numbers: list[int] | list[list[int]], device: torch.device) -> Tensor:
    """Few numbers on a device, which is not waited for: CUDA has copied them for itself when the call returns.
    ``torch.tensor`` with a device waits until all is done that the device has been given before."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def _between(values: Tensor, last: Tensor) -> Tensor:
    """Sums of consecutive stretches, each of which ends with its ``last`` value."""
    if len(last) == 1:
        return values.sum()[None]
    running = values.cumsum(0)[last]
    # Modulo 2^64 a difference of running sums is exact.
    return torch.cat((running[:1], running[1:] - running[:-1]))


def _sum_of_runs(runs: Tensor, starts: Tensor) -> Tensor:
    """The sum of runs ``[n, bytes]`` that begin at the bytes ``starts`` ``[n]``: each on words of its own that are zero
    beside it."""
    lead, width = starts % 8, runs.shape[1]
    canvas = torch.zeros(len(runs), (width + 14) // 8 * 8, dtype=torch.uint8, device=runs.device)
    canvas.scatter_(1, lead[:, None] + torch.arange(width, device=runs.device), runs)
    words = canvas.view(torch.int64)
    number = starts[:, None] // 8 + torch.arange(words.shape[1], device=runs.device)
    row = number // _COLUMNS
    column = _of_columns(runs.device)[number % _COLUMNS]
    last = _FIRST_ROWS if runs.device.type != "cpu" else int(row.max())  # a GPU is not waited for
    return ((words * _of_rows(row, last) + (words >> 32) * _of_blocks(row, last)) * column).sum()
