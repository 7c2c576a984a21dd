"""Whose the tensors are that a learner rank keeps: the parts of the memory plan, found by looking at the real rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rljob_api.memory import parts
from rljob_trainer.learner.models import Policy
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.trained import Trained

PASSING = "gathered weights, activations, logits"
"""What else there is at the fullest moment of an update."""


def owned(rank: LearnerRank, gpu: torch.device) -> dict[str, int]:
    """Bytes on ``gpu`` of the weights, moments, gradients, critic and reference of a rank, by the plan's names. A
    storage counts once, as the first part's that has it, and as a whole."""
    seen: set[int] = set()

    def size(tensors: Iterable[torch.Tensor]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == gpu and storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total

    actor, critic = rank.actor, rank.critic
    weights = list(_weights(actor.module))
    found = {
        parts.FROZEN: size(_local(weight) for weight in weights if not weight.requires_grad),
        parts.MASTERS: size(_local(weight) for weight in weights if weight.requires_grad),
        parts.OPTIMIZER: size(_moments(actor)),
        parts.GRADIENTS: size(_gradients(weights)),
    }
    if critic is not None:
        own = list(_weights(critic.module))
        found[parts.GRADIENTS] += size(_gradients(own))
        found[parts.CRITIC] = size([*map(_local, own), *_moments(critic)])
    if isinstance(rank._reference, Policy):
        found[parts.REFERENCE] = size(map(_local, _weights(rank._reference)))
    return {name: total for name, total in found.items() if total}


def _weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """The rank's own parts of the parameters, also while whole ones stand in their places."""
    sharded = False
    for part in module.modules():
        if isinstance(part, FSDPModule) and (group := part._get_fsdp_state()._fsdp_param_group) is not None:
            sharded = True
            yield from (each.sharded_param for each in group.fsdp_params)
    if not sharded:
        yield from module.parameters()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _gradients(weights: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
    return (_local(weight.grad) for weight in weights if weight.grad is not None)


def _moments(trained: Trained) -> Iterator[torch.Tensor]:
    for rule, names in trained.optimizer._rules:
        for index in range(len(names)):
            yield from rule.state(index).values()
