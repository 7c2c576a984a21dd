"""Memory for long streams: what is handed out, and that what is handed out again is the same."""

from __future__ import annotations

import pytest
import torch

from rljob_trainer.algorithms.memory import Scratch, fresh

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5), (3, 1 << 20)])
def test_fresh_memory_is_like_the_tensor_and_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.zeros(shape, dtype=dtype)
    made = fresh(like)
    assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, like.device)
    made.fill_(3)
    assert not like.any()


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
