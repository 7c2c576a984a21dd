"""The last layer computes only what is read: the rows that predict a response token.

Every row of a packed row asks and is asked in attention, layer by layer; of the last layer's output only the rows
before each response token are used (for log-probs, values, states). A prompt's other rows still give keys and values
there, but their queries and their feed-forward part are left out. What that saves is the prompts' share of one layer: a
quarter of the work in a model of two layers with long prompts, next to nothing in one of eighty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rljob_trainer.learner.attention import Packed

_PLAIN = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})

_SANDWICHED = frozenset({"Gemma2DecoderLayer", "Gemma3DecoderLayer"})
"""Those that norm what attention and feed-forward give, too, before it is added (arXiv 2408.00118, table 1)."""


def is_plain(layer: nn.Module) -> bool:
    """Whether the layer is one of Llama's kind: pre-norm attention and feed-forward, each added to its input. Classes
    of other packages with these names may do anything."""
    return _is_one_of(_PLAIN, layer)


def _is_one_of(names: frozenset[str], layer: nn.Module) -> bool:
    return type(layer).__name__ in names and type(layer).__module__.startswith("transformers.models.")


def compute_outputs_only(layers: list[nn.Module]) -> bool:
    """Lets the last layer follow ``Packed.last`` where a row has one. Returns whether this kind of layer can.

    The layer's forward is wrapped, as for activation checkpointing and before it; without packed rows (an engine on the
    live model) it is what it was.
    """
    if not layers:
        return False
    layer = layers[-1]
    if is_plain(layer):
        rest = _fed
    elif _is_one_of(_SANDWICHED, layer):
        rest = _fed_sandwiched
    else:
        return False
    layer.forward = functools.partial(_forward, layer, layer.forward, rest)
    return True


def _forward(
    layer: Any,
    every_row: Callable[..., torch.Tensor],
    rest: Callable[[Any, torch.Tensor, torch.Tensor, Packed], torch.Tensor],
    hidden_states: torch.Tensor,
    *args: Any,
    packed: Packed | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``hidden_states [1, N, d]`` to ``[1, M, d]``."""
    if packed is None:
        return every_row(hidden_states, *args, **kwargs)
    if packed.last is None:
        return every_row(hidden_states, *args, packed=packed, **kwargs)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), packed=packed.last, **kwargs)
    return rest(layer, hidden_states, attended, packed.last)


def _fed(layer: Any, hidden_states: torch.Tensor, attended: torch.Tensor, last: Packed) -> torch.Tensor:
    """Pre-norm attention and feed-forward, each added to its input."""
    hidden = last.outputs((hidden_states + attended)[0])[None]
    fed: torch.Tensor = layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden + fed


def _fed_sandwiched(layer: Any, hidden_states: torch.Tensor, attended: torch.Tensor, last: Packed) -> torch.Tensor:
    """The layer's rows that are asked for, where a norm stands behind attention and feed-forward part as well."""
    kept, attended = (last.outputs(x[0])[None] for x in (hidden_states, attended))
    hidden: torch.Tensor = kept + layer.post_attention_layernorm(attended)
    fed: torch.Tensor = layer.mlp(layer.pre_feedforward_layernorm(hidden))
    added: torch.Tensor = layer.post_feedforward_layernorm(fed)
    return hidden + added
