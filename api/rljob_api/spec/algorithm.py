"""spec.algorithm: how scored samples become gradients.

A preset fills in the settings of a published method; every one can be overridden here. That is why hardly any field
has a default of its own: ``rljob_api.resolve`` gives each its value. Which method takes which parameter stands in
``rljob_api.methods``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.methods import Estimator, PolicyLossType
from rljob_api.spec.base import Fallback, Listed, Location, ShortText, SpecModel

Preset = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "cispo",
    "gpg",
    "sapo",
    "opo",
    "gmpo",
]
AggregationType = Literal[
    "tokenMean", "tokenSum", "promptMean", "seqMeanTokenMean", "seqMeanTokenSum", "seqMeanTokenSumNorm"
]
CorrectionPresetName = Literal[
    "disabled",
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
]
KlLossKind = Literal["k1", "k2", "k3", "abs", "k1Straight", "k3Straight", "absStraight", "k3Weighted", "full"]
KlRewardKind = Literal["k1", "k2", "k3", "abs", "full"]


class Advantage(SpecModel):
    """How advantages are estimated. Parameters that the preset does not set take the estimator's defaults."""

    estimator: Estimator | None = Field(default=None, description="Advantage estimator. Default: the preset's.")
    gamma: float | None = Field(default=None, ge=0, le=1, description="Discount per token.")
    lambda_: float | None = Field(
        default=None,
        ge=0,
        le=1,
        alias="lambda",
        description="gae: bias-variance trade-off. 0: most bias, 1: most variance.",
    )
    normalize_by_std: bool | None = Field(
        default=None, description="Divide by the group's standard deviation (GRPO yes, Dr. GRPO no)."
    )
    whiten: bool | None = Field(default=None, description="Normalise the batch's advantages to mean 0 and variance 1.")
    whiten_rewards: bool | None = Field(
        default=None,
        description="gae: scale token rewards to variance 1 without shifting the mean.",
    )
    epsilon: float | None = Field(default=None, gt=0, le=1, description="Added to divisors to avoid division by zero.")


class PolicyLossSpec(SpecModel):
    """The policy loss. rho is the importance ratio pi / pi_old of a token."""

    type: PolicyLossType | None = Field(default=None, description="Type of loss. Default: the preset's.")
    clip_low: float | None = Field(
        default=None, ge=0, le=1000, description="rho (or what the method clips) is clipped below at 1 - clipLow."
    )
    clip_high: float | None = Field(
        default=None, ge=0, le=1000, description="rho (or what the method clips) is clipped above at 1 + clipHigh."
    )
    dual_clip: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Upper bound on rho for negative advantages, above 1 (arXiv 1912.09729). 0 turns it off.",
    )
    tau_positive: float | None = Field(
        default=None, gt=0, le=1000, description="sapo: gate temperature for positive advantages."
    )
    tau_negative: float | None = Field(
        default=None, gt=0, le=1000, description="sapo: gate temperature for negative advantages."
    )
    covariance_fraction: float | None = Field(
        default=None, gt=0, le=1, description="clipCov, klCov: fraction of tokens that are restrained."
    )
    covariance_low: float | None = Field(
        default=None, ge=-1000, le=1000, description="clipCov: lower bound of the covariances to select."
    )
    covariance_high: float | None = Field(
        default=None, ge=-1000, le=1000, description="clipCov: upper bound of the covariances to select."
    )
    exclude_clipped: bool | None = Field(
        default=None,
        description="clipCov: skip tokens that PPO clips, as the published code does. false: as in the paper.",
    )
    kl_coefficient: float | None = Field(
        default=None, ge=0, le=1000, description="klCov: KL weight on the selected tokens."
    )
    divergence_low: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="dppoKl: largest binary KL for A <= 0; masked above.",
    )
    divergence_high: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="The same for A > 0.",
    )
    ratio_cap: float | None = Field(
        default=None, ge=1, le=1000000, description="tis, dppoTv, dppoKl: upper bound on the importance ratio."
    )
    beta: float | None = Field(default=None, gt=0, le=1000, description="dro: weight of the quadratic term.")


class KlInLoss(SpecModel):
    """KL penalty against the reference model, added to the loss."""

    kind: Annotated[KlLossKind | None, Fallback("k3")] = Field(
        default=None,
        description="KL estimator. ...Straight: value of that kind, gradient of k2. k3Weighted: k3 times pi_theta / "
        "pi_old. full: exact over the vocabulary.",
    )
    coefficient: float | None = Field(default=None, ge=0, le=1000, description="Weight. 0 turns it off.")


class KlControllerSpec(SpecModel):
    """Whether the KL coefficient is fixed or follows a target."""

    type: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="adaptive: grows while the KL is above target, shrinks below it."
    )
    target: float = Field(default=0.1, gt=0, le=1000, description="adaptive: target KL per token.")
    horizon: int = Field(
        default=10000,
        ge=1,
        le=1000000000,
        description="adaptive: time constant in samples. Larger is slower.",
    )


class KlInReward(SpecModel):
    """KL penalty against the reference model, subtracted from the reward at each token."""

    kind: Annotated[KlRewardKind | None, Fallback("k1")] = Field(default=None, description="KL estimator.")
    coefficient: float | None = Field(
        default=None, ge=0, le=1000, description="Weight; initial value if adaptive. 0 turns it off."
    )
    controller: KlControllerSpec | None = Field(default=None, description="Default: fixed.")


class Kl(SpecModel):
    """KL penalty against the reference model (the initial model). Without either term no reference model is loaded."""

    in_loss: KlInLoss | None = Field(default=None, description="KL penalty in the loss.")
    in_reward: KlInReward | None = Field(default=None, description="KL penalty in the reward.")


class CriticModel(SpecModel):
    """A decoder of any size with the policy's tokenizer. A reward model (a sequence classifier with one label) keeps
    its head; otherwise the head starts at zero."""

    source: Location = Field(description="Path, hub id or pvc://claim/path.")
    revision: ShortText | None = Field(default=None, description="Branch, tag or commit of a hub id.")


class CriticSpec(SpecModel):
    """The value model (estimator gae only)."""

    model: CriticModel | None = Field(
        default=None, description="Initial model. Default: a copy of spec.model with a zero head."
    )
    learning_rate: Annotated[float | None, Fallback(1e-5)] = Field(
        default=None, gt=0, le=1, description="Peak learning rate."
    )
    value_clip: Annotated[float | None, Fallback(0.5)] = Field(
        default=None,
        ge=0,
        le=1000000,
        description="Values in the loss are clipped to within this of those at sampling time. 0 turns it off.",
    )
    warmup_steps: Annotated[int | None, Fallback(0)] = Field(
        default=None, ge=0, le=1000000, description="Initial steps that train only the critic."
    )
    weight_decay: float | None = Field(default=None, ge=0, le=1, description="Default: trainer.optimizer.weightDecay.")
    gradient_clip: float | None = Field(
        default=None, ge=0, le=1000000, description="Default: trainer.optimizer.gradientClip. 0 turns it off."
    )


class Truncated(SpecModel):
    """Responses cut off at maxResponseTokens."""

    reward: Annotated[Literal["keep", "replace"] | None, Fallback("keep")] = Field(
        default=None, description="Keep their score, or use replacement instead."
    )
    replacement: Annotated[float | None, Fallback(0.0)] = Field(
        default=None, ge=-1000000, le=1000000, description="Score for reward: replace."
    )
    mask: Annotated[bool | None, Fallback(False)] = Field(default=None, description="Exclude them from the loss.")
    bootstrap: Annotated[bool | None, Fallback(False)] = Field(
        default=None, description="gae: bootstrap from the critic's value after the last token."
    )


class CorrectionWeights(SpecModel):
    """Importance weights pi_old / pi_roll that multiply the loss."""

    level: Literal["token", "sequence"] = Field(
        default="token", description="A weight per token, or the product over the sequence."
    )
    low: float | None = Field(
        default=None, ge=0, lt=1, description="Smaller weights become 0 (two-sided, IcePop). Default: none."
    )
    high: float = Field(
        default=2.0,
        gt=0,
        le=1000000,
        description="Larger weights are capped; if low is set they become 0.",
    )
    normalize: bool = Field(
        default=False,
        description="Divide by their batch mean (mode bypass: mini-batch mean).",
    )
    clamp: bool = Field(default=False, description="Weights outside [low, high] become the nearer bound instead of 0.")


class RejectionSpec(SpecModel):
    """Masks tokens or sequences where engine and trainer disagree too much."""

    statistic: Literal["k1", "k2", "k3", "tv", "binaryKl"] = Field(
        description="k1: log-ratio, two-sided (low and high bound pi_old / pi_roll). k2: half its square. k3: ratio "
        "- 1 - log-ratio. tv: |pi_old - pi_roll|. binaryKl: KL of the token against all others. All but k1 are bounded "
        "by high."
    )
    over: Literal["token", "sequenceSum", "sequenceMean", "sequenceMax"] = Field(
        default="token", description="Per token, or reduced over a sequence, which is then masked as a whole."
    )
    low: float | None = Field(default=None, gt=0, le=1000000, description="k1: lower bound. Default: 1 / high.")
    high: float = Field(gt=0, le=1000000, description="Upper bound.")


class MismatchLimits(SpecModel):
    """Limits for the rollout-trainer mismatch of a step, and the action beyond them."""

    kl: float | None = Field(default=None, gt=0, le=1000, description="Maximum mismatch/kl.")
    effective_sample_size: float | None = Field(
        default=None, gt=0, lt=1, description="Minimum mismatch/effective_sample_size."
    )
    chi_square: float | None = Field(default=None, gt=0, le=1000000, description="Maximum mismatch/chi_square.")
    action: Literal["warn", "correct", "rollBack"] = Field(
        default="warn",
        description="warn: report it. correct: switch to decoupled with weights. rollBack: return to the last good "
        "checkpoint with new engines.",
    )
    patience: int = Field(default=3, ge=1, le=1000, description="Consecutive steps beyond a limit before the action.")
    roll_backs: int = Field(default=2, ge=1, le=100, description="Maximum roll-backs before the run fails.")


class RolloutCorrection(SpecModel):
    """Correction for the rollout-trainer policy mismatch."""

    preset: CorrectionPresetName | None = Field(
        default=None, description="Published setting of mode, weights and rejection."
    )
    mode: Literal["none", "bypass", "decoupled"] | None = Field(
        default=None,
        description="Source of pi_old. none: the trainer, at the start of the step. bypass: the engine. decoupled: "
        "the trainer, with weights and rejection to correct for the engine. Default: the preset's, else none in "
        "pipeline mode sync, bypass otherwise.",
    )
    proximal: Literal["recomputed", "interpolated"] | None = Field(
        default=None,
        description="decoupled: compute pi_old by a forward pass (default), or interpolate pi_roll and pi_theta "
        "(arXiv 2512.06547).",
    )
    weights: CorrectionWeights | None = Field(default=None, description="Importance weights. Default: none.")
    rejection: Annotated[Listed[RejectionSpec], Field(max_length=8)] = Field(
        default=(), description="What to mask; all entries apply."
    )
    veto: float | None = Field(
        default=None, gt=0, lt=1, description="Mask sequences that have a token with pi_old / pi_roll below this."
    )
    limits: MismatchLimits | None = Field(default=None, description="Limits for the mismatch. Default: none.")


class EntropyTargetSpec(SpecModel):
    """Adjusts the entropy coefficient after each step to hold the policy's entropy."""

    target: float = Field(ge=0, le=100, description="Nats per token.")
    rate: float = Field(default=0.005, gt=0, le=1, description="Change per nat below the target.")
    maximum: float = Field(default=0.1, gt=0, le=1000, description="Largest coefficient. The smallest is 0.")


class Resampling(SpecModel):
    """PF-PPO (arXiv 2409.06957): train on samples drawn with replacement, favouring informative scores."""

    kind: Literal["pow", "maxMin", "maxRandom"] = Field(
        default="pow",
        description="Weights. pow: |score|^power. maxMin: highest and lowest only. maxRandom: highest 0.4, others 0.1.",
    )
    power: float = Field(default=2.0, gt=0, le=100, description="Exponent for pow.")


class GroupFilter(SpecModel):
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2)."""

    drop_uniform: Annotated[bool | None, Fallback(False)] = Field(
        default=None,
        description="Replace groups whose samples all have the same score with new prompts.",
    )
    max_batches: Annotated[int | None, Fallback(10)] = Field(
        default=None,
        ge=1,
        le=1000,
        description="Fail if this many batches of prompts do not fill one batch.",
    )


class Algorithm(SpecModel):
    """How scored samples become gradients."""

    preset: Preset = Field(
        description="Published method that provides the defaults. `rljob explain algorithm.presets.NAME` prints its "
        "settings."
    )
    advantage: Advantage = Field(default=Advantage(), description="How advantages are estimated.")
    policy_loss: PolicyLossSpec = Field(default=PolicyLossSpec(), description="The policy loss.")
    aggregation: AggregationType | None = Field(
        default=None,
        description="How token losses are reduced. tokenMean: over all tokens of the mini-batch. promptMean: per "
        "prompt, then over prompts. seqMeanTokenMean: per sequence, then over sequences. seqMeanTokenSum: sum per "
        "sequence, then mean. seqMeanTokenSumNorm: the same divided by aggregationScale.",
    )
    aggregation_scale: float | None = Field(
        default=None,
        gt=0,
        le=1000000000,
        description="Divisor for seqMeanTokenSumNorm. Default: rollout.maxResponseTokens.",
    )
    kl: Kl = Field(default=Kl(), description="KL penalty against the reference model.")
    entropy_coefficient: float | None = Field(
        default=None, ge=0, le=1000, description="Weight of the entropy bonus. 0 turns it off."
    )
    entropy_target: EntropyTargetSpec | None = Field(
        default=None, description="Adapts the coefficient, starting from entropyCoefficient."
    )
    critic: CriticSpec | None = Field(default=None, description="The value model (estimator gae only).")
    truncated: Truncated = Field(default=Truncated(), description="Responses cut off at maxResponseTokens.")
    rollout_correction: RolloutCorrection = Field(
        default=RolloutCorrection(), description="Correction for the rollout-trainer policy mismatch."
    )
    routing_replay: Annotated[bool | None, Fallback(False)] = Field(
        default=None,
        description="Mixtures of experts: train with the experts that the engine chose for each token.",
    )
    group_filter: GroupFilter = Field(default=GroupFilter(), description="Dynamic sampling.")
    resampling: Resampling | None = Field(default=None, description="PF-PPO (estimator gae only).")
    gradient_noise: Annotated[bool | None, Fallback(False)] = Field(
        default=None, description="Report variance/... of the gradient. Costs one more forward pass."
    )
