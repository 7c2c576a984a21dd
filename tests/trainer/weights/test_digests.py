"""What is told of two models that ought to be the same, and of the checksum below it."""

from __future__ import annotations

import pytest
import torch
from rljob_trainer.weights.checksum import checksum, sum_in_any_order
from rljob_trainer.weights.digests import cause_of, differing, digests_of


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(96, 64, generator=generator) for name in ("a", "b", "c")}


def told(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], former: dict[int, dict[str, int]]) -> str:
    sums = digests_of(ours.items(), in_any_order=True), digests_of(theirs.items(), in_any_order=True)
    return cause_of(digests_of(ours.items()), digests_of(theirs.items()), former, sums)


@pytest.mark.parametrize("rows", [(0, 1), (3, 4), (0, 95), (10, 90)])
def test_two_rows_that_change_places_change_the_checksum(rows: tuple[int, int]) -> None:
    """Within a block of 4,096 words (64 rows of 64 numbers are 2,048) and across blocks."""
    matrix = torch.randn(400, 64, generator=torch.Generator().manual_seed(1))
    swapped = matrix.clone()
    swapped[list(rows)] = matrix[list(reversed(rows))]
    assert checksum(swapped) != checksum(matrix)
    assert sum_in_any_order(swapped) == sum_in_any_order(matrix)


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("byte", [0, 6, 7, 8 * 4096 + 7, 8 * 9000 - 1])
def test_one_bit_changes_the_checksum_wherever_it_is(byte: int, bit: int) -> None:
    data = torch.zeros(8 * 9000, dtype=torch.uint8)
    changed = data.clone()
    changed[byte] = 1 << bit
    assert checksum(changed) != checksum(data)


def test_equal_weights_differ_in_nothing() -> None:
    assert differing(digests_of(model().items()), digests_of(model().items())) == []


def test_weights_of_an_earlier_version_are_recognised() -> None:
    old, new = model(1), model(2)
    assert told(new, old, {6: digests_of(model(3).items()), 7: digests_of(old.items())}) == (
        "it still has the weights of version 7: the new ones were not loaded"
    )


def test_one_matrix_that_was_not_loaded_is_recognised() -> None:
    old, new = model(1), model(2)
    assert "version 7 in b" in told(new, new | {"b": old["b"]}, {7: digests_of(old.items())})


def test_matrices_that_changed_places_are_named_both() -> None:
    ours = model()
    theirs = ours | {"a": ours["b"], "b": ours["a"]}
    assert told(ours, theirs, {}) == "a holds what belongs into b; b holds what belongs into a"


def test_rows_that_changed_places_are_told_from_other_numbers() -> None:
    ours = model()
    theirs = ours | {"a": ours["a"].flip(0), "c": ours["c"] + 1}
    assert told(ours, theirs, {}) == "a has the same numbers in another order; c has other numbers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_that_change_show_also_in_pairs(dtype: torch.dtype) -> None:
    """The sign at the end of a 64-bit word is worth half of what sums are counted in."""
    matrix = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    last = 8 // matrix.element_size() - 1
    for places in ([(0, last), (0, 8 + last)], [(0, last), (40, last)], [(3, last), (60, 512 + last)]):
        changed = matrix.clone()
        for place in places:
            changed[place] *= -1
        assert checksum(changed) != checksum(matrix), places
