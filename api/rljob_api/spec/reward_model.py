"""spec.reward.functions[].rewardModel: a model with a head that scores responses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rljob_api.spec.base import Location, ShortText, SpecModel


class RewardModelSpec(SpecModel):
    """A Hugging Face sequence classification with one label. spec.rewardModel says where it is computed."""

    source: Location = Field(description="Path, hub id or pvc://claim/path.")
    revision: ShortText | None = Field(default=None, description="Branch, tag or commit of a hub id.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type that it is computed in.")
    batch_tokens: int = Field(
        default=16384, ge=1, le=16777216, description="Most tokens of one forward pass, padding counted."
    )
    max_length: int | None = Field(
        default=None,
        ge=1,
        le=16777216,
        description="Longest prompt and response together, in its tokens; a longer one has no score (onError). "
        "Default: its context.",
    )
    workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Without spec.rewardModel: processes beside the driver, each with one thread and the whole model.",
    )
