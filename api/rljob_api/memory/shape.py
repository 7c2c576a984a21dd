"""A decoder's shape: how many numbers it has, and where they lie, from the fields of its ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from rljob_api.spec.model import RandomModel

GEMMA = ("gemma2", "gemma3_text")
"""Families with norms on both sides of attention and feed-forward."""
CPU_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Those whose layers the learner computes in a way of its own on CPUs, which the plan follows."""
MIXTURES = ("qwen3_moe",)
"""Families whose feed-forward part is a mixture of experts, in every layer."""
FAMILIES = (*CPU_FAMILIES, *GEMMA, *MIXTURES)
"""The ``model_type`` values whose parameters are known one by one."""
_SPECIAL_TOKENS = 1
"""Beside the characters of a random model's tokenizer: the end of text."""

TensorShape = tuple[int, ...]
"""The shape of a parameter."""


class UnknownShapeError(ValueError):
    """A configuration of a family that is not known here, or without a field that it needs."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A causal language model of one of ``FAMILIES``."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the embedding is the output matrix too."""
    query_bias: bool = False
    """Whether the projections to queries, keys and values have one."""
    output_bias: bool = False
    """Whether the projection behind attention has one."""
    feed_forward_bias: bool = False
    caps_scores: bool = False
    """Whether the scores of attention have a soft cap, which no flash kernel knows."""
    caps_logits: bool = False
    experts: int = 0
    """Of each layer, in place of one feed-forward part; 0: the model is dense."""
    experts_per_token: int = 0
    expert_width: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelShape:
        """The shape that a ``config.json`` describes, in whose ``text_config`` the language model may be. Raises
        ``UnknownShapeError``."""
        text = config.get("text_config")
        fields: Mapping[str, object] = text if isinstance(text, Mapping) else config
        family = fields.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise UnknownShapeError(f"the model type {family!r} is not one of {', '.join(FAMILIES)}")

        def size(name: str, default: int | None = None) -> int:
            value = fields.get(name)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UnknownShapeError(f"{name} is {value!r}, not a whole number above 0")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        gemma, mixture = family in GEMMA, family in MIXTURES
        if mixture and (fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1):
            raise UnknownShapeError(f"some layers of this {family} have no experts")
        bias = family != "mistral" and bool(fields.get("attention_bias"))
        return cls(
            family=family,
            hidden=hidden,
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_width=size("head_dim", max(1, hidden // heads)),
            intermediate=size("intermediate_size"),
            vocabulary=size("vocab_size"),
            tied=bool(fields.get("tie_word_embeddings", gemma)),
            query_bias=family == "qwen2" or bias,
            output_bias=family != "qwen2" and bias,
            feed_forward_bias=family == "llama" and bool(fields.get("mlp_bias")),
            # Gemma 2 has both caps, unless its file says that it has not.
            caps_scores=gemma and fields.get("attn_logit_softcapping", family == "gemma2") not in (None, False),
            caps_logits=gemma and fields.get("final_logit_softcapping", family == "gemma2") not in (None, False),
            # The number of experts as published files call it, and as transformers writes it.
            experts=size("num_experts", _whole(fields.get("num_local_experts"))) if mixture else 0,
            experts_per_token=size("num_experts_per_tok") if mixture else 0,
            expert_width=size("moe_intermediate_size") if mixture else 0,
        )

    @classmethod
    def of_random(cls, model: RandomModel) -> ModelShape | None:
        """The shape of ``spec.model.random``; None where its tokenizer, and so its vocabulary, comes from elsewhere,
        and for a family that is not known here."""
        characters = model.tokenizer.characters
        if characters is None or model.family not in FAMILIES:
            return None
        return cls(
            family=model.family,
            hidden=model.hidden_size,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads or model.heads,
            head_width=model.hidden_size // model.heads,
            intermediate=model.intermediate_size or 4 * model.hidden_size,
            vocabulary=len(set(characters)) + _SPECIAL_TOKENS,
            tied=model.tie_embeddings,
            query_bias=model.family == "qwen2",
            caps_scores=model.family == "gemma2",
            caps_logits=model.family == "gemma2",
            experts=model.experts if model.family in MIXTURES else 0,
            experts_per_token=model.experts_per_token if model.family in MIXTURES else 0,
            expert_width=(model.intermediate_size or 4 * model.hidden_size) if model.family in MIXTURES else 0,
        )

    # --- parameters ---------------------------------------------------------------------------------------------------

    @property
    def queries(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """The width of all key heads together, which is that of the values too."""
        return self.kv_heads * self.head_width

    @property
    def sandwiched(self) -> bool:
        """Whether what attention and feed-forward give is normed, too."""
        return self.family in GEMMA

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normed, head by head."""
        return self.family in ("qwen3", "gemma3_text", *MIXTURES)

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """The matrices ``(out, in)`` of the linear layers of one layer, by their names inside of it. Experts and their
        router are none."""
        d, q, k, m = self.hidden, self.queries, self.keys, self.intermediate
        attention = {
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (k, d),
            "self_attn.v_proj": (k, d),
            "self_attn.o_proj": (d, q),
        }
        if self.experts:
            return attention
        return attention | {"mlp.gate_proj": (m, d), "mlp.up_proj": (m, d), "mlp.down_proj": (d, m)}

    def expert_stacks(self) -> list[TensorShape]:
        """The matrices of all experts of a layer: into them, gate and up together, and out of them."""
        n, d, m = self.experts, self.hidden, self.expert_width
        return [(n, 2 * m, d), (n, d, m)] if n else []

    def layer_matrices(self) -> list[TensorShape]:
        """The matrices of one layer, and stacks of them."""
        router: list[TensorShape] = [(self.experts, self.hidden)] if self.experts else []
        return [*self.linear_layers().values(), *router, *self.expert_stacks()]

    def layer_vectors(self) -> list[TensorShape]:
        """The norms and biases of one layer."""
        d, q, k, m = self.hidden, self.queries, self.keys, self.intermediate
        vectors: list[TensorShape] = [(d,)] * (4 if self.sandwiched else 2)
        if self.query_bias:
            vectors += [(q,), (k,), (k,)]
        if self.output_bias:
            vectors.append((d,))
        if self.feed_forward_bias:
            vectors += [(m,), (m,), (d,)]
        if self.norms_heads:
            vectors += [(self.head_width,), (self.head_width,)]
        return vectors

    def layer_tensors(self) -> list[TensorShape]:
        """The parameters of one layer."""
        return self.layer_matrices() + self.layer_vectors()

    def outer_tensors(self, *, value_head: bool = False) -> list[TensorShape]:
        """The parameters outside of the layers. ``value_head``: of a critic, which has values in place of logits."""
        outer: list[TensorShape] = [(self.vocabulary, self.hidden), (self.hidden,)]
        if value_head:
            return [*outer, (1, self.hidden), (1,)]
        return outer if self.tied else [*outer, (self.vocabulary, self.hidden)]

    def tensors(self, *, value_head: bool = False) -> Iterator[TensorShape]:
        """All parameters, each once."""
        for _ in range(self.layers):
            yield from self.layer_tensors()
        yield from self.outer_tensors(value_head=value_head)

    def part(self, ranks: int) -> ModelShape:
        """What each of ``ranks`` that compute layers together has: its heads, columns and words (the rank that has
        most)."""
        return self if ranks == 1 else _part(self, ranks)

    @property
    def parameters(self) -> int:
        """How many numbers the language model has."""
        return self.shard()

    def shard(self, shards: int = 1, *, value_head: bool = False) -> int:
        """The numbers on the rank that has most of them, when each tensor is cut along its first dimension."""
        return _shard(self, shards, value_head)

    @property
    def largest(self) -> int:
        """The numbers of the largest tensor."""
        return max(math.prod(tensor) for tensor in self.layer_tensors() + self.outer_tensors())

    @property
    def largest_published(self) -> int:
        """The numbers of the largest tensor that engines are given: stacks go expert by expert."""
        return max(math.prod(tensor[-2:]) for tensor in self.layer_tensors() + self.outer_tensors())


# A search for what would make a job fit asks the same of the same shape thousands of times.


@lru_cache(maxsize=256)
def _part(shape: ModelShape, ranks: int) -> ModelShape:
    return replace(
        shape,
        heads=shape.heads // ranks,
        kv_heads=shape.kv_heads // ranks,
        intermediate=-(-shape.intermediate // ranks),
        vocabulary=-(-shape.vocabulary // ranks),
    )


@lru_cache(maxsize=1024)
def _shard(shape: ModelShape, shards: int, value_head: bool) -> int:
    outer = numbers(shape.outer_tensors(value_head=value_head), shards)
    return shape.layers * numbers(shape.layer_tensors(), shards) + outer


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def numbers(tensors: list[TensorShape], shards: int = 1) -> int:
    """The numbers of some tensors on the rank that has most of them, as ``ModelShape.shard`` counts a model's."""
    return sum(-(-tensor[0] // shards) * math.prod(tensor[1:]) for tensor in tensors)
