"""The layer of Llama, Mistral, Qwen2 and Qwen3 over packed rows on CPUs: the same numbers in fewer passes.

transformers' own layers are written for all devices and shapes. On a CPU, where each of their small operations reads
and writes the whole row once more, what is not a matrix product took two fifths of an update of a small model. Here
rows stay ``[N, columns]`` throughout, without the copies between layouts; the scale of a norm is multiplied into the
matrices that read it, which are small beside the row; norm and rotation have their gradients written out; residuals
are added by the matrix product that makes the other summand.

In half precision, where the scale in the matrices would be rounded, and on GPUs, layers keep their own forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rljob_trainer.learner.attention import Packed, attended
from rljob_trainer.learner.last_layer import is_plain

_MATRICES = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def compute_in_rows(layers: list[nn.Module]) -> None:
    """Lets plain layers compute packed rows as below; the last one leaves out what nobody reads (``Packed.last``)."""
    for layer in layers:
        if is_plain(layer) and _reads_all_of(layer):
            layer.forward = functools.partial(_forward, layer, layer.forward, last=layer is layers[-1])


def _reads_all_of(layer: nn.Module) -> bool:
    """Whether the layer's matrices are all there is to its products: an adapter beside one would be passed by, since
    ``weight`` is the matrix alone."""
    return all(type(layer.get_submodule(name)) is nn.Linear for name in _MATRICES)


def _forward(
    layer: Any,
    own: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    *args: Any,
    last: bool,
    **kwargs: Any,
) -> torch.Tensor:
    """``hidden_states [1, N, d]`` to ``[1, N, d]``, or ``[1, M, d]`` of the rows that are read.

    Without packed rows (an engine on the live model) too the layer is what it was.
    """
    packed: Packed | None = kwargs.get("packed")
    on_cpu, half = hidden_states.device.type == "cpu", hidden_states.dtype.itemsize < torch.float32.itemsize
    if packed is None or half or not on_cpu:
        return own(hidden_states, *args, **kwargs)
    part = packed.last if last and packed.last is not None else packed
    cos, sin = (angles[0] for angles in kwargs["position_embeddings"])
    return _layer(layer, hidden_states[0], part, cos, sin)[None]


def _layer(layer: Any, rows: torch.Tensor, packed: Packed, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pre-norm attention and feed-forward, each added to its input: ``rows [N, d]`` to ``[M, d]``."""
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    normed = _unit_norm(rows, layer.input_layernorm.variance_epsilon)
    read, read_cos, read_sin = (packed.outputs(x) for x in (normed, cos, sin))
    scale = layer.input_layernorm.weight
    query, key, value = (
        _scaled_linear(x, projection, scale)
        for x, projection in ((read, attention.q_proj), (normed, attention.k_proj), (normed, attention.v_proj))
    )
    query = _rotated(_head_normed(query, attention, "q_norm"), read_cos, read_sin)
    key = _rotated(_head_normed(key, attention, "k_norm"), cos, sin)
    mixed = attended(packed, query, key, value, attention.head_dim, attention.scaling, window)
    rows = _added(packed.outputs(rows), mixed, attention.o_proj)
    normed = _unit_norm(rows, layer.post_attention_layernorm.variance_epsilon)
    scale = layer.post_attention_layernorm.weight
    gate = mlp.act_fn(_scaled_linear(normed, mlp.gate_proj, scale))
    return _added(rows, gate * _scaled_linear(normed, mlp.up_proj, scale), mlp.down_proj)


def _scaled_linear(rows: torch.Tensor, linear: nn.Linear, scale: torch.Tensor) -> torch.Tensor:
    """``linear(rows * scale)``: the product with the scale costs one pass over the matrix in place of one a row."""
    return nn.functional.linear(rows, linear.weight * scale, linear.bias)


def _added(rows: torch.Tensor, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """``rows + linear(x)``."""
    result = torch.addmm(rows, x, linear.weight.T)
    return result if linear.bias is None else result + linear.bias


def _head_normed(rows: torch.Tensor, attention: Any, name: str) -> torch.Tensor:
    """Qwen3 norms the queries and keys of each head."""
    norm = getattr(attention, name, None)
    if norm is None:
        return rows
    normed: torch.Tensor = norm(rows.view(len(rows), -1, attention.head_dim))
    return normed.view(rows.shape)


class _UnitNorm(torch.autograd.Function):
    """``x [N, d]`` over the root of its mean square. With n the result: dx = (dn - n mean(n dn)) / root."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, epsilon: float) -> torch.Tensor:
        inverse = x.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        normed = x * inverse
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        normed, inverse = ctx.saved_tensors
        along = (grad * normed).mean(-1, keepdim=True)
        return torch.addcmul(grad, normed, along, value=-1).mul_(inverse), None


class _Rotated(torch.autograd.Function):
    """Rotary positions (arXiv:2104.09864) of ``x [N, H * D]`` by ``cos, sin [N, D]``, whose two halves are alike.

    Column i of a head and column i + D / 2 turn together. The gradient turns back.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float) -> torch.Tensor:
    tokens, dim = cos.shape
    heads = x.view(tokens, -1, dim)
    result = heads * cos[:, None]
    for to, by, sign in zip(result.chunk(2, -1), reversed(heads.chunk(2, -1)), (-direction, direction), strict=True):
        to.addcmul_(by, sin[:, None, : dim // 2], value=sign)
    return result.view(x.shape)


_unit_norm: Callable[..., torch.Tensor] = _UnitNorm.apply
_rotated: Callable[..., torch.Tensor] = _Rotated.apply
