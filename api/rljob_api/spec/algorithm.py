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
    """How much better than expected a token was. Parameters not named by the preset take the method's own defaults."""

    estimator: Estimator | None = Field(default=None, description="The estimator. Default: the preset's.")
    gamma: float | None = Field(default=None, ge=0, le=1, description="Discount per token.")
    lambda_: float | None = Field(
        default=None, ge=0, le=1, alias="lambda", description="gae: trade of bias (0) against variance (1)."
    )
    normalize_by_std: bool | None = Field(
        default=None, description="Divide by the standard deviation within the group (GRPO yes, Dr. GRPO no)."
    )
    whiten: bool | None = Field(
        default=None, description="Shift and scale the advantages of a batch to mean 0 and variance 1."
    )
    whiten_rewards: bool | None = Field(
        default=None,
        description="gae: scale tokens' rewards to variance 1; their mean stays.",
    )
    epsilon: float | None = Field(default=None, gt=0, le=1, description="Added to a divisor so that it is not 0.")


class PolicyLossSpec(SpecModel):
    """The loss of the policy. rho is the ratio of current to old probability of a token."""

    type: PolicyLossType | None = Field(default=None, description="The loss. Default: the preset's.")
    clip_low: float | None = Field(
        default=None, ge=0, le=1000, description="rho (or what the method clips) is kept above 1 - clipLow."
    )
    clip_high: float | None = Field(
        default=None, ge=0, le=1000, description="rho (or what the method clips) is kept below 1 + clipHigh."
    )
    dual_clip: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Bound on rho for negative advantages, above 1 (arXiv 1912.09729). 0 turns it off.",
    )
    tau_positive: float | None = Field(
        default=None, gt=0, le=1000, description="sapo: temperature of the gate for positive advantages."
    )
    tau_negative: float | None = Field(
        default=None, gt=0, le=1000, description="sapo: temperature of the gate for negative advantages."
    )
    covariance_fraction: float | None = Field(
        default=None, gt=0, le=1, description="clipCov, klCov: share of tokens that is held back."
    )
    covariance_low: float | None = Field(
        default=None, ge=-1000, le=1000, description="clipCov: lower end of the covariances that are cut."
    )
    covariance_high: float | None = Field(
        default=None, ge=-1000, le=1000, description="clipCov: upper end of the covariances that are cut."
    )
    exclude_clipped: bool | None = Field(
        default=None,
        description="clipCov: draw none that PPO has clipped, as published; false: the paper's formula.",
    )
    kl_coefficient: float | None = Field(
        default=None, ge=0, le=1000, description="klCov: weight of the KL term on the selected tokens."
    )
    divergence_low: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="dppoKl: binary KL beyond which A <= 0 is left out.",
    )
    divergence_high: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="The same for A > 0.",
    )
    ratio_cap: float | None = Field(
        default=None, ge=1, le=1000000, description="tis, dppoTv, dppoKl: upper bound of the importance ratio."
    )
    beta: float | None = Field(default=None, gt=0, le=1000, description="dro: weight of the quadratic term.")


class KlInLoss(SpecModel):
    """A KL term to the reference model in the loss."""

    kind: Annotated[KlLossKind | None, Fallback("k3")] = Field(
        default=None,
        description="Estimator of the KL. ...Straight: value of the kind, gradient of k2. "
        "k3Weighted: k3 times pi_theta / pi_old. full: exact over the vocabulary.",
    )
    coefficient: float | None = Field(default=None, ge=0, le=1000, description="Its weight. 0 turns it off.")


class KlControllerSpec(SpecModel):
    """Whether the coefficient stays or follows a target."""

    type: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="adaptive: grows while the KL is above target and shrinks below."
    )
    target: float = Field(default=0.1, gt=0, le=1000, description="adaptive: the KL per token aimed at.")
    horizon: int = Field(
        default=10000,
        ge=1,
        le=1000000000,
        description="adaptive: time constant in samples; larger is slower.",
    )


class KlInReward(SpecModel):
    """A KL term to the reference model, subtracted from the reward token by token."""

    kind: Annotated[KlRewardKind | None, Fallback("k1")] = Field(default=None, description="Estimator of the KL.")
    coefficient: float | None = Field(
        default=None, ge=0, le=1000, description="Its weight; the start value when adaptive. 0 turns it off."
    )
    controller: KlControllerSpec | None = Field(default=None, description="Default: fixed.")


class Kl(SpecModel):
    """Ties to the reference model (the model as it was at the start). Without either term none is loaded."""

    in_loss: KlInLoss | None = Field(default=None, description="KL term in the loss.")
    in_reward: KlInReward | None = Field(default=None, description="KL term in the reward.")


class CriticModel(SpecModel):
    """A decoder with the policy's tokens, of any size. A reward model (a sequence classification with one label) keeps
    its head; another one's begins at zero."""

    source: Location = Field(description="Path, hub id or pvc://claim/path.")
    revision: ShortText | None = Field(default=None, description="Branch, tag or commit of a hub id.")


class CriticSpec(SpecModel):
    """The value model (estimator gae only)."""

    model: CriticModel | None = Field(
        default=None, description="What it starts from. Default: a copy of spec.model, with a head that begins at zero."
    )
    learning_rate: Annotated[float | None, Fallback(1e-5)] = Field(
        default=None, gt=0, le=1, description="Peak learning rate."
    )
    value_clip: Annotated[float | None, Fallback(0.5)] = Field(
        default=None,
        ge=0,
        le=1000000,
        description="Values are kept this close to those at sampling time in the loss. 0 turns it off.",
    )
    warmup_steps: Annotated[int | None, Fallback(0)] = Field(
        default=None, ge=0, le=1000000, description="First steps in which only the critic learns."
    )
    weight_decay: float | None = Field(
        default=None, ge=0, le=1, description="Default: as trainer.optimizer.weightDecay."
    )
    gradient_clip: float | None = Field(
        default=None, ge=0, le=1000000, description="Default: as trainer.optimizer.gradientClip. 0 turns it off."
    )


class Truncated(SpecModel):
    """Responses that were cut at maxResponseTokens."""

    reward: Annotated[Literal["keep", "replace"] | None, Fallback("keep")] = Field(
        default=None, description="keep their score, or replace it by replacement."
    )
    replacement: Annotated[float | None, Fallback(0.0)] = Field(
        default=None, ge=-1000000, le=1000000, description="The score that reward: replace gives."
    )
    mask: Annotated[bool | None, Fallback(False)] = Field(default=None, description="Leave them out of the loss.")
    bootstrap: Annotated[bool | None, Fallback(False)] = Field(
        default=None, description="gae: continue with the critic's value after the last token."
    )


class CorrectionWeights(SpecModel):
    """Importance weights pi_old / pi_roll that multiply the loss."""

    level: Literal["token", "sequence"] = Field(
        default="token", description="One weight a token, or the product over a sequence."
    )
    low: float | None = Field(
        default=None, ge=0, lt=1, description="Weights below it become 0 (two-sided, IcePop). Default: none."
    )
    high: float = Field(
        default=2.0,
        gt=0,
        le=1000000,
        description="Larger weights are cut to it; with low given they become 0 instead.",
    )
    normalize: bool = Field(
        default=False,
        description="Divide by their mean over the batch (mode bypass: mini-batch).",
    )
    clamp: bool = Field(default=False, description="Weights outside [low, high] become the nearer bound instead of 0.")


class RejectionSpec(SpecModel):
    """Leaves out tokens or sequences in which engine and trainer disagree too much."""

    statistic: Literal["k1", "k2", "k3", "tv", "binaryKl"] = Field(
        description="k1: log-ratio, bounded on both sides (low, high bound pi_old / pi_roll). "
        "k2: half its square, k3: ratio - 1 - log-ratio, tv: |pi_old - pi_roll|, binaryKl: KL of token against rest; "
        "bounded by high."
    )
    over: Literal["token", "sequenceSum", "sequenceMean", "sequenceMax"] = Field(
        default="token", description="Per token, or reduced over the sequence, which is then left out whole."
    )
    low: float | None = Field(default=None, gt=0, le=1000000, description="k1: lower bound. Default: 1 / high.")
    high: float = Field(gt=0, le=1000000, description="Upper bound.")


class MismatchLimits(SpecModel):
    """How far engine and trainer may be apart on the tokens of a step, and what happens beyond that."""

    kl: float | None = Field(default=None, gt=0, le=1000, description="Largest mismatch/kl.")
    effective_sample_size: float | None = Field(
        default=None, gt=0, lt=1, description="Smallest mismatch/effective_sample_size."
    )
    chi_square: float | None = Field(default=None, gt=0, le=1000000, description="Largest mismatch/chi_square.")
    action: Literal["warn", "correct", "rollBack"] = Field(
        default="warn",
        description="warn: say so. correct: decoupled with weights from then on. rollBack: back to the last good "
        "checkpoint, with new engines.",
    )
    patience: int = Field(default=3, ge=1, le=1000, description="Steps in a row beyond a limit until the action.")
    roll_backs: int = Field(default=2, ge=1, le=100, description="How often, before the run fails.")


class RolloutCorrection(SpecModel):
    """What is done about engine and trainer not being the same policy."""

    preset: CorrectionPresetName | None = Field(
        default=None, description="A published setting: gives mode, weights and rejection."
    )
    mode: Literal["none", "bypass", "decoupled"] | None = Field(
        default=None,
        description="none: pi_old is the trainer's own at the start of the step. bypass: the engine's. decoupled: the "
        "trainer's, and weights and rejection correct from engine to it. Default: the preset's, else none in "
        "pipeline mode sync, bypass otherwise.",
    )
    proximal: Literal["recomputed", "interpolated"] | None = Field(
        default=None,
        description="decoupled: pi_old by a forward pass (default), or made of pi_roll and pi_theta "
        "(arXiv 2512.06547).",
    )
    weights: CorrectionWeights | None = Field(default=None, description="Importance weights. Default: none.")
    rejection: Annotated[Listed[RejectionSpec], Field(max_length=8)] = Field(
        default=(), description="What is left out; several apply together."
    )
    veto: float | None = Field(
        default=None, gt=0, lt=1, description="Leave out sequences with a token whose pi_old / pi_roll is below it."
    )
    limits: MismatchLimits | None = Field(default=None, description="Bounds of the mismatch. Default: none.")


class EntropyTargetSpec(SpecModel):
    """Moves the entropy coefficient after every step to hold the policy's entropy."""

    target: float = Field(ge=0, le=100, description="Nats per token.")
    rate: float = Field(default=0.005, gt=0, le=1, description="Change per nat that is missing.")
    maximum: float = Field(default=0.1, gt=0, le=1000, description="Largest coefficient; the smallest is 0.")


class Resampling(SpecModel):
    """PF-PPO (arXiv 2409.06957): trains on samples drawn with replacement, telling rewards more often."""

    kind: Literal["pow", "maxMin", "maxRandom"] = Field(
        default="pow",
        description="Weights. pow: |score|^power. maxMin: highest and lowest only. maxRandom: highest 0.4, others 0.1.",
    )
    power: float = Field(default=2.0, gt=0, le=100, description="Exponent of pow.")


class GroupFilter(SpecModel):
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2)."""

    drop_uniform: Annotated[bool | None, Fallback(False)] = Field(
        default=None,
        description="Replace groups whose samples all have the same score, by further prompts.",
    )
    max_batches: Annotated[int | None, Fallback(10)] = Field(
        default=None,
        ge=1,
        le=1000,
        description="Give up when this many batches of prompts did not fill one batch.",
    )


class Algorithm(SpecModel):
    """How scored samples become gradients."""

    preset: Preset = Field(
        description="The published method whose settings are taken; all can be overridden. "
        "`rljob explain algorithm.presets.NAME` prints them."
    )
    advantage: Advantage = Field(default=Advantage(), description="How advantages are estimated.")
    policy_loss: PolicyLossSpec = Field(default=PolicyLossSpec(), description="The loss of the policy.")
    aggregation: AggregationType | None = Field(
        default=None,
        description="How losses of tokens become one number. tokenMean: mean over all tokens of the mini-batch. "
        "promptMean: over each prompt's, then over prompts. "
        "seqMeanTokenMean: over each sequence, then over sequences. seqMeanTokenSum: sum over each "
        "sequence, then mean. seqMeanTokenSumNorm: the same divided by aggregationScale.",
    )
    aggregation_scale: float | None = Field(
        default=None,
        gt=0,
        le=1000000000,
        description="Divisor of seqMeanTokenSumNorm. Default: rollout.maxResponseTokens.",
    )
    kl: Kl = Field(default=Kl(), description="Ties to the reference model.")
    entropy_coefficient: float | None = Field(
        default=None, ge=0, le=1000, description="Weight of the entropy bonus. 0 turns it off."
    )
    entropy_target: EntropyTargetSpec | None = Field(default=None, description="entropyCoefficient is where it starts.")
    critic: CriticSpec | None = Field(default=None, description="The value model (estimator gae only).")
    truncated: Truncated = Field(default=Truncated(), description="Responses that were cut at maxResponseTokens.")
    rollout_correction: RolloutCorrection = Field(
        default=RolloutCorrection(), description="What is done about engine and trainer not being the same policy."
    )
    routing_replay: Annotated[bool | None, Fallback(False)] = Field(
        default=None,
        description="A mixture of experts is trained with the experts that its engine chose for each token.",
    )
    group_filter: GroupFilter = Field(default=GroupFilter(), description="Dynamic sampling.")
    resampling: Resampling | None = Field(default=None, description="PF-PPO (estimator gae only).")
    gradient_noise: Annotated[bool | None, Fallback(False)] = Field(
        default=None, description="Report variance/... of the gradient, for one more forward pass."
    )
