"""Published settings of rollout correction, by the names they were published under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rljob_trainer.algorithms.correction import Correction
from rljob_trainer.algorithms.rejection import Rejection
from rljob_trainer.algorithms.weights import Weights


def _token(high: float, low: float | None = None) -> Weights:
    return Weights("token", high, low)


def _sequence(high: float) -> Weights:
    return Weights("sequence", high)


_GEOMETRIC = Rejection("k1", "sequenceMean", high=1.001, low=0.999)
_K3 = Rejection("k3", "sequenceMean", high=0.01)
_SEQUENCE = Rejection("k1", "sequenceSum", high=2.0, low=0.5)


@dataclass(frozen=True)
class CorrectionPreset:
    """A published setting: the mode it belongs to, the policy loss it implies there, and what it corrects."""

    mode: Literal["decoupled", "bypass"]
    correction: Correction
    policy_loss: str | None = None

    @property
    def policy_loss_settings(self) -> dict[str, Any]:
        """What a bypass loss is to be called with besides its own settings; nothing in decoupled mode."""
        if self.mode == "decoupled":
            return {}
        settings: dict[str, Any] = {"rejection": self.correction.rejection}
        if self.policy_loss == "bypassReinforce":
            weights = self.correction.weights
            if weights is None:
                settings |= {"level": "none"}
            else:
                settings |= {"level": weights.level, "low": weights.low, "high": weights.high}
        return settings


correction_presets: dict[str, CorrectionPreset] = {
    "disabled": CorrectionPreset("decoupled", Correction()),
    "decoupled_token_is": CorrectionPreset("decoupled", Correction(_token(2.0))),
    "decoupled_seq_is": CorrectionPreset("decoupled", Correction(_sequence(2.0))),
    "decoupled_token_icepop": CorrectionPreset("decoupled", Correction(_token(5.0, 0.5))),
    "decoupled_seq_is_rs": CorrectionPreset("decoupled", Correction(_sequence(2.0), (_SEQUENCE,))),
    "decoupled_geo_rs": CorrectionPreset("decoupled", Correction(None, (_GEOMETRIC,))),
    "decoupled_geo_rs_seq_tis": CorrectionPreset("decoupled", Correction(_sequence(2.0), (_GEOMETRIC,))),
    "decoupled_geo_rs_token_tis": CorrectionPreset("decoupled", Correction(_token(2.0), (_GEOMETRIC,))),
    "decoupled_k3_rs": CorrectionPreset("decoupled", Correction(None, (_K3,))),
    "decoupled_k3_rs_seq_tis": CorrectionPreset("decoupled", Correction(_sequence(2.0), (_K3,))),
    "decoupled_k3_rs_token_tis": CorrectionPreset("decoupled", Correction(_token(2.0), (_K3,))),
    "bypass_ppo_clip": CorrectionPreset("bypass", Correction(), "bypassPpoClip"),
    "bypass_ppo_clip_geo_rs": CorrectionPreset("bypass", Correction(None, (_GEOMETRIC,)), "bypassPpoClip"),
    "bypass_ppo_clip_k3_rs": CorrectionPreset("bypass", Correction(None, (_K3,)), "bypassPpoClip"),
    "bypass_pg_is": CorrectionPreset("bypass", Correction(_sequence(2.0)), "bypassReinforce"),
    "bypass_pg_token_icepop": CorrectionPreset("bypass", Correction(_token(5.0, 0.5)), "bypassReinforce"),
    "bypass_pg_geo_rs": CorrectionPreset("bypass", Correction(None, (_GEOMETRIC,)), "bypassReinforce"),
    "bypass_pg_geo_rs_seq_tis": CorrectionPreset(
        "bypass", Correction(_sequence(2.0), (_GEOMETRIC,)), "bypassReinforce"
    ),
    "bypass_pg_geo_rs_token_tis": CorrectionPreset("bypass", Correction(_token(2.0), (_GEOMETRIC,)), "bypassReinforce"),
}
