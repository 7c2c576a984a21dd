"""Which matrices tensor parallelism divides, and how the modules that own them compute with parts.

A module keeps a plain parameter that holds its part: to FSDP2, which cuts it further, it is like any other. Modules'
forward functions are wrapped where ranks meet (``learner/tensor.py``); between those places transformers' own code
runs, on as many heads and columns as it finds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rljob_trainer.errors import JobFileError
from rljob_trainer.learner.models import Critic, Policy
from rljob_trainer.learner.tensor import TensorRanks
from rljob_trainer.models.config import TENSOR_FAMILIES

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Modules whose outputs are divided: rows of the matrix, and of the bias."""
_COLUMNS = ("o_proj", "down_proj")
"""Those whose inputs are; the bias is added to the sum, by everybody."""
_OF_HEADS = ("q_norm", "k_norm")
"""All ranks have them, and compute a part of the gradient: that of their own heads."""


@dataclass(frozen=True, slots=True)
class DividedDimension:
    """Along which dimension a parameter is divided, and how long the whole is there."""

    dimension: int
    length: int


def _dimension(owner: str, own_name: str) -> int | None:
    """Along which dimension a module's parameter is divided; None: all ranks have all of it."""
    kind = owner.rpartition(".")[2]
    if kind in _ROWS:
        return 0
    return 1 if kind in _COLUMNS and own_name == "weight" else None


def divided_dimensions(module: Policy | Critic) -> dict[str, DividedDimension]:
    """By name, in which dimension each parameter of a model is divided, before any is cut. All others are on every
    rank."""
    found = {}
    for name, parameter in module.named_parameters():
        owner, _, own_name = name.rpartition(".")
        if (dimension := _dimension(owner, own_name)) is not None:
            found[name] = DividedDimension(dimension, parameter.shape[dimension])
    return found


def has_part_of_gradient(name: str) -> bool:
    """Whether ranks have a parameter whole, and of its gradient a summand each."""
    return name.rpartition(".")[0].rpartition(".")[2] in _OF_HEADS


def check_divisible(config: Any, tensor: int, context: int, whose: str = "the model") -> None:
    """Raises ``JobFileError`` for a model whose layers cannot be divided among ``tensor`` ranks, each of which divides
    its heads once more among ``context``. ``whose`` heads they are, for the message."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if tensor == 1:
        if heads % context:
            raise JobFileError(
                f"spec.trainer.parallelism.context: the {heads} attention heads of {whose} cannot be divided among "
                f"{context} context ranks; use a divisor of {heads}"
            )
        return
    field = "spec.trainer.parallelism.tensor"
    if config.model_type not in TENSOR_FAMILIES:
        raise JobFileError(
            f"{field}: {whose} has the type {config.model_type}, but tensor parallelism supports only "
            f"{', '.join(TENSOR_FAMILIES)}; use 1, and context or shard instead"
        )
    if heads % (tensor * context):
        raise JobFileError(
            f"{field}: the {heads} attention heads of {whose} cannot be divided among tensor x context = "
            f"{tensor} x {context} ranks; use divisors of {heads}"
        )
    if kv_heads % tensor:
        raise JobFileError(
            f"{field}: the {kv_heads} key heads of {whose} cannot be divided among {tensor} tensor ranks; use a "
            f"divisor of {kv_heads}"
        )


def compute_in_parts(module: Policy | Critic, tensor: TensorRanks) -> None:
    """Wraps the forward functions of a whole model's modules. What they compute with is read when they run."""
    for layer in module.layers:
        for name, part in layer.named_modules():
            if name in ("self_attn", "mlp"):
                part.forward = functools.partial(_entering, tensor, part.forward)
            elif name.rpartition(".")[2] in _COLUMNS:
                part.forward = functools.partial(_summed, tensor, part)
    backbone: Any = module.language_model if isinstance(module, Policy) else module.backbone
    embedding = backbone.get_input_embeddings()
    words = tensor.part(embedding.num_embeddings)
    if embedding.padding_idx is not None:  # whose gradient is 0
        here = words.start <= embedding.padding_idx < words.stop
        embedding.padding_idx = embedding.padding_idx - words.start if here else None
    embedding.forward = functools.partial(_looked_up, tensor, embedding.forward, words)


def cut(module: nn.Module, tensor: TensorRanks) -> None:
    """Leaves each parameter of ``module`` that is divided this rank's part. What several modules share stays shared;
    what FSDP2 has already was cut before."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, owner in module.named_modules():
        for own_name, parameter in list(owner._parameters.items()):
            dimension = _dimension(name, own_name)
            if parameter is None or dimension is None or isinstance(parameter, DTensor):
                continue
            if parameter not in made:
                part = tensor.part(parameter.shape[dimension])
                own = parameter.detach().narrow(dimension, part.start, part.stop - part.start)
                # A copy: a view would keep the whole in memory.
                values = own.clone(memory_format=torch.contiguous_format)
                made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            owner._parameters[own_name] = made[parameter]


def _entering(
    tensor: TensorRanks, forward: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return forward(tensor.entering(hidden_states), *args, **kwargs)


def _summed(tensor: TensorRanks, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    total = tensor.summed(nn.functional.linear(x, linear.weight))
    return total if linear.bias is None else total + linear.bias


def _looked_up(
    tensor: TensorRanks, forward: Callable[[torch.Tensor], torch.Tensor], words: slice, token_ids: torch.Tensor
) -> torch.Tensor:
    others = (token_ids < words.start) | (token_ids >= words.stop)
    own = forward((token_ids - words.start).masked_fill(others, 0))
    return tensor.summed(own.masked_fill(others[..., None], 0))


def by_parameter(
    modules: Iterable[nn.Module], dimensions: Mapping[str, DividedDimension]
) -> dict[torch.Tensor, DividedDimension]:
    """``dimensions`` of names as those of the parameters that bear them in ``modules``."""
    return {
        parameter: dimensions[name]
        for module in modules
        for name, parameter in module.named_parameters()
        if name in dimensions
    }
