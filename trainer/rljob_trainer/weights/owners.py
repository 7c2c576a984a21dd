"""What a rank's own shards contribute to the sums of whole tensors, in whatever layout it has them.

Of what several ranks have alike one answers (``Shard.answers``): so the ranks' sums add up to the sum of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rljob_trainer.weights.shards import Shard
from rljob_trainer.weights.sums import sum_of_box, sums_of, unsigned


def sums_of_shards(shards: Iterable[Shard]) -> dict[str, int]:
    """The contribution of those of ``shards`` that this rank answers for, below 2^64, by name."""
    names: list[str] = []
    sums: list[Tensor] = []
    for shard in shards:
        if not shard.answers or not shard.tensor.numel():
            continue
        whole = tuple(shard.tensor.shape) == shard.shape
        names.append(shard.name)
        sums.append(sums_of([shard.tensor])[0] if whole else sum_of_box(shard.tensor, shard.shape, shard.offset))
    numbers = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    return dict(zip(names, map(unsigned, numbers), strict=True))
