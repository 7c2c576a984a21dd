"""A mixture of experts is trained with the experts that its engine chose.

Engine and learner compute one router in two ways. Where two experts are nearly tied, rounding sends a token to another
expert than the one that it was sampled with, and its log-prob jumps (arXiv 2510.11370). So engines tell which experts
each token was sent to, and the learner sends it to the same ones. Only the choice is replayed: how much each chosen
expert counts is computed from the learner's own router logits, as ever, and so the router learns.

The choices of a pass are data of its row (``Packed.experts``), not the state of a model: activation checkpointing
computes layers a second time, and two threads may run through one model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from rljob_trainer.episodes.tokens import ByteArray
from rljob_trainer.errors import LearnerError
from rljob_trainer.learner.attention import Packed
from rljob_trainer.learner.packing import Row

_chosen: ContextVar[torch.Tensor | None] = ContextVar("the experts chosen for the rows of the layer that runs")
"""``[N, k]`` of the layer that this thread is in; None: routers choose."""


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of a model's layers, in their order; none of a dense model."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def replay_routing(layers: list[nn.Module]) -> None:
    """Lets the routers of ``layers`` follow ``Packed.experts`` where a row has them.

    A layer's forward is wrapped, as for activation checkpointing and before it. Listeners at the routers that are
    registered afterwards hear of the experts that are used.
    """
    number = 0
    for layer in layers:
        for router in routers_of(layer):
            layer.forward = functools.partial(_forward, layer.forward, number)
            router.register_forward_hook(_replayed)
            number += 1


def _forward(forward: Callable[..., Any], number: int, *args: Any, packed: Packed | None = None, **kwargs: Any) -> Any:
    if packed is None:  # an engine on the live model
        return forward(*args, **kwargs)
    before = _chosen.set(None if packed.experts is None else packed.experts[:, number])
    try:
        return forward(*args, packed=packed, **kwargs)
    finally:
        _chosen.reset(before)


def _replayed(router: Any, _: Any, outputs: Any) -> Any:
    """transformers' routers give logits ``[N, experts]``, and weights and indices of those chosen, ``[N, k]``."""
    chosen = given()
    if chosen is None:
        return None
    logits, weights, live = outputs
    indices = torch.where(is_known(chosen)[:, None], chosen.long(), live)
    replayed = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, indices)
    if router.norm_topk_prob:
        replayed = replayed / replayed.sum(-1, keepdim=True)
    return logits, replayed.to(weights.dtype), indices


def given() -> torch.Tensor | None:
    """``[N, k]`` the experts that the rows of the layer that runs in this thread are sent to, where they are known
    (``is_known``); None: its router chooses."""
    return _chosen.get(None)


def is_known(chosen: torch.Tensor) -> torch.Tensor:
    """``[...]`` of ``chosen [..., k]``: a router chooses k different experts, and one of them k times stands for a
    token of which nothing was told."""
    return chosen[..., 0] != chosen[..., -1]


def check(routed_experts: ByteArray | None, model: nn.Module, experts: int) -> None:
    """Raises ``LearnerError`` for choices ``[all, layers, k]`` that are not of this ``model``, whose layers have so
    many ``experts``."""
    if routed_experts is None:
        return
    routers = routers_of(model)
    layers, chosen = routed_experts.shape[1:]
    largest = int(routed_experts.max(initial=0))
    if layers != len(routers) or any(router.top_k != chosen for router in routers) or largest >= max(experts, 1):
        raise LearnerError(
            f"the engine chose {chosen} experts in each of {layers} layers, up to number {largest}, but the model's "
            f"{len(routers)} routers choose among {experts}: engine and learner have different models; please report "
            "this, and remove algorithm.routingReplay until it is fixed"
        )


def experts_in_row(row: Row, routed_experts: ByteArray) -> ByteArray:
    """The experts of a batch ``[all, layers, k]`` as a row ``[N, layers, k]`` has them; the tokens that fill it up are
    sent anywhere."""
    if not len(routed_experts):  # a rank without sequences runs a row of no meaning
        return np.zeros((len(row.source), *routed_experts.shape[1:]), np.uint8)
    return routed_experts[row.source]
