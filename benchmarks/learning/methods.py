"""What is compared: every estimator with its usual loss, and corrections against samplers that are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Section = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LearningMethod:
    """An estimator and its loss. ``samples``: of a prompt. An optimizer step sees as many sequences in every method.

    ``mini_batches``: optimizer steps a batch. Losses without a ratio know no earlier policy: they sample for each.
    ``entropy``: its bonus's coefficient. Advantages that nothing is divided by are about a third as large as others.
    """

    algorithm: Section
    samples: int = 8
    mini_batches: int = 4
    entropy: float = 0.05
    two_rewards: bool = False


_GRADIENT: dict[str, Any] = {"mini_batches": 1, "entropy": 0.02}

METHODS: Mapping[str, LearningMethod] = {
    "gae": LearningMethod(
        {"preset": "ppo", "advantage": {"lambda": 0.95}, "critic": {"learningRate": 2e-3}}, samples=1
    ),
    "grpo": LearningMethod({"preset": "grpo"}),
    "grpo (dr_grpo)": LearningMethod({"preset": "dr_grpo"}, entropy=0.02),
    "grpo with gspo": LearningMethod({"preset": "gspo"}),
    "grpo with sapo": LearningMethod({"preset": "sapo"}),
    "grpo with cispo": LearningMethod({"preset": "cispo"}),
    "grpo with gmpo": LearningMethod({"preset": "gmpo"}),
    "grpo_passk": LearningMethod({"preset": "grpo", "advantage": {"estimator": "grpo_passk"}}, entropy=0.02),
    "gdpo": LearningMethod({"preset": "grpo", "advantage": {"estimator": "gdpo"}}, two_rewards=True),
    "maxrl": LearningMethod({"preset": "grpo", "advantage": {"estimator": "maxrl"}}),
    "reinforce_plus_plus": LearningMethod({"preset": "reinforce_plus_plus"}, samples=1),
    "reinforce_plus_plus_baseline": LearningMethod({"preset": "reinforce_plus_plus_baseline"}),
    "reinforce": LearningMethod({"preset": "rloo", "advantage": {"estimator": "reinforce"}}, **_GRADIENT),
    "rloo": LearningMethod({"preset": "rloo"}, **_GRADIENT),
    "remax": LearningMethod({"preset": "remax"}, samples=1, **_GRADIENT),
    "opo": LearningMethod({"preset": "opo"}, **_GRADIENT),
    "gpg": LearningMethod({"preset": "gpg"}, **_GRADIENT),
    "optimal_token_baseline": LearningMethod(
        {"preset": "rloo", "advantage": {"estimator": "optimal_token_baseline"}}, **_GRADIENT
    ),
    "tir_optimal_token_baseline": LearningMethod(
        {"preset": "rloo", "advantage": {"estimator": "tir_optimal_token_baseline"}}, **_GRADIENT
    ),
}


@dataclass(frozen=True, slots=True)
class Sampler:
    """What is wrong with the engines. ``temperature``: they sample at it (the job says 1) and report its log-probs.

    ``wrong_share`` of the reported log-probs are off by a normal error of ``wrong_by`` nats. ``age``: samples may be
    that many versions old, in a fully asynchronous pipeline that runs ahead as far as it may.
    """

    temperature: float | None = None
    wrong_share: float = 0.0
    wrong_by: float = 2.0
    age: int = 0

    @property
    def said(self) -> dict[str, float]:
        """For `benchmarks.learning.sampler`."""
        wrong = {"wrong_share": self.wrong_share, "wrong_by": self.wrong_by} if self.wrong_share else {}
        return wrong | ({} if self.temperature is None else {"temperature": self.temperature})


SAMPLERS: Mapping[str, Sampler] = {
    "right": Sampler(),
    "temperature 1.5": Sampler(temperature=1.5),
    "5 % wrong log-probs": Sampler(wrong_share=0.05),
    "4 versions old": Sampler(age=4),
}
CORRECTIONS: Mapping[str, Section] = {
    "none": {"mode": "none"},
    "bypass": {"mode": "bypass"},
    "decoupled_token_is": {"preset": "decoupled_token_is"},
    "decoupled_token_icepop": {"preset": "decoupled_token_icepop"},
    "decoupled_seq_is_rs": {"preset": "decoupled_seq_is_rs"},
    "decoupled_k3_rs_token_tis": {"preset": "decoupled_k3_rs_token_tis"},
    "interpolated": {"preset": "decoupled_token_is", "proximal": "interpolated"},
}
Study = Literal["methods", "corrections"]


@dataclass(frozen=True, slots=True)
class Case:
    """One run: ``name`` is the method, or the correction; ``sampler`` what is wrong."""

    study: Study
    name: str
    seed: int
    sampler: str = "right"
    method: LearningMethod = field(default=METHODS["grpo"])

    @property
    def algorithm(self) -> dict[str, Any]:
        """The job's section. No KL: random weights are no reference worth keeping to."""
        off = {"inLoss": {"coefficient": 0}, "inReward": {"coefficient": 0}}
        correction = CORRECTIONS[self.name] if self.study == "corrections" else {"mode": "bypass"}
        return {
            **self.method.algorithm,
            "kl": off,
            "entropyCoefficient": self.method.entropy,
            "rolloutCorrection": correction,
        }


def cases(study: Study, seeds: list[int], only: list[str] | None) -> list[Case]:
    """Seed by seed, so that a study that is cut off has something of everything."""
    if study == "methods":
        names = [name for name in METHODS if only is None or name in only]
        return [Case("methods", name, seed, method=METHODS[name]) for seed in seeds for name in names]
    names = [name for name in CORRECTIONS if only is None or name in only]
    return [Case("corrections", name, seed, sampler) for seed in seeds for sampler in SAMPLERS for name in names]
