"""Published settings of rollout correction by their names, and the policy loss that each is defined with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rljob_api.methods import PolicyLossType
from rljob_api.spec.algorithm import (
    CorrectionPresetName,
    CorrectionWeights,
    RejectionSpec,
)


@dataclass(frozen=True)
class CorrectionPreset:
    """What `rolloutCorrection.preset` stands for; the job's own fields go before it."""

    mode: Literal["decoupled", "bypass"]
    weights: CorrectionWeights | None = None
    rejection: tuple[RejectionSpec, ...] = ()
    policy_loss: PolicyLossType | None = None
    """The loss that the job must name, because it makes the correction itself (mode bypass)."""


_TOKEN = CorrectionWeights(level="token", high=2.0)
_SEQUENCE = CorrectionWeights(level="sequence", high=2.0)
_ICEPOP = CorrectionWeights(level="token", low=0.5, high=5.0)
_GEOMETRIC = (RejectionSpec(statistic="k1", over="sequenceMean", low=0.999, high=1.001),)
_K3 = (RejectionSpec(statistic="k3", over="sequenceMean", high=0.01),)
_WHOLE = (RejectionSpec(statistic="k1", over="sequenceSum", low=0.5, high=2.0),)

CORRECTION_PRESETS: Mapping[CorrectionPresetName, CorrectionPreset] = {
    "disabled": CorrectionPreset("decoupled"),
    "decoupled_token_is": CorrectionPreset("decoupled", _TOKEN),
    "decoupled_seq_is": CorrectionPreset("decoupled", _SEQUENCE),
    "decoupled_token_icepop": CorrectionPreset("decoupled", _ICEPOP),
    "decoupled_seq_is_rs": CorrectionPreset("decoupled", _SEQUENCE, _WHOLE),
    "decoupled_geo_rs": CorrectionPreset("decoupled", None, _GEOMETRIC),
    "decoupled_geo_rs_seq_tis": CorrectionPreset("decoupled", _SEQUENCE, _GEOMETRIC),
    "decoupled_geo_rs_token_tis": CorrectionPreset("decoupled", _TOKEN, _GEOMETRIC),
    "decoupled_k3_rs": CorrectionPreset("decoupled", None, _K3),
    "decoupled_k3_rs_seq_tis": CorrectionPreset("decoupled", _SEQUENCE, _K3),
    "decoupled_k3_rs_token_tis": CorrectionPreset("decoupled", _TOKEN, _K3),
    "bypass_ppo_clip": CorrectionPreset("bypass", policy_loss="bypassPpoClip"),
    "bypass_ppo_clip_geo_rs": CorrectionPreset("bypass", None, _GEOMETRIC, "bypassPpoClip"),
    "bypass_ppo_clip_k3_rs": CorrectionPreset("bypass", None, _K3, "bypassPpoClip"),
    "bypass_pg_is": CorrectionPreset("bypass", _SEQUENCE, (), "bypassReinforce"),
    "bypass_pg_token_icepop": CorrectionPreset("bypass", _ICEPOP, (), "bypassReinforce"),
    "bypass_pg_geo_rs": CorrectionPreset("bypass", None, _GEOMETRIC, "bypassReinforce"),
    "bypass_pg_geo_rs_seq_tis": CorrectionPreset("bypass", _SEQUENCE, _GEOMETRIC, "bypassReinforce"),
    "bypass_pg_geo_rs_token_tis": CorrectionPreset("bypass", _TOKEN, _GEOMETRIC, "bypassReinforce"),
}
