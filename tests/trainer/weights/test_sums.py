"""The sum of a tensor: computed again word by word, taken over every cut, and blind to nothing that it should see."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rljob_trainer.weights import sums
from rljob_trainer.weights.sums import sum_in_any_order, sum_of_box, sums_at, sums_of, unsigned

pytestmark = pytest.mark.integrity

COLUMNS, BLOCK = 2040, 32
ROW = 8 * COLUMNS
SIZES = [0, 1, 7, 8, 9, ROW - 1, ROW, ROW + 1, 100_003, 33 * ROW + 5, 70 * ROW]


def some_bytes(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def total(tensor: Tensor) -> int:
    return unsigned(int(sums_of([tensor])[0]))


def odd(number: int) -> int:
    """The weight's mixing once more, in Python's integers."""

    def shifted(value: int, by: int) -> int:
        return (value - 2**64 * (value >= 2**63)) >> by

    for by, factor in ((0, 0x9E3779B97F4A7C15), (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = ((number ^ (shifted(number, by) if by else 0)) * factor) % 2**64
    return (number ^ shifted(number, 31)) % 2**64 | 1


def by_hand(data: bytes) -> int:
    """Word by word, as the module's docstring says."""
    data += bytes(-len(data) % 8)
    whole = 0
    for number in range(len(data) // 8):
        word = data[8 * number : 8 * number + 8]
        row, column = divmod(number, COLUMNS)
        upper = int.from_bytes(word[4:], "little", signed=True)
        weighed = int.from_bytes(word, "little") * odd(row + 2**40) + upper * odd(row // BLOCK + 2**41)
        whole += weighed * odd(column + 1)
    return whole % 2**64


@pytest.mark.parametrize("size", SIZES)
def test_the_sum_is_what_its_definition_says(size: int) -> None:
    data = some_bytes(size)
    assert total(data) == by_hand(data.numpy().tobytes())


def test_it_is_the_same_by_the_operations_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    data = some_bytes(70 * ROW + 11)
    expected = total(data)
    monkeypatch.setattr(sums, "_sum_on_cpu", sums._sum_elsewhere)
    monkeypatch.setattr(sums, "_BLOCKS_AT_ONCE", 1)
    assert total(data) == expected


def test_weights_of_rows_far_on_are_those_that_a_table_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    data = some_bytes(70 * ROW + 11)
    matrix = data[: 70 * ROW].view(700, -1)
    expected = total(data), unsigned(int(sum_of_box(matrix[:, 9:].clone(), matrix.shape, (0, 9))))
    monkeypatch.setattr(sums, "_FIRST_ROWS", 0)
    assert (total(data), unsigned(int(sum_of_box(matrix[:, 9:].clone(), matrix.shape, (0, 9))))) == expected


def test_many_tensors_have_the_sums_that_each_has_alone() -> None:
    tensors = [some_bytes(size) for size in SIZES] + [torch.randn(17).bfloat16(), torch.tensor(3.5), torch.ones(5, 3).T]
    assert [unsigned(number) for number in sums_of(tensors).tolist()] == [total(tensor) for tensor in tensors]


@pytest.mark.parametrize("size", SIZES[1:])
def test_sums_of_parts_add_up_wherever_the_cuts_are(size: int) -> None:
    """Also inside a word, and where a part's memory begins at an odd address."""
    data, dice = some_bytes(size), random.Random(size)
    for _ in range(8):
        cuts = [0, *sorted(dice.randrange(size + 1) for _ in range(4)), size]
        parts = sums_at([(data[start:end], start) for start, end in pairwise(cuts)])
        assert unsigned(int(parts.sum())) == total(data), cuts


def boxes(shape: tuple[int, ...], cuts: list[list[int]]) -> list[tuple[tuple[slice, ...], tuple[int, ...]]]:
    found: list[tuple[tuple[slice, ...], tuple[int, ...]]] = [((), ())]
    for size, at in zip(shape, cuts, strict=True):
        edges = list(pairwise([0, *at, size]))
        found = [((*s, slice(a, b)), (*o, a)) for s, o in found for a, b in edges]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((37, 50), [[9, 18, 36], []]),  # rows, as FSDP2 cuts them
        ((37, 51), [[], [3, 20, 20]]),  # columns, one owner has none
        ((37, 51), [[10], [25]]),  # both
        ((5, 7, 9), [[2], [3], [1, 8]]),
        ((5, 7, 9), [[], [3], []]),
        ((3, 90_001), [[], [70_001]]),  # runs that are longer than a row
        ((700, 333), [[], [111]]),  # more runs than are looked at together
        ((9,), [[4]]),
    ],
)
def test_owners_of_boxes_add_up_to_the_whole(shape: tuple[int, ...], cuts: list[list[int]], dtype: torch.dtype) -> None:
    whole = torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = [sum_of_box(whole[box].clone(), shape, offset) for box, offset in boxes(shape, cuts)]
    assert unsigned(int(torch.stack(parts).sum())) == total(whole)


def test_a_delta_changes_a_sum_by_its_own() -> None:
    old, new = some_bytes(100_000), some_bytes(100_000)
    new[:40_000], new[60_000:] = old[:40_000], old[60_000:]
    before, after = (sums_at([(data[40_000:60_000], 40_000)]) for data in (old, new))
    assert unsigned(int(sums_of([old])[0] - before[0] + after[0])) == total(new)


# ---------------------------------------------------------------------- what shows


@pytest.mark.parametrize("size", [12, 4096 * 8, 33 * ROW + 20])
def test_one_bit_shows_wherever_it_is(size: int) -> None:
    data, dice = some_bytes(size), random.Random(size)
    for place in {0, 3, 4, 7, size // 2, size - 1, *(dice.randrange(size) for _ in range(20))}:
        for bit in range(8):
            changed = data.clone()
            changed[place] ^= 1 << bit
            assert total(changed) != total(data), (place, bit)


MATRIX = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0))
"""8 MiB: a row of words has almost eight of the matrix."""


def rows(first: int, second: int) -> Callable[[Tensor], None]:
    def swap(matrix: Tensor) -> None:
        matrix[[first, second]] = matrix[[second, first]]

    return swap


def block(target: int, source: int, length: int) -> Callable[[Tensor], None]:
    def double(matrix: Tensor) -> None:
        flat = matrix.view(-1)
        flat[target : target + length] = flat[source : source + length].clone()

    return double


MISTAKES: dict[str, Callable[[Tensor], object]] = {
    **{f"rows {a} and {b}": rows(a, b) for a, b in [(0, 1), (0, 8), (3, 259), (0, 256), (17, 4095), (1000, 3048)]},
    "shifted by a number": lambda matrix: matrix.copy_(matrix.view(-1).roll(1).view(matrix.shape)),
    "shifted by a word": lambda matrix: matrix.copy_(matrix.view(-1).roll(2).view(matrix.shape)),
    "shifted by a row of words": lambda matrix: matrix.copy_(matrix.view(-1).roll(2 * COLUMNS).view(matrix.shape)),
    "shifted by a block": lambda matrix: matrix.copy_(matrix.view(-1).roll(2 * COLUMNS * BLOCK).view(matrix.shape)),
    "transposed blocks": lambda matrix: matrix[:512].copy_(matrix[:512].T.clone()),
    "turned round": lambda matrix: matrix.copy_(matrix.flip(0)),
    "columns turned round": lambda matrix: matrix.copy_(matrix.flip(1)),
    "a doubled word": block(4096, 0, 2),
    "a doubled row of words": block(2 * COLUMNS, 0, 2 * COLUMNS),
    "a doubled piece": block(1 << 20, 0, 1 << 17),
    "a piece of zeros": lambda matrix: matrix[100:200].zero_(),
    "all negative": lambda matrix: matrix.neg_(),
    "two columns": lambda matrix: matrix.copy_(matrix[:, [1, 0, *range(2, 512)]]),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mistakes_show(name: str, dtype: torch.dtype) -> None:
    right = MATRIX.to(dtype)
    wrong = right.clone()
    MISTAKES[name](wrong)
    assert total(wrong) != total(right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_that_change_show_also_in_pairs(dtype: torch.dtype) -> None:
    """The sign at the end of a 64-bit word is worth half of what sums are counted in: odd weights alone miss two."""
    matrix = MATRIX.to(dtype)
    last = 8 // matrix.element_size() - 1
    for places in ([(0, last), (0, 8 + last)], [(0, last), (40, last)], [(3, last), (4000, 256 + last)]):
        changed = matrix.clone()
        for place in places:
            changed[place] *= -1
        assert total(changed) != total(matrix), places


def test_random_changes_of_a_few_words_show() -> None:
    """Among them many of the uppermost bits only."""
    dice = random.Random(5)
    for _ in range(2000):
        places = {dice.randrange(300_000) for _ in range(dice.randint(1, 4))}
        before = [dice.getrandbits(63) - 2**62 for _ in places]
        after = [
            word ^ dice.choice([-(2**63), 2**62, 1 << dice.randrange(63), dice.getrandbits(62)]) for word in before
        ]
        if not is_hidden([*places], before, after):
            assert words_at(places, before) != words_at(places, after), (places, before, after)


def words_at(places: Collection[int], words: list[int]) -> int:
    parts = [(torch.tensor([word]), 8 * place) for place, word in zip(places, words, strict=True)]
    return unsigned(int(sums_at(parts).sum()))


def is_hidden(places: list[int], before: list[int], after: list[int]) -> bool:
    """Whether all changes are of uppermost bits, in one column of one block."""
    columns = {(place % COLUMNS, place // (COLUMNS * BLOCK)) for place in places}
    return (
        len(places) > 1 and len(columns) == 1 and all((a ^ b) % 2**62 == 0 for a, b in zip(before, after, strict=True))
    )


def test_signs_that_change_places_within_a_column_of_a_block_are_what_is_not_seen() -> None:
    """As the docstring says; next to it they are."""
    first, second, words = 5 * COLUMNS + 17, 31 * COLUMNS + 17, [3, 2**63 - 1]
    flipped = [words[0] - 2**63, words[1]]
    exchanged = [words[0], words[1] - 2**63]
    assert words_at([first, second], flipped) == words_at([first, second], exchanged)
    assert words_at([first, second + 1], flipped) != words_at([first, second + 1], exchanged)
    assert words_at([first, second + COLUMNS], flipped) != words_at([first, second + COLUMNS], exchanged)


def test_the_sum_in_any_order_is_that_of_the_numbers() -> None:
    matrix = MATRIX[:64]
    assert sum_in_any_order(matrix.flip(0)) == sum_in_any_order(matrix)
    assert sum_in_any_order(matrix.view(-1)[torch.randperm(matrix.numel())]) == sum_in_any_order(matrix)
    assert sum_in_any_order(matrix + 1) != sum_in_any_order(matrix)
    parts = sum_in_any_order(matrix[:10]) + sum_in_any_order(matrix[10:])
    assert parts % 2**64 == sum_in_any_order(matrix)
