"""Layers through ``torch.compile`` (``trainer.compile``): norms, rotations and activations become a few kernels.

What is not a matrix product in a layer reads and writes the whole row once for each small operation; the compiler makes
one pass of several of them. Three things stay as they are, and a layer is compiled in the pieces between them:
attention (``attention.packed_attention``), whose kernels are good and whose rows are cut up differently each time;
experts, who get the tokens that a router sends them; an adapter's matrices (``lora.py``), which may be off.

Rows have all lengths: the number of their tokens is a symbol to the compiler, and one program serves all. Programs are
kept in the folder of temporary files (``TORCHINDUCTOR_CACHE_DIR`` names another), Triton's among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_PROGRAMS = 32
"""Of one piece of code at most; beyond, it runs uncompiled. There are few: with gradients and without, of frozen
weights, of a row of a single token, of the first layer behind a frozen embedding."""

_OPTIONS = {"emulate_precision_casts": True}
"""In half precision a kernel of several operations rounds between them as they would have. Otherwise the programs with
and without gradients, which cut a layer into kernels differently, differ by thousandths of a nat in log-probs."""


def compile_layers(layers: list[nn.Module]) -> None:
    """Wraps each layer's forward: before activation checkpointing, which computes the compiled layer again, and before
    sharding, whose hooks sit around both. Programs are made when rows come, in half a minute for a model of any depth:
    layers of a kind share them."""
    compiler: Any = torch.compile
    for layer in layers:
        for part in layer.children():
            if "experts" in dict(part.named_children()):
                part.forward = torch.compiler.disable(part.forward)
        compiled = compiler(layer.forward, dynamic=True, options=_OPTIONS)
        layer.forward = functools.partial(_forward, layer.forward, compiled)


def allow_programs() -> None:
    """In the thread that calls it: torch's settings are each thread's own, and on a GPU the backward pass, which
    computes checkpointed layers again, has another than the forward pass. As an argument torch.compile of 2.11 does not
    know the limit."""
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = _PROGRAMS


def _forward(
    own: Callable[..., torch.Tensor],
    compiled: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Without packed rows (an engine on the live model) the layer is what it was."""
    if kwargs.get("packed") is None:
        return own(hidden_states, *args, **kwargs)
    allow_programs()
    return compiled(hidden_states, *args, **kwargs)
