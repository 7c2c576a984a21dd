"""Parts of tensors are put together only where they are the whole."""

from __future__ import annotations

import pytest
import torch

from rljob_trainer.errors import LearnerError
from rljob_trainer.weights.shards import Shard, gathered, inventory

pytestmark = pytest.mark.integrity

WHOLE = torch.arange(12.0).reshape(4, 3)


def parts(*rows: tuple[int, int], shape: tuple[int, ...] = (4, 3)) -> list[Shard]:
    return [Shard("w", shape, (start, 0), WHOLE[start:end]) for start, end in rows]


def test_parts_that_are_the_whole_are_put_together() -> None:
    shards = parts((0, 3), (3, 4))
    ((name, tensor),) = gathered(shards, inventory(shards), lambda _: torch.float32)
    assert name == "w"
    assert torch.equal(tensor, WHOLE)
    # A part that two have alike counts once.
    assert len(inventory(parts((0, 3), (0, 3), (3, 4)))["w"]) == 2


@pytest.mark.parametrize(
    ("shards", "numbers"),
    [(parts((0, 3)), 9), (parts((0, 3), (2, 4)), 15), (parts((0, 4), shape=(5, 3)), 12)],
    ids=["one is missing", "they overlap", "of a larger tensor"],
)
def test_what_nobody_holds_is_not_made_up(shards: list[Shard], numbers: int) -> None:
    with pytest.raises(LearnerError, match=f"parts of w have {numbers} elements, but a tensor of shape"):
        inventory(shards)
