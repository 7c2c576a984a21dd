"""Memory for long streams: what is handed out, and that what is handed out again is the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rljob_trainer.algorithms.memory import LARGE, Scratch, Spare, fresh

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5)])
def test_fresh_memory_is_like_the_tensor_and_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.zeros(shape, dtype=dtype)
    made = fresh(like)
    assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, like.device)
    made.fill_(3)
    assert not like.any()


FLOAT32 = np.dtype(np.float32)


def result(spare: Spare, count: int) -> torch.Tensor:
    return torch.from_numpy(spare.take(torch.Size([count]), FLOAT32))


def test_a_result_gets_the_memory_of_one_that_nobody_holds_any_more() -> None:
    spare = Spare(1000)
    first = result(spare, 100)
    view, where = first[10:].view(3, 30), first.data_ptr()
    view.fill_(7)
    del first
    second = result(spare, 100).fill_(1)  # the view still holds the first
    assert second.data_ptr() != where
    assert view.eq(7).all()
    array = view.numpy()
    del view
    assert spare.bytes == 0
    assert (array == 7).all()
    del array
    assert spare.bytes == 400
    assert result(spare, 40).data_ptr() != where, "more than twice too large"
    again = result(spare, 60)
    assert (again.data_ptr(), again.shape, spare.bytes) == (where, (60,), 160)


def test_no_more_is_kept_than_agreed_and_the_oldest_goes_first() -> None:
    spare = Spare(1000)
    held = [result(spare, count) for count in (100, 110, 120)]
    newest = held[2].data_ptr()
    for _ in range(3):
        held.pop(0)
    assert spare.bytes == 440 + 480
    assert result(spare, 120).data_ptr() == newest


def test_threads_never_share_memory() -> None:
    spare = Spare(1 << 20)

    def fills(number: int) -> bool:
        kept = [result(spare, 50 + turn % 30).fill_(number) for turn in range(300)][::2]
        return all(bool(tensor.eq(number).all()) for tensor in kept)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fills, range(40)))


def test_large_results_are_kept_for_the_next_one() -> None:
    like = torch.zeros(LARGE // 4 + 1)
    where = fresh(like).data_ptr()
    assert fresh(like).data_ptr() == where


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
