"""spec.reward.functions[].rewardModel: a model with a head that scores responses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rljob_api.spec.base import Location, ShortText, SpecModel


class RewardModelSpec(SpecModel):
    """A Hugging Face sequence classifier with one label. spec.rewardModel sets where it runs."""

    source: Location = Field(description="Path, hub id or pvc://claim/path.")
    revision: ShortText | None = Field(default=None, description="Branch, tag or commit of a hub id.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Dtype for computation.")
    batch_tokens: int = Field(
        default=16384, ge=1, le=16777216, description="Maximum tokens per forward pass, including padding."
    )
    max_length: int | None = Field(
        default=None,
        ge=1,
        le=16777216,
        description="Maximum length of prompt plus response, in its tokens; longer ones have no score (onError). "
        "Default: its context.",
    )
    workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Without spec.rewardModel: processes next to the driver, each with one thread and the whole model.",
    )
