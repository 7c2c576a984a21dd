"""spec.model.lora: a small adapter is trained instead of the model's own weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import Listed, SpecModel

ModuleName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")]
"""Name of a module of the model, or how it ends after a point."""


class Lora(SpecModel):
    """Low-rank adapters (arXiv:2106.09685) beside linear layers: W + alpha / rank x B A, of which A and B are trained.

    There is no dropout: a token must have the same log-prob when it is scored and when it is trained.
    """

    rank: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="Rank of the adapter: rows of A and columns of B. What is trained grows with it.",
    )
    alpha: int = Field(
        default=32,
        ge=1,
        le=65536,
        description="What the adapter counts for: it is multiplied by alpha / rank. With a fixed alpha about "
        "the same learning rate does for every rank.",
    )
    targets: Annotated[Listed[ModuleName], Field(max_length=64)] = Field(
        default=(),
        description="Names of the linear layers that get one, such as q_proj or mlp.up_proj. Default: all that are "
        "inside of the model's layers (of a mixture of experts: attention's).",
    )
    publish: Literal["merged", "adapter"] = Field(
        default="merged",
        description="What engines are given after each step. merged: the model with the adapter added to it. adapter: "
        "the adapter alone, some hundredths of the bytes, which vLLM then computes beside the model.",
    )
