"""How evenly a mixture of experts uses its experts: which ones its routers chose in the passes of an update.

Every token of the rows counts, prompts too, once for each expert that it was sent to. What is told are ratios, so that
layers that activation checkpointing computes twice count like the others.

Where choices are replayed (``routing_replay.py``), it also tells how many are, and how many of those the routers would
have made otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rljob_trainer.learner.routing_replay import given, is_known, routers_of


class ExpertLoads:
    """Listens to the routers of a model. A model without experts has none."""

    def __init__(self, model: nn.Module, experts: int) -> None:
        """``experts``: the number of experts in each of its layers that has any."""
        self._experts = experts
        self._routers = routers_of(model)
        # Two threads may run through one model: appending is safe, adding up in place is not.
        self._seen: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._replays: list[torch.Tensor] = []
        """Tokens, those that were replayed, the choices of those, and the ones of them that routers would not make."""
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(lambda _, inputs, outputs, layer=layer: self._note(layer, outputs))

    def _note(self, layer: int, outputs: Any) -> None:
        if torch.is_grad_enabled():
            logits, _, chosen = outputs
            self._seen[layer].append(torch.bincount(chosen.detach().flatten(), minlength=self._experts))
            if (replayed := given()) is not None:
                self._replays.append(_compared(logits.detach(), chosen, is_known(replayed)))

    def forget(self) -> None:
        """Drops what was seen: the update was given up."""
        self._seen.clear()
        self._replays.clear()

    def read(self) -> dict[str, float]:
        """The loads since the last call, over all ranks. Collective; empty without experts."""
        seen, self._seen = self._seen, defaultdict(list)
        replays, self._replays = self._replays, []
        if not self._routers or not seen:
            return {}
        counts = torch.stack([torch.stack(seen[layer]).sum(0) for layer in range(len(self._routers))])
        if dist.is_initialized():
            dist.all_reduce(counts)
        loads = {}
        if replays:
            told = torch.stack(replays).sum(0)
            if dist.is_initialized():
                dist.all_reduce(told)
            tokens, replayed, choices, otherwise = told.tolist()
            loads = {"moe/replayed": replayed / max(tokens, 1), "moe/rerouted": otherwise / max(choices, 1)}
        # [layers]: how many times its even share the fullest expert has.
        fullest = counts.amax(1) * self._experts / counts.sum(1)
        return loads | {
            "moe/fullest_expert/mean": float(fullest.mean()),
            "moe/fullest_expert/max": float(fullest.max()),
            "moe/idle_experts": float((counts == 0).double().mean()),
        }


def _compared(logits: torch.Tensor, chosen: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """``[4]`` as ``_replays`` has them, of logits ``[N, experts]``, the experts that were chosen ``[N, k]``, and which
    rows were replayed ``[N]``. Nothing waits for a device here."""
    own = logits.topk(chosen.shape[1], -1).indices
    otherwise = ~(chosen[:, :, None] == own[:, None]).any(-1) & known[:, None]
    tokens, replayed = torch.ones_like(known).sum(), known.sum()
    return torch.stack([tokens, replayed, replayed * chosen.shape[1], otherwise.sum()])
