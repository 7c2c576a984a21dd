"""spec.model: which language model is trained, or the shape of a random one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import Location, LongText, ShortText, SpecModel
from rljob_api.spec.lora import Lora

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Family = Literal["llama", "qwen2", "gemma2", "gemma3_text", "qwen3_moe"]


class RandomTokenizer(SpecModel):
    """Tokenizer of a random model. Set exactly one field."""

    characters: Annotated[str, Field(min_length=2, max_length=1024)] | None = Field(
        default=None,
        description="One token per character, plus end-of-text. For generated tasks.",
    )
    source: Location | None = Field(default=None, description="Path or hub id of an existing tokenizer.")


class RandomModel(SpecModel):
    """A model with random weights, for tests, demos and benchmarks."""

    family: Family = Field(default="llama", description="Architecture.")
    hidden_size: int = Field(default=128, ge=32, le=65536, description="Width of the residual stream.")
    layers: int = Field(default=2, ge=1, le=512, description="Number of transformer layers.")
    heads: int = Field(
        default=4, ge=1, le=1024, description="Attention heads. vLLM needs hiddenSize / heads of at least 32."
    )
    kv_heads: int | None = Field(
        default=None, ge=1, le=1024, description="Key/value heads (grouped-query attention). Default: heads."
    )
    intermediate_size: int | None = Field(
        default=None, ge=1, le=1048576, description="Width of the feed-forward layers. Default: 4 x hiddenSize."
    )
    experts: int = Field(default=8, ge=1, le=1024, description="Experts per layer (qwen3_moe only).")
    experts_per_token: int = Field(default=2, ge=1, le=1024, description="Experts per token (qwen3_moe only).")
    context_length: int = Field(
        default=256, ge=8, le=16777216, description="Maximum sequence length (prompt and response), tokens."
    )
    tie_embeddings: bool = Field(default=True, description="Input and output embeddings share one matrix.")
    seed: int = Field(default=0, ge=0, le=2147483647, description="Seed of the initial weights.")
    tokenizer: RandomTokenizer = Field(description="Its tokenizer.")


class Model(SpecModel):
    """The model to train. Set exactly one of source and random."""

    source: Location | None = Field(
        default=None, description="Hugging Face hub id, local folder, pvc://claim/path or s3://bucket/path."
    )
    random: RandomModel | None = Field(default=None, description="A model with random weights instead of a source.")
    revision: ShortText | None = Field(default=None, description="Branch, tag or commit on the hub.")
    dtype: Dtype = Field(
        default="auto",
        description="Weight dtype in engine and forward pass. auto: bfloat16 on GPU (master weights and optimizer "
        "state: float32), float32 on CPU.",
    )
    tokenizer: Location | None = Field(
        default=None, description="Path or hub id of the tokenizer, if not with the model."
    )
    chat_template: LongText | None = Field(
        default=None,
        description="Jinja chat template that replaces the tokenizer's. strftime_now gives the date when the run "
        "began.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model. Only for sources that you trust."
    )
    lora: Lora | None = Field(
        default=None,
        description="Train an adapter and freeze the model. The reference is the model without the adapter. Default: "
        "train the model's own weights.",
    )
