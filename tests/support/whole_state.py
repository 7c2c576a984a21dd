"""What a rank keeps, by name: its own parts, or all ranks' parts put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rljob_trainer.weights.shards import Shard, gathered, inventory


def parts(shards: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """The rank's own, sharing their memory."""
    return {shard.name: shard.tensor for shard in shards}


def whole(shards: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """Copies of the whole tensors. All ranks call it."""
    dtypes = {shard.name: shard.tensor.dtype for shard in shards}
    together = gathered(shards, inventory(shards), lambda name: dtypes.get(name, torch.float32))
    return {name: tensor.clone() for name, tensor in together}
