"""A lean decoder of the Llama family for sampling: the mathematics of one forward pass, and nothing else.

It reads the parameters of a Hugging Face folder, or uses those of a live module by reference, and knows two ways
through the layers: ``prefill`` (many tokens of new sequences) and ``decode`` (one token of every running sequence,
against a ``KVCache``). Which sequences run, how tokens are drawn and when they stop is ``torch_engine.py``'s part.

Activations are flat, ``[tokens, hidden]``; the families differ only in optional parameters (``qkv`` bias: Qwen2, norms
of queries and keys: Qwen3).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.config import unsupported_by_torch_engine
from rljob_trainer.models.weights import weight_files
from rljob_trainer.rollout.kv_cache import KVCache

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [tokens, heads, D], keys and values [tokens, kv heads, D]) -> [tokens, heads * D]."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The numbers that fix a model's shape."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_epsilon: float
    tied: bool
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    """Parameters of llama3 or linear scaling; None for plain RoPE."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Reads a ``config.json`` (or ``config.to_dict()``). Raises ``JobFileError`` for what is not supported."""
        if (problem := unsupported_by_torch_engine(config)) is not None:
            raise JobFileError(f"rollout.engine: the torch engine {problem}; use rollout.engine: vllm")
        # transformers 5 writes one mapping `rope_parameters`; earlier versions `rope_theta` and `rope_scaling`.
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        heads = int(config["num_attention_heads"])
        return cls(
            vocabulary=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            context=int(config["max_position_embeddings"]),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            rope_scaling=None if rope_type == "default" else {**rope, "rope_type": rope_type},
        )


def read_folder(
    folder: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """The configuration and parameters (by Hugging Face name) of a local folder with safetensors files."""
    from safetensors import safe_open

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise JobFileError(f"model folder {folder} has no config.json; expected a Hugging Face folder with safetensors")
    config = DecoderConfig.from_hf(json.loads((folder / "config.json").read_text()))
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (not a mapping)
                tensors[name] = handle.get_tensor(name).to(device=device, dtype=dtype, copy=True).contiguous()
    return config, tensors


def module_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """The live parameters of a Hugging Face module by name, sharing storage with it.

    A sharded parameter is accepted when one rank holds all of it; else ``ValueError``.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        local = parameter.detach()
        if hasattr(local, "to_local"):
            whole = local.shape
            local = local.to_local()
            if local.shape != whole:
                raise ValueError(f"parameter {name} is sharded over several ranks and cannot be shared without a copy")
        tensors[name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")] = local
    return tensors


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Inverse frequencies ``[D / 2]`` in float32, scaled as Llama 3 does (or linearly) where the model asks for it."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return inverse / factor
    # Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * inverse / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inverse / factor + kept * inverse


@dataclass(slots=True)
class _Layer:
    """One layer's parameters, as in Hugging Face: every weight is [out, in]."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    o_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


class Decoder:
    """The forward pass over parameters that it does not copy. ``tensors`` maps Hugging Face names to them."""

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.tensors: dict[str, Tensor] = {}
        """The parameters in use, by Hugging Face name (a tied output head is not listed)."""

        def take(name: str) -> Tensor:
            if name not in tensors:
                raise JobFileError(f"the model's weights lack {name}; the folder does not fit its config.json")
            self.tensors[name] = tensors[name]
            return tensors[name]

        def maybe(name: str) -> Tensor | None:
            return take(name) if name in tensors else None

        self._embedding = take("model.embed_tokens.weight")
        self._layers = [self._take_layer(f"model.layers.{index}.", take, maybe) for index in range(config.layers)]
        self._final_norm = take("model.norm.weight")
        self._head = self._embedding if config.tied else take("lm_head.weight")
        self.dtype = self._embedding.dtype
        self.device = self._embedding.device
        self._scale = config.head_dim**-0.5
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    @staticmethod
    def _take_layer(prefix: str, take: Callable[[str], Tensor], maybe: Callable[[str], Tensor | None]) -> _Layer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return _Layer(
            input_norm=take(prefix + "input_layernorm.weight"),
            q=take(attention + "q_proj.weight"),
            k=take(attention + "k_proj.weight"),
            v=take(attention + "v_proj.weight"),
            o=take(attention + "o_proj.weight"),
            post_norm=take(prefix + "post_attention_layernorm.weight"),
            gate=take(mlp + "gate_proj.weight"),
            up=take(mlp + "up_proj.weight"),
            down=take(mlp + "down_proj.weight"),
            q_bias=maybe(attention + "q_proj.bias"),
            k_bias=maybe(attention + "k_proj.bias"),
            v_bias=maybe(attention + "v_proj.bias"),
            o_bias=maybe(attention + "o_proj.bias"),
            q_norm=maybe(attention + "q_norm.weight"),
            k_norm=maybe(attention + "k_norm.weight"),
            gate_bias=maybe(mlp + "gate_proj.bias"),
            up_bias=maybe(mlp + "up_proj.bias"),
            down_bias=maybe(mlp + "down_proj.bias"),
        )

    def prefill(
        self, ids: Tensor, cache: KVCache | None = None, rows: slice | None = None, source: Tensor | None = None
    ) -> Tensor:
        """Runs new sequences ``ids [P, S]`` (right-padded) from position 0; returns hidden states ``[P, S, hidden]``.

        With a cache, sequence ``source[i]`` is also written into the i-th row of ``rows``: several rows may take
        one sequence, so siblings of a prompt are computed once.
        """
        count, length = ids.shape
        shape = (count, length, -1, self.config.head_dim)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(shape).transpose(1, 2) for x in (q, k, v))
            if cache is not None and rows is not None and source is not None:
                cache.write_rows(layer, rows, k.index_select(0, source), v.index_select(0, source))
            grouped = self.config.heads != self.config.kv_heads
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return out.transpose(1, 2).reshape(count * length, -1)

        cos, sin = self._rotation(length)
        cos = cos[:length, None].repeat(count, 1, 1)
        sin = sin[:length, None].repeat(count, 1, 1)
        return self._run(ids.reshape(-1), cos, sin, attend).view(count, length, -1)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int, cache: KVCache) -> Tensor:
        """One token ``[n]`` at ``positions [n]`` of the cache's first n rows, attending over at most ``longest`` tokens
        (positions included); returns hidden states ``[n, hidden]``."""
        kv_heads, groups = self.config.kv_heads, self.config.heads // self.config.kv_heads
        count = tokens.shape[0]
        cells = cache.cells(positions)
        bias = cache.bias(positions, longest)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.append(layer, cells, k, v, count, longest)
            q = q.reshape(count * kv_heads, groups, self.config.head_dim)
            # Two batched products beat the fused kernel for a single query on the CPU, at every length measured.
            weights = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=self._scale).softmax(-1)
            return torch.bmm(weights, values).view(count, -1)

        cos, sin = self._rotation(longest)
        return self._run(
            tokens, cos.index_select(0, positions)[:, None], sin.index_select(0, positions)[:, None], attend
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits ``[n, vocabulary]`` of hidden states ``[n, hidden]``."""
        return functional.linear(hidden, self._head)

    def _run(self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """All layers over flat ``tokens [N]`` with rotations ``[N, 1, D]``; returns normed states ``[N, hidden]``."""
        config = self.config
        hidden, epsilon, half = (config.hidden,), config.norm_epsilon, config.head_dim // 2
        by_head = (tokens.shape[0], -1, config.head_dim)
        x = functional.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            y = functional.rms_norm(x, hidden, layer.input_norm, epsilon)
            q = functional.linear(y, layer.q, layer.q_bias).view(by_head)
            k = functional.linear(y, layer.k, layer.k_bias).view(by_head)
            v = functional.linear(y, layer.v, layer.v_bias).view(by_head)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = functional.rms_norm(q, (config.head_dim,), layer.q_norm, epsilon)
                k = functional.rms_norm(k, (config.head_dim,), layer.k_norm, epsilon)
            # rotate_half(x) * sin = roll(x, D / 2) * (sin with its first half negated)
            q = torch.addcmul(q * cos, q.roll(half, -1), sin)
            k = torch.addcmul(k * cos, k.roll(half, -1), sin)
            x = torch.addmm(x, attend(index, q, k, v), layer.o.t())
            if layer.o_bias is not None:
                x += layer.o_bias
            y = functional.rms_norm(x, hidden, layer.post_norm, epsilon)
            gated = functional.silu(functional.linear(y, layer.gate, layer.gate_bias)).mul_(
                functional.linear(y, layer.up, layer.up_bias)
            )
            x = torch.addmm(x, gated, layer.down.t())
            if layer.down_bias is not None:
                x += layer.down_bias
        return functional.rms_norm(x, hidden, self._final_norm, epsilon)

    def _rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Tables of cosines and signed sines ``[>= length, D]``, grown by doubling."""
        if self._cos.shape[0] < length:
            positions = torch.arange(max(length, 2 * self._cos.shape[0], 256), dtype=torch.float32)
            angles = torch.outer(positions, rope_frequencies(self.config))
            cos, sin = angles.cos(), angles.sin()
            self._cos = torch.cat((cos, cos), -1).to(self.device, self.dtype)
            self._sin = torch.cat((-sin, sin), -1).to(self.device, self.dtype)
        return self._cos, self._sin
