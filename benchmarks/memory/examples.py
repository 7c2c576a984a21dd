"""Jobs of ``examples/`` with their settings, the models that they name, and what the plan says of their updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.environments import ROOT
from rljob_api import load_jobs, resolve
from rljob_api.memory import ModelShape
from rljob_api.memory.parts import WORKSPACE
from rljob_api.memory.trainer import TrainerRank
from rljob_api.resolved import ResolvedJob

EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, slots=True)
class Example:
    """Files of ``examples/`` laid over each other, and settings."""

    files: Sequence[str]
    settings: Mapping[str, str] = field(default_factory=dict)

    def resolved(self, *, offload: bool | None = None) -> ResolvedJob:
        """``offload``: in place of what the files say of it."""
        first, *overlays = (EXAMPLES / file for file in self.files)
        settings = [f"{path}={value}" for path, value in self.settings.items()]
        if offload is not None:
            settings.append(f"trainer.offload={str(offload).lower()}")
        [job] = load_jobs(first, settings, overlays)
        return resolve(job)


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The ``config.json`` of a model of this shape, whose layers see all, or as its family does it."""
    caps = {"attn_logit_softcapping": shape.caps_scores, "final_logit_softcapping": shape.caps_logits}
    gemma = {name: 30.0 if capped else None for name, capped in caps.items()} if shape.sandwiched else {}
    experts = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_width,
        "decoder_sparse_step": 1,
    }
    return {
        **gemma,
        **(experts if shape.experts else {}),
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
    }


def fullest(rank: TrainerRank, *, kernels: bool = False) -> int:
    """Of an update, by the plan. ``kernels``: with what kernels take for themselves. The pretended GPU runs none and
    counts the tensors that go in and come out, and nothing is scored on it."""
    moments = [moment for moment in rank.all() if not moment.name.startswith("score")]
    return max(moment.total - (0 if kernels else moment.parts.get(WORKSPACE, 0)) for moment in moments)
