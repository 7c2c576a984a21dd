"""spec.model.lora: a small adapter is trained instead of the model's own weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import Listed, SpecModel

ModuleName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")]
"""Name of a module of the model, or how it ends after a point."""


class Lora(SpecModel):
    """Low-rank adapters (arXiv:2106.09685) on linear layers: W + alpha / rank x B A, where A and B are trained. There
    is no dropout, so that a token has the same log-prob when it is scored and when it is trained."""

    rank: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="Rank of the adapter: rows of A, columns of B. Sets the number of trained parameters.",
    )
    alpha: int = Field(
        default=32,
        ge=1,
        le=65536,
        description="The adapter is scaled by alpha / rank. With a fixed alpha, about the same learning rate works "
        "for every rank.",
    )
    targets: Annotated[Listed[ModuleName], Field(max_length=64)] = Field(
        default=(),
        description="Linear layers to adapt, e.g. q_proj or mlp.up_proj. Default: all inside the model's layers "
        "(mixtures of experts: attention's).",
    )
    publish: Literal["merged", "adapter"] = Field(
        default="merged",
        description="What engines receive after each step. merged: the model with the adapter merged. adapter: only "
        "the adapter, a few percent of the bytes; vLLM applies it at run time.",
    )
