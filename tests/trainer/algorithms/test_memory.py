"""Memory for long streams: what is handed out, and that what is handed out again is the same."""

from __future__ import annotations

import pytest
import torch

from rljob_trainer.algorithms import memory
from rljob_trainer.algorithms.memory import KEPT_BLOCKS, LARGE, Scratch, fresh

CPU = torch.device("cpu")
LONG = torch.zeros(LARGE, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    memory._free.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5), (3, 1 << 20)])
def test_fresh_memory_is_like_the_tensor_and_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.zeros(shape, dtype=dtype)
    made = fresh(like)
    assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, like.device)
    made.fill_(3)
    assert not like.any()


def test_a_result_has_the_memory_of_an_earlier_one_that_is_gone() -> None:
    first = fresh(LONG)
    address = first.data_ptr()
    del first
    assert fresh(LONG).data_ptr() == address
    assert fresh(LONG.repeat(2)).data_ptr() != address, "too small"


def test_memory_with_a_view_in_use_is_not_handed_out() -> None:
    first = fresh(LONG).fill_(1)
    view = first.view(2, -1)[1]
    del first
    others = [fresh(LONG).fill_(2) for _ in range(2 * KEPT_BLOCKS)]
    assert view.unique().tolist() == [1]
    assert len({other.data_ptr() for other in others}) == len(others)


def test_much_larger_memory_than_needed_is_left_to_others() -> None:
    large = fresh(LONG.repeat(4))
    address = large.data_ptr()
    del large
    assert fresh(LONG).data_ptr() != address
    assert fresh(LONG.repeat(3)).data_ptr() == address


def test_no_more_is_kept_than_one_estimator_needs() -> None:
    results = [fresh(LONG) for _ in range(KEPT_BLOCKS + 3)]
    del results
    assert len(memory._free) == KEPT_BLOCKS


def test_a_name_keeps_its_memory_for_what_fits() -> None:
    scratch = Scratch(CPU)
    first = scratch.get("a", 8, torch.float32)
    first.copy_(torch.arange(8))
    assert scratch.get("a", 5, torch.float32).tolist() == [0, 1, 2, 3, 4]
    scratch.get("b", 8, torch.float32).fill_(-1)
    assert first.tolist() == list(range(8))


def test_a_name_gets_new_memory_for_more_or_another_type() -> None:
    scratch = Scratch(CPU)
    first = scratch.get("a", 2, torch.float32).fill_(1)
    assert scratch.get("a", 3, torch.float32).fill_(2).numel() == 3
    assert scratch.get("a", 2, torch.float64).fill_(3).dtype == torch.float64
    assert first.tolist() == [1, 1]
