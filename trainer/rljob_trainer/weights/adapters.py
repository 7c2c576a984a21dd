"""What a version consists of when an adapter is published by itself: its tensors, alpha, and whose adapter it is.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     A and B, under the names that peft's files have
    adapter.alpha                                                       int64 [1]
    adapter.base_sha256                                                 uint8 [32]: the base's manifest

All of them travel and are added up like other tensors: the manifest of a version is one of base, adapter and scale.
The base does not travel: an engine has read it from its folder, and refuses an adapter to another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rljob_trainer.errors import EngineError

ALPHA, BASE = "adapter.alpha", "adapter.base_sha256"
DTYPES = {ALPHA: torch.int64, BASE: torch.uint8}
"""Of what is no matrix, whatever matrices are published in."""
_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"


def described(alpha: int, base_sha256: str) -> Iterator[tuple[str, Tensor]]:
    """What is published beside the matrices."""
    yield ALPHA, torch.tensor([alpha], dtype=DTYPES[ALPHA])
    yield BASE, torch.tensor(list(bytes.fromhex(base_sha256)), dtype=DTYPES[BASE])


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """What an engine was sent."""

    matrices: Mapping[str, Tensor]
    rank: int
    alpha: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], base_sha256: str) -> PublishedAdapter:
        """``base_sha256``: of the model that the engine has. Raises ``EngineError`` for an adapter to another one, and
        for tensors that are none."""
        if not DTYPES.keys() <= tensors.keys():
            raise EngineError(f"weights: received an invalid adapter: it has no {', '.join(DTYPES.keys() - tensors)}")
        sent = bytes(tensors[BASE].tolist()).hex()
        if sent != base_sha256:
            raise EngineError(
                f"weights: the learner's adapter belongs to the base {sent[:12]}, but the engine has read "
                f"{base_sha256[:12]} from its folder: they have different models"
            )
        matrices = {name: tensor for name, tensor in tensors.items() if name not in DTYPES}
        layers = {name.removesuffix(_FIRST) for name in matrices if name.endswith(_FIRST)}
        seconds = {name.removesuffix(_SECOND) for name in matrices if name.endswith(_SECOND)}
        if not layers or layers != seconds or 2 * len(layers) != len(matrices):
            raise EngineError(
                f"weights: received data is not an adapter with two matrices per layer: {sorted(matrices)[:3]}"
            )
        rank = matrices[f"{min(layers)}{_FIRST}"].shape[0]
        return cls(matrices, rank, int(tensors[ALPHA]))

    def config(self) -> dict[str, Any]:
        """The adapter's settings as ``adapter_config.json`` has them."""
        targets = sorted({name.removesuffix(_FIRST).rpartition(".")[2] for name in self.matrices if _FIRST in name})
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": targets,
            "bias": "none",
            "peft_type": "LORA",
        }
