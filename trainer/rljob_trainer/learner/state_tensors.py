"""Shards as torch's distributed checkpoint takes them: any box of a tensor, whatever cut it out."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from rljob_trainer.weights.shards import Shard


class ShardTensor(torch.Tensor):
    """Looks like the whole tensor from outside and has one box of it inside. Only a checkpoint can use it: torch asks
    a tensor for the three methods below before it takes it for a plain one (``_Checkpointable``)."""

    shard: Shard

    @staticmethod
    def __new__(cls, shard: Shard) -> ShardTensor:
        made: ShardTensor = torch.Tensor._make_wrapper_subclass(
            cls, shard.shape, dtype=shard.tensor.dtype, device=shard.tensor.device
        )
        made.shard = shard
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as torch calls it
        raise NotImplementedError(f"a part of a checkpoint cannot be computed with ({func})")

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        chunk = self._chunk()
        if chunk is None:
            return []
        properties = TensorProperties.create_from_tensor(self.shard.tensor)
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunk = self._chunk()
        return [] if chunk is None else [chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.shard.tensor

    def _chunk(self) -> ChunkStorageMetadata | None:
        """None where this rank has no part."""
        if not self.shard.tensor.numel():
            return None
        return ChunkStorageMetadata(torch.Size(self.shard.offset), self.shard.tensor.size())
