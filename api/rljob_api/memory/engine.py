"""An engine's memory on one of its GPUs.

vLLM takes the share of the GPU that it is told (``gpu_memory_utilization``) and fills with its KV cache what weights,
activations and CUDA graphs leave of it. Weights and the cache's bytes per token are exact; what it needs for
activations and graphs it measures itself when it starts, and is an estimate here.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.memory import parts
from rljob_api.memory.activations import FLOAT
from rljob_api.memory.adapter import AdapterShape
from rljob_api.memory.parts import Moment
from rljob_api.memory.shape import ModelShape, numbers

DEFAULT_SHARE = 0.92
"""vLLM's ``gpu_memory_utilization`` unless told (version 0.32)."""
_GRAPH_SIZES = 51
"""Batch sizes that vLLM captures of up to 256 sequences by default: 1, 2, 4 and the multiples of 8, then of 16."""
_GRAPH_BYTES = 12 << 20
"""Of one of them, about: published logs of 7B models on one GPU say 0.4 to 0.8 GiB for all."""
_SAMPLER_COPIES = 3
"""Float32 matrices ``[sequences, vocabulary]`` at once in sampling: logits, their log-softmax, and the sorted ones."""


@dataclass(frozen=True, slots=True)
class EngineGpu:
    """One GPU's part of an engine."""

    shape: ModelShape
    itemsize: int
    """Bytes of a number of the weights."""
    context: int
    """Tokens of the longest sequence."""
    sequences: int
    """Those that run at once, at most."""
    tensor: int = 1
    """GPUs of the engine."""
    vllm: bool = True
    share: float = DEFAULT_SHARE
    memory: int | None = None
    """Of the GPU."""
    batched: int = 8192
    """Prompt tokens in one pass."""
    cache_itemsize: int | None = None
    """Bytes of a number of the KV cache; None: as of the weights."""
    cache_bytes: int | None = None
    """What the cache was told to take (``kv_cache_memory_bytes``)."""
    eager: bool = False
    adapter: AdapterShape | None = None
    """What is computed beside the weights; None: nothing is, or it is added to them."""

    @property
    def weights(self) -> int:
        """Matrices are divided among the engine's GPUs, but for key and value heads that are fewer; norms are not."""
        shape, tensor = self.shape, self.tensor
        keys = self._keys * shape.hidden
        queries, wide = shape.queries * shape.hidden // tensor, 3 * shape.intermediate * shape.hidden // tensor
        if shape.experts:  # each of which is divided; the router is not
            wide = numbers(shape.expert_stacks()) // tensor + shape.experts * shape.hidden
        vectors = sum(vector[0] for vector in shape.layer_vectors())
        layer = 2 * queries + 2 * keys + wide + vectors
        outer = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden // tensor + shape.hidden
        return self.itemsize * (shape.layers * layer + outer)

    @property
    def slot(self) -> int:
        """Where the adapter of each version takes the place of the last one's."""
        return 0 if self.adapter is None else self.itemsize * self.adapter.in_engine(self.shape)

    @property
    def _keys(self) -> int:
        """The width of the keys on one GPU."""
        return self.shape.head_width * max(1, self.shape.kv_heads // self.tensor)

    @property
    def token(self) -> int:
        """Bytes of one token in the KV cache."""
        return 2 * self.shape.layers * self._keys * (self.cache_itemsize or self.itemsize)

    @property
    def work(self) -> int:
        """Activations of one pass, without gradients, and what sampling needs: an estimate."""
        shape = self.shape
        wide = 3 * shape.intermediate
        if shape.experts:
            wide = shape.experts_per_token * (3 * shape.expert_width + shape.hidden)
        row = 4 * shape.hidden + (wide + shape.queries + 2 * shape.keys) // self.tensor
        sampler = _SAMPLER_COPIES * FLOAT * self.sequences * shape.vocabulary
        return max(self.itemsize * self.batched * row, sampler)

    @property
    def graphs(self) -> int:
        """CUDA graphs: an estimate."""
        return 0 if self.eager or not self.vllm else _GRAPH_SIZES * _GRAPH_BYTES

    @property
    def cache(self) -> int | None:
        """Bytes of the KV cache; below 0 where the share does not even hold the rest; None: the GPU is not known.

        The torch engine has no share: its cache grows with what runs.
        """
        if not self.vllm:
            return self.token * self.context * self.sequences
        if self.cache_bytes is not None:
            return self.cache_bytes
        if self.memory is None:
            return None
        return int(self.share * self.memory) - self.weights - self.slot - self.work - self.graphs

    @property
    def longest_at_once(self) -> float | None:
        """Sequences of full length that the cache holds; vLLM does not start with less than one."""
        return None if self.cache is None else self.cache / (self.token * self.context)

    @property
    def short(self) -> int:
        """Bytes that the cache lacks of what one sequence of full length needs."""
        return 0 if self.cache is None else max(0, self.token * self.context - self.cache)

    def sampling(self) -> Moment:
        """With the cache as large as it gets, or as one sequence where that is not known or does not fit."""
        least = self.token * self.context
        cache = least if self.cache is None else max(self.cache, least)
        return Moment(
            "sampling",
            {
                parts.ENGINE_WEIGHTS: self.weights,
                parts.ENGINE_ADAPTER: self.slot,
                parts.KV_CACHE: cache,
                parts.ENGINE_WORK: self.work,
                parts.GRAPHS: self.graphs,
            },
        )
