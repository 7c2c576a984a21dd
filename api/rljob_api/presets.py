"""Presets: what ``algorithm.preset`` fills in, each with its source. Everything can be overridden in the job file.

The number of samples per prompt is a matter of budget more than of method: where a paper uses very many (GRPO: 64), 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.spec import algorithm as spec
from rljob_api.spec.algorithm import (
    Advantage,
    Algorithm,
    CriticSpec,
    GroupFilter,
    Kl,
    KlInLoss,
    KlInReward,
    PolicyLossSpec,
)


@dataclass(frozen=True)
class Preset:
    """A published method: what it is, where it comes from, and its settings."""

    title: str
    source: str
    samples_per_prompt: int
    algorithm: Algorithm


_NO_KL = Kl(in_loss=KlInLoss(coefficient=0.0), in_reward=KlInReward(coefficient=0.0))


def _grpo_advantage() -> Advantage:
    return Advantage(estimator="grpo", normalize_by_std=True, epsilon=1e-6)


PRESETS: Mapping[spec.Preset, Preset] = {
    "ppo": Preset(
        title="Proximal policy optimisation with a critic (actor-critic).",
        source="arXiv 1707.06347; GAE arXiv 1506.02438; dual clip arXiv 1912.09729",
        samples_per_prompt=1,
        algorithm=Algorithm(
            preset="ppo",
            advantage=Advantage(estimator="gae", gamma=1.0, lambda_=1.0, whiten=True),
            policy_loss=PolicyLossSpec(type="ppoClip", clip_low=0.2, clip_high=0.2, dual_clip=3.0),
            aggregation="tokenMean",
            kl=Kl(in_reward=KlInReward(kind="k1", coefficient=0.001)),
            entropy_coefficient=0.0,
            critic=CriticSpec(learning_rate=1e-5, value_clip=0.5, warmup_steps=0),
        ),
    ),
    "grpo": Preset(
        title="Group relative policy optimisation: subtracts the group's mean and divides by its standard deviation.",
        source="arXiv 2402.03300",
        samples_per_prompt=8,
        algorithm=Algorithm(
            preset="grpo",
            advantage=_grpo_advantage(),
            policy_loss=PolicyLossSpec(type="ppoClip", clip_low=0.2, clip_high=0.2, dual_clip=0.0),
            aggregation="seqMeanTokenMean",
            kl=Kl(in_loss=KlInLoss(kind="k3", coefficient=0.04)),
            entropy_coefficient=0.0,
        ),
    ),
    "dr_grpo": Preset(
        title="GRPO without its two biases: no division by the standard deviation or by the length.",
        source="arXiv 2503.20783",
        samples_per_prompt=8,
        algorithm=Algorithm(
            preset="dr_grpo",
            advantage=Advantage(estimator="grpo", normalize_by_std=False),
            policy_loss=PolicyLossSpec(type="ppoClip", clip_low=0.2, clip_high=0.2, dual_clip=0.0),
            aggregation="seqMeanTokenSumNorm",
            kl=_NO_KL,
            entropy_coefficient=0.0,
        ),
    ),
    "dapo": Preset(
        title="GRPO with a higher upper clip, token mean and dynamic sampling; reward.overlong is its soft penalty.",
        source="arXiv 2503.14476; dual clip of the published recipe",
        samples_per_prompt=16,
        algorithm=Algorithm(
            preset="dapo",
            advantage=_grpo_advantage(),
            policy_loss=PolicyLossSpec(type="ppoClip", clip_low=0.2, clip_high=0.28, dual_clip=10.0),
            aggregation="tokenMean",
            kl=_NO_KL,
            entropy_coefficient=0.0,
            group_filter=GroupFilter(drop_uniform=True, max_batches=10),
        ),
    ),
    "gspo": Preset(
        title="Group sequence policy optimisation: one importance ratio per sequence.",
        source="arXiv 2507.18071",
        samples_per_prompt=8,
        algorithm=Algorithm(
            preset="gspo",
            advantage=_grpo_advantage(),
            policy_loss=PolicyLossSpec(type="gspo", clip_low=3e-4, clip_high=4e-4),
            aggregation="seqMeanTokenMean",
            kl=_NO_KL,
            entropy_coefficient=0.0,
        ),
    ),
    "rloo": Preset(
        title="REINFORCE with the mean reward of the other samples as baseline.",
        source="arXiv 2402.14740 (n = 4; KL in the reward)",
        samples_per_prompt=4,
        algorithm=Algorithm(
            preset="rloo",
            advantage=Advantage(estimator="rloo"),
            policy_loss=PolicyLossSpec(type="reinforce"),
            aggregation="seqMeanTokenSum",
            kl=Kl(in_reward=KlInReward(kind="k1", coefficient=0.03)),
            entropy_coefficient=0.0,
        ),
    ),
    "reinforce_plus_plus": Preset(
        title="REINFORCE with whitened returns and PPO's clip, no critic.",
        source="arXiv 2501.03262",
        samples_per_prompt=1,
        algorithm=Algorithm(
            preset="reinforce_plus_plus",
            advantage=Advantage(estimator="reinforce_plus_plus", gamma=1.0, whiten=True),
            policy_loss=PolicyLossSpec(type="ppoClip", clip_low=0.2, clip_high=0.2, dual_clip=0.0),
            aggregation="tokenMean",
            kl=Kl(in_reward=KlInReward(kind="k1", coefficient=0.01)),
            entropy_coefficient=0.0,
        ),
    ),
    "reinforce_plus_plus_baseline": Preset(
        title="REINFORCE++ with the group's mean as baseline and k2 in the loss.",
        source="arXiv 2501.03262 (KL coefficient: ours)",
        samples_per_prompt=8,
        algorithm=Algorithm(
            preset="reinforce_plus_plus_baseline",
            advantage=Advantage(estimator="reinforce_plus_plus_baseline", whiten=True),
            policy_loss=PolicyLossSpec(type="ppoClip", clip_low=0.2, clip_high=0.2, dual_clip=0.0),
            aggregation="tokenMean",
            kl=Kl(in_loss=KlInLoss(kind="k2", coefficient=0.01)),
            entropy_coefficient=0.0,
        ),
    ),
    "remax": Preset(
        title="REINFORCE with the greedy response's reward as baseline.",
        source="arXiv 2310.10505 (KL coefficient: ours)",
        samples_per_prompt=1,
        algorithm=Algorithm(
            preset="remax",
            advantage=Advantage(estimator="remax"),
            policy_loss=PolicyLossSpec(type="reinforce"),
            aggregation="seqMeanTokenSum",
            kl=Kl(in_reward=KlInReward(kind="k1", coefficient=0.1)),
            entropy_coefficient=0.0,
        ),
    ),
    "cispo": Preset(
        title="Clips and detaches the importance ratio, so that every token keeps its gradient.",
        source="arXiv 2506.13585 (no lower bound); upper bound 5 from arXiv 2510.13786",
        samples_per_prompt=16,
        algorithm=Algorithm(
            preset="cispo",
            advantage=_grpo_advantage(),
            policy_loss=PolicyLossSpec(type="cispo", clip_low=1.0, clip_high=4.0),
            aggregation="tokenMean",
            kl=_NO_KL,
            entropy_coefficient=0.0,
        ),
    ),
    "gpg": Preset(
        title="Group policy gradient: no ratio, no clip, no KL; groups without signal do not dilute the rest.",
        source="arXiv 2504.02546",
        samples_per_prompt=8,
        algorithm=Algorithm(
            preset="gpg",
            advantage=Advantage(estimator="gpg"),
            policy_loss=PolicyLossSpec(type="gpg"),
            aggregation="tokenMean",
            kl=_NO_KL,
            entropy_coefficient=0.0,
        ),
    ),
    "sapo": Preset(
        title="Soft adaptive policy optimisation: a smooth gate instead of the clip.",
        source="arXiv 2511.20347",
        samples_per_prompt=8,
        algorithm=Algorithm(
            preset="sapo",
            advantage=_grpo_advantage(),
            policy_loss=PolicyLossSpec(type="sapo", tau_positive=1.0, tau_negative=1.05),
            aggregation="seqMeanTokenMean",
            kl=_NO_KL,
            entropy_coefficient=0.0,
        ),
    ),
    "opo": Preset(
        title="On-policy REINFORCE with the length-weighted mean reward as baseline.",
        source="arXiv 2505.23585",
        samples_per_prompt=8,
        algorithm=Algorithm(
            preset="opo",
            advantage=Advantage(estimator="opo"),
            policy_loss=PolicyLossSpec(type="reinforce"),
            aggregation="tokenMean",
            kl=_NO_KL,
            entropy_coefficient=0.0,
        ),
    ),
    "gmpo": Preset(
        title="Geometric-mean policy optimisation: the geometric mean of clipped ratios.",
        source="arXiv 2507.20673",
        samples_per_prompt=8,
        algorithm=Algorithm(
            preset="gmpo",
            advantage=_grpo_advantage(),
            policy_loss=PolicyLossSpec(type="gmpo", clip_low=0.4, clip_high=0.4),
            aggregation="seqMeanTokenMean",
            kl=_NO_KL,
            entropy_coefficient=0.0,
        ),
    ),
}
