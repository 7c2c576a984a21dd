"""A lean decoder of the Llama and Gemma families for sampling: the mathematics of one forward pass, and nothing else.

It reads the parameters of a Hugging Face folder, or uses those of a live module by reference, and knows two ways
through the layers: ``prefill`` (many tokens of new sequences) and ``decode`` (one token of every running sequence,
against a ``KVCache``). Which sequences run, how tokens are drawn and when they stop is ``torch_engine.py``'s part.

Activations are flat, ``[tokens, hidden]``. The families differ in optional parameters (``qkv`` bias: Qwen2, norms of
queries and keys: Qwen3 and Gemma 3, norms of what is added: Gemma) and in what ``DecoderConfig`` says.
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
from rljob_trainer.models.config import GEMMA, layer_types, ropes, soft_caps, unsupported_by_torch_engine
from rljob_trainer.models.soft_capping import capped_attention, soft_capped
from rljob_trainer.models.weights import weight_files
from rljob_trainer.rollout.kv_cache import KVCache

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [tokens, heads, D], keys and values [tokens, kv heads, D]) -> [tokens, heads * D]."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (arXiv 2104.09864)."""

    theta: float
    scaling: Mapping[str, Any] | None = None
    """Parameters of llama3 or linear scaling; None for plain RoPE."""

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Rope:
        """One of ``models.config.ropes``."""
        plain = parameters["rope_type"] == "default"
        return cls(float(parameters["rope_theta"]), None if plain else parameters)

    def frequencies(self, head_dim: int) -> Tensor:
        """Inverse frequencies ``[D / 2]`` in float32, scaled as Llama 3 does (or linearly) where the model asks."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse = 1.0 / (self.theta**exponents)
        scaling = self.scaling
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
    rope: Rope
    window_rope: Rope | None = None
    """Of layers with a window, where these have another one."""
    windows: tuple[int | None, ...] = ()
    """For each layer how many positions a token sees, itself included; None: all. Empty: all layers see all."""
    gemma: bool = False
    """Scaled embeddings, norms that multiply by one more than their weight, a norm of what each half of a layer adds,
    and GELU in place of SiLU."""
    query_scalar: float | None = None
    """Scores are divided by its root; None: by that of ``head_dim``."""
    score_cap: float | None = None
    logit_cap: float | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Reads a ``config.json`` (or ``config.to_dict()``). Raises ``JobFileError`` for what is not supported."""
        if (problem := unsupported_by_torch_engine(config)) is not None:
            raise JobFileError(f"rollout.engine: the torch engine {problem}; use rollout.engine: vllm")
        by_type = {kind: Rope.of(parameters) for kind, parameters in ropes(config).items()}
        gemma = config["model_type"] in GEMMA
        windows: tuple[int | None, ...] = ()
        if gemma:
            window = int(config["sliding_window"])
            windows = tuple(window if kind == "sliding_attention" else None for kind in layer_types(config))
        scores, logits = soft_caps(config)
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
            tied=bool(config.get("tie_word_embeddings", gemma)),
            rope=by_type["full_attention"],
            window_rope=by_type["sliding_attention"] if config["model_type"] == "gemma3_text" else None,
            windows=windows,
            gemma=gemma,
            query_scalar=float(config["query_pre_attn_scalar"]) if gemma else None,
            score_cap=scores,
            logit_cap=logits,
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


@dataclass(slots=True)
class _Layer:
    """One layer's parameters, as in Hugging Face: every weight is [out, in]."""

    input_norm: Tensor
    window: int | None
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    mixed_norm: Tensor | None
    """Of what attention adds; None: it is added as it is."""
    post_norm: Tensor
    fed_norm: Tensor | None
    """Of what the feed-forward part adds."""
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
                raise JobFileError(f"the model's weights lack {name}; they do not match the folder's config.json")
            self.tensors[name] = tensors[name]
            return tensors[name]

        def maybe(name: str) -> Tensor | None:
            return take(name) if name in tensors else None

        self._embedding = take("model.embed_tokens.weight")
        self._layers = [self._take_layer(index, take, maybe) for index in range(config.layers)]
        self._final_norm = take("model.norm.weight")
        self._head = self._embedding if config.tied else take("lm_head.weight")
        self.dtype = self._embedding.dtype
        self.device = self._embedding.device
        self._scale = (config.query_scalar or config.head_dim) ** -0.5
        # In the dtype of the weights, as the model was trained.
        self._embedding_scale = torch.tensor(config.hidden**0.5, dtype=self.dtype).item() if config.gemma else None
        self._rotations: dict[bool, tuple[Tensor, Tensor]] = {}

    def _take_layer(self, index: int, take: Callable[[str], Tensor], maybe: Callable[[str], Tensor | None]) -> _Layer:
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        gemma, after_attention = self.config.gemma, take(prefix + "post_attention_layernorm.weight")
        return _Layer(
            input_norm=take(prefix + "input_layernorm.weight"),
            window=self.config.windows[index] if self.config.windows else None,
            q=take(attention + "q_proj.weight"),
            k=take(attention + "k_proj.weight"),
            v=take(attention + "v_proj.weight"),
            o=take(attention + "o_proj.weight"),
            # Gemma calls the same name what is behind attention, not before the feed-forward part.
            mixed_norm=after_attention if gemma else None,
            post_norm=take(prefix + "pre_feedforward_layernorm.weight") if gemma else after_attention,
            fed_norm=take(prefix + "post_feedforward_layernorm.weight") if gemma else None,
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
            window = self._layers[layer].window
            if self.config.score_cap is not None:
                out = capped_attention(q, k, v, cap=self.config.score_cap, scale=self._scale, window=window)
            else:
                mask = None if window is None or window >= length else _window(length, window, self.device)
                out = functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=q.shape != k.shape
                )
            return out.transpose(1, 2).reshape(count * length, -1)

        def rotation(local: bool) -> tuple[Tensor, Tensor]:
            cos, sin = (x[:length, None].repeat(count, 1, 1) for x in self._rotation(length, local))
            return cos, sin

        return self._run(ids.reshape(-1), rotation, attend).view(count, length, -1)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int, cache: KVCache) -> Tensor:
        """One token ``[n]`` at ``positions [n]`` of the cache's first n rows, attending over at most ``longest`` tokens
        (positions included); returns hidden states ``[n, hidden]``."""
        kv_heads, groups = self.config.kv_heads, self.config.heads // self.config.kv_heads
        count = tokens.shape[0]
        cells = cache.cells(positions)
        biases = {window: cache.bias(positions, longest, window) for window in {x.window for x in self._layers}}
        cap = self.config.score_cap

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.append(layer, cells, k, v, count, longest)
            q = q.reshape(count * kv_heads, groups, self.config.head_dim)
            bias = biases[self._layers[layer].window]
            # Two batched products beat the fused kernel for a single query on the CPU, at every length measured.
            if cap is None:
                scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=self._scale)
            else:
                scores = soft_capped(torch.bmm(q, keys.transpose(1, 2)) * self._scale, cap) + bias
            return torch.bmm(scores.softmax(-1).to(values.dtype), values).view(count, -1)

        def rotation(local: bool) -> tuple[Tensor, Tensor]:
            cos, sin = (x.index_select(0, positions)[:, None] for x in self._rotation(longest, local))
            return cos, sin

        return self._run(tokens, rotation, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits ``[n, vocabulary]`` of hidden states ``[n, hidden]``."""
        return soft_capped(functional.linear(hidden, self._head), self.config.logit_cap)

    def _run(self, tokens: Tensor, rotation: Callable[[bool], tuple[Tensor, Tensor]], attend: Attend) -> Tensor:
        """All layers over flat ``tokens [N]`` with rotations ``[N, 1, D]``; returns normed states ``[N, hidden]``."""
        config = self.config
        half, by_head = config.head_dim // 2, (tokens.shape[0], -1, config.head_dim)
        rotations = {local: rotation(local) for local in (False, True) if not local or config.window_rope}
        x = functional.embedding(tokens, self._embedding)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        for index, layer in enumerate(self._layers):
            y = self._normed(x, layer.input_norm)
            q = functional.linear(y, layer.q, layer.q_bias).view(by_head)
            k = functional.linear(y, layer.k, layer.k_bias).view(by_head)
            v = functional.linear(y, layer.v, layer.v_bias).view(by_head)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
            cos, sin = rotations[layer.window is not None and config.window_rope is not None]
            # rotate_half(x) * sin = roll(x, D / 2) * (sin with its first half negated)
            q = torch.addcmul(q * cos, q.roll(half, -1), sin)
            k = torch.addcmul(k * cos, k.roll(half, -1), sin)
            x = self._added(x, attend(index, q, k, v), layer.o, layer.o_bias, layer.mixed_norm)
            y = self._normed(x, layer.post_norm)
            gate = functional.linear(y, layer.gate, layer.gate_bias)
            gate = functional.gelu(gate, approximate="tanh") if config.gemma else functional.silu(gate)
            gated = gate.mul_(functional.linear(y, layer.up, layer.up_bias))
            x = self._added(x, gated, layer.down, layer.down_bias, layer.fed_norm)
        return self._normed(x, self._final_norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x [..., D]`` over the root of its mean square, times ``weight [D]``."""
        if not self.config.gemma:
            return functional.rms_norm(x, weight.shape, weight, self.config.norm_epsilon)
        # One more than the weight has more digits than half precision.
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = functional.rms_norm(x.to(wide), weight.shape, weight.to(wide) + 1.0, self.config.norm_epsilon)
        return normed.to(x.dtype)

    def _added(self, x: Tensor, y: Tensor, matrix: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
        """``x`` and what half a layer adds: ``matrix`` times ``y``, normed where Gemma norms it."""
        if norm is not None:
            return x + self._normed(functional.linear(y, matrix, bias), norm)
        x = torch.addmm(x, y, matrix.t())
        if bias is not None:
            x += bias
        return x

    def _rotation(self, length: int, local: bool = False) -> tuple[Tensor, Tensor]:
        """Tables of cosines and signed sines ``[>= length, D]``, grown by doubling. ``local``: by ``window_rope``."""
        cos, sin = self._rotations.get(local, (torch.empty(0), torch.empty(0)))
        if cos.shape[0] < length:
            rope = self.config.window_rope if local and self.config.window_rope else self.config.rope
            positions = torch.arange(max(length, 2 * cos.shape[0], 256), dtype=torch.float32)
            angles = torch.outer(positions, rope.frequencies(self.config.head_dim))
            cos, sin = angles.cos(), angles.sin()
            cos = torch.cat((cos, cos), -1).to(self.device, self.dtype)
            sin = torch.cat((-sin, sin), -1).to(self.device, self.dtype)
            self._rotations[local] = cos, sin
        return cos, sin


def _window(length: int, window: int, device: torch.device) -> Tensor:
    """``[length, length]``: whether a token sees another, at most ``window - 1`` places before it."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)
