"""How evenly a mixture of experts uses its experts: which ones its routers chose in the passes of an update.

Every token of the rows counts, prompts too, once for each expert that it was sent to. What is told are ratios, so that
layers that activation checkpointing computes twice count like the others.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ExpertLoads:
    """Listens to the routers of a model. A model without experts has none."""

    def __init__(self, model: nn.Module, experts: int) -> None:
        """``experts``: the number of experts in each of its layers that has any."""
        self._experts = experts
        self._routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        # Two threads may run through one model: appending is safe, adding up in place is not.
        self._seen: dict[int, list[torch.Tensor]] = defaultdict(list)
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(lambda _, inputs, outputs, layer=layer: self._note(layer, outputs))

    def _note(self, layer: int, outputs: Any) -> None:
        if torch.is_grad_enabled():
            _, _, chosen = outputs
            self._seen[layer].append(torch.bincount(chosen.detach().flatten(), minlength=self._experts))

    def forget(self) -> None:
        """Drops what was seen: the update was given up."""
        self._seen.clear()

    def read(self) -> dict[str, float]:
        """The loads since the last call, over all ranks. Collective; empty without experts."""
        seen, self._seen = self._seen, defaultdict(list)
        if not self._routers or not seen:
            return {}
        counts = torch.stack([torch.stack(seen[layer]).sum(0) for layer in range(len(self._routers))])
        if dist.is_initialized():
            dist.all_reduce(counts)
        # [layers]: how many times its even share the fullest expert has.
        fullest = counts.amax(1) * self._experts / counts.sum(1)
        return {
            "moe/fullest_expert/mean": float(fullest.mean()),
            "moe/fullest_expert/max": float(fullest.max()),
            "moe/idle_experts": float((counts == 0).double().mean()),
        }
