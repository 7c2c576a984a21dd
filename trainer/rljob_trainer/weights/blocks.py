"""Parameters that lie one after another in memory: a pack of them travels from there and arrives there without a copy.

Both sides lay their parameters out once, as the plan's packs want them. A parameter stays the same tensor object with
the same values; only the memory behind it moves, so optimizers and layers that hold it notice nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rljob_trainer.weights.plan import Bucket


def block_of(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor | None:
    """The bytes ``[nbytes]`` in which the tensors lie at the bucket's offsets; None if they lie in any other way."""
    storage, start = tensors[0].untyped_storage(), tensors[0].data_ptr()
    first = start - storage.data_ptr()
    if first + bucket.nbytes > storage.nbytes():
        return None
    for tensor, meta, offset in zip(tensors, bucket.tensors, bucket.offsets, strict=True):
        same = tensor.untyped_storage().data_ptr() == storage.data_ptr() and tensor.data_ptr() == start + offset
        if not (same and tensor.is_contiguous() and (tuple(tensor.shape), tensor.dtype) == (meta.shape, meta.dtype)):
            return None
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage, first, (bucket.nbytes,), (1,))


@torch.no_grad()
def lay_out(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Moves the tensors, which are those of the bucket, into one new block ``[nbytes]`` of bytes and returns it.

    Whoever shares memory with one of them (a detached alias, a view) keeps the old memory.
    """
    block = torch.empty(bucket.nbytes, dtype=torch.uint8, device=tensors[0].device)
    for tensor, (_, place) in zip(tensors, bucket.views(block), strict=True):
        tensor.data = place.copy_(tensor)
    return block
