"""Rules about the estimator and the policy loss of spec.algorithm, and their parameters."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.alias_generators import to_camel

from rljob_api.methods import ESTIMATOR_PARAMETERS, ESTIMATORS, POLICY_LOSS_PARAMETERS, POLICY_LOSSES
from rljob_api.rules import cel
from rljob_api.rules.cel import ALGORITHM, SPEC, Cel, text
from rljob_api.rules.registry import Job, rule
from rljob_api.violations import Violation

RATIO_CLIPS = ("ppoClip", "clipCov", "dppoTv", "bypassPpoClip", "cispo", "gspo")
"""Losses whose clipLow is subtracted from 1."""
WITH_CRITIC_MODEL = "fsdp2"
"""The backend whose critic may start from another model than the policy."""
_CRITIC_OF_MODEL = "!has(self.algorithm.critic) || !has(self.algorithm.critic.model)"


def _yaml_name(attribute: str) -> str:
    return to_camel(attribute.rstrip("_"))


def _foreign(path: str, given: object, chosen: str, takes: set[str], known: frozenset[str]) -> Iterator[Violation]:
    """Parameters that are set although the chosen method does not take them."""
    for name in sorted(known - takes):
        if getattr(given, name) is not None:
            takable = ", ".join(map(_yaml_name, sorted(takes))) or "none"
            yield Violation(
                f"{path}.{_yaml_name(name)}",
                f"not a parameter of {chosen}",
                f"remove it; {chosen} takes {takable}",
            )


@rule(
    cel=[
        Cel(
            ALGORITHM,
            f"!has(self.advantage.{_yaml_name(name)}) || {cel.estimator_in('self', cel.takers(name, ESTIMATORS))}",
            "not a parameter of the estimator; remove it",
            f".advantage.{_yaml_name(name)}",
        )
        for name in sorted(ESTIMATOR_PARAMETERS)
    ]
)
def advantage_parameters_belong_to_the_estimator(job: Job) -> Iterator[Violation]:
    chosen, takes = job.resolved.algorithm.advantage.estimator, set(job.estimator.parameters)
    yield from _foreign("spec.algorithm.advantage", job.spec.algorithm.advantage, chosen, takes, ESTIMATOR_PARAMETERS)


@rule(
    cel=[
        Cel(
            ALGORITHM,
            f"!has(self.policyLoss.{_yaml_name(name)}) || {cel.loss_in('self', cel.takers(name, POLICY_LOSSES))}",
            "not a parameter of the loss; remove it",
            f".policyLoss.{_yaml_name(name)}",
        )
        for name in sorted(POLICY_LOSS_PARAMETERS)
    ]
)
def loss_parameters_belong_to_the_loss(job: Job) -> Iterator[Violation]:
    chosen, takes = job.resolved.algorithm.policy_loss.type, set(job.policy_loss.parameters)
    given = job.spec.algorithm.policy_loss
    yield from _foreign("spec.algorithm.policyLoss", given, chosen, takes, POLICY_LOSS_PARAMETERS)


@rule(
    cel=Cel(
        SPEC,
        f"{cel.SAMPLES} >= 2 || !{cel.estimator_in('self.algorithm', cel.COMPARING)}",
        "the estimator compares samples of a group; use 2 or more",
        ".batch.samplesPerPrompt",
    )
)
def groups_are_compared_with_two_samples_or_more(job: Job) -> Iterator[Violation]:
    samples = job.resolved.batch.samples_per_prompt
    if job.estimator.compares_samples and samples < 2:
        yield Violation(
            "spec.batch.samplesPerPrompt",
            f"the estimator {job.resolved.algorithm.advantage.estimator} compares samples of a group, but there is "
            f"only {samples}",
            "use 2 or more",
        )


@rule(
    cel=Cel(
        ALGORITHM,
        f"!has(self.critic) || {cel.estimator_in('self', cel.WITH_CRITIC)}",
        "the estimator has no critic; remove it, or use advantage.estimator: gae (preset ppo)",
        ".critic",
    )
)
def critic_belongs_to_gae(job: Job) -> Iterator[Violation]:
    estimator = job.resolved.algorithm.advantage.estimator
    if job.spec.algorithm.critic is not None and not job.estimator.needs_critic:
        yield Violation(
            "spec.algorithm.critic",
            f"the estimator {estimator} has no critic",
            "remove it, or use advantage.estimator: gae (preset ppo)",
        )


@rule(
    cel=[
        Cel(
            SPEC,
            f"{_CRITIC_OF_MODEL} || self.trainer.backend == '{WITH_CRITIC_MODEL}'",
            f"is supported only by trainer.backend: {WITH_CRITIC_MODEL}; use that, or remove it",
            ".algorithm.critic.model",
        ),
        Cel(
            SPEC,
            f"{_CRITIC_OF_MODEL} || !has(self.model.lora)",
            "with model.lora, actor and critic are adapters of the same model; remove it, or model.lora",
            ".algorithm.critic.model",
        ),
    ]
)
def critics_of_another_model_are_trained_whole(job: Job) -> Iterator[Violation]:
    """An adapter belongs to one base, which checkpoints name; another backend might train a copy of the policy as if
    nothing had been said."""
    critic, path = job.spec.algorithm.critic, "spec.algorithm.critic.model"
    if critic is None or critic.model is None:
        return
    backend = job.spec.trainer.backend
    if backend != WITH_CRITIC_MODEL:
        yield Violation(
            path,
            f"is not supported by trainer.backend: {backend}",
            f"use trainer.backend: {WITH_CRITIC_MODEL}, or remove it",
        )
    if job.spec.model.lora is not None:
        yield Violation(
            path,
            "with model.lora, actor and critic are adapters of the same model",
            "remove it, or remove spec.model.lora",
        )


@rule(
    cel=Cel(
        ALGORITHM,
        f"!has(self.truncated.bootstrap) || !self.truncated.bootstrap || {cel.estimator_in('self', cel.WITH_CRITIC)}",
        "needs a critic, which only the estimator gae has; remove it",
        ".truncated.bootstrap",
    )
)
def bootstrap_needs_a_critic(job: Job) -> Iterator[Violation]:
    if job.spec.algorithm.truncated.bootstrap and not job.estimator.needs_critic:
        yield Violation(
            "spec.algorithm.truncated.bootstrap",
            "needs a critic, which only the estimator gae has",
            "remove it, or use advantage.estimator: gae (preset ppo)",
        )


@rule(
    cel=Cel(
        (*ALGORITHM, "truncated"),
        "!has(self.replacement) || (has(self.reward) && self.reward == 'replace')",
        "has no effect without reward: replace; set that, or remove it",
        ".replacement",
    )
)
def replacement_belongs_to_replace(job: Job) -> Iterator[Violation]:
    if job.spec.algorithm.truncated.replacement is not None and job.resolved.algorithm.truncated.reward != "replace":
        yield Violation(
            "spec.algorithm.truncated.replacement",
            "has no effect with reward: keep",
            "set reward: replace, or remove it",
        )


@rule(
    cel=Cel(
        (*ALGORITHM, "policyLoss"),
        "!has(self.dualClip) || self.dualClip == 0.0 || self.dualClip > 1.0",
        "must be above 1; use about 3, or 0 to turn it off",
        ".dualClip",
    )
)
def dual_clip_is_above_one(job: Job) -> Iterator[Violation]:
    dual = job.spec.algorithm.policy_loss.dual_clip
    if dual is not None and dual != 0 and dual <= 1:
        yield Violation(
            "spec.algorithm.policyLoss.dualClip", f"{dual:g} is not above 1", "use about 3, or 0 to turn it off"
        )


@rule(
    cel=Cel(
        ALGORITHM,
        cel.brief(
            "self.policyLoss",
            f"!{cel.loss_in('self', cel.takers('dual_clip', POLICY_LOSSES))} || "
            f"![{cel.loss_parameter('dual_clip', 'dualClip', 'self')}].exists(d, "
            f"d > 1.0 && d <= 1.0 + {cel.loss_parameter('clip_high', 'clipHigh', 'self')})",
        ),
        "must be above 1 + clipHigh; raise it, or lower clipHigh",
        ".policyLoss.dualClip",
    )
)
def dual_clip_lies_above_the_upper_clip(job: Job) -> Iterator[Violation]:
    loss = job.resolved.algorithm.policy_loss
    if loss.dual_clip and loss.clip_high is not None and 1 < loss.dual_clip <= 1 + loss.clip_high:
        yield Violation(
            "spec.algorithm.policyLoss.dualClip",
            f"{loss.dual_clip:g} is not above 1 + clipHigh = {1 + loss.clip_high:g}",
            "raise it, or lower clipHigh",
        )


@rule(
    cel=Cel(
        ALGORITHM,
        f"!has(self.policyLoss.clipLow) || self.policyLoss.clipLow <= 1.0 || !{cel.loss_in('self', RATIO_CLIPS)}",
        "would allow negative ratios; use 0 to 1 (1: no lower bound)",
        ".policyLoss.clipLow",
    )
)
def lower_clip_is_at_most_one(job: Job) -> Iterator[Violation]:
    loss = job.resolved.algorithm.policy_loss
    if loss.type in RATIO_CLIPS and loss.clip_low is not None and loss.clip_low > 1:
        yield Violation(
            "spec.algorithm.policyLoss.clipLow",
            f"{loss.clip_low:g} would allow negative ratios",
            "use 0 to 1 (1: no lower bound)",
        )


@rule(
    cel=Cel(
        ALGORITHM,
        f"!{cel.loss_in('self', cel.takers('covariance_low', POLICY_LOSSES))} || "
        f"{cel.loss_parameter('covariance_low', 'covarianceLow', 'self')} < "
        f"{cel.loss_parameter('covariance_high', 'covarianceHigh', 'self')}",
        "must be below covarianceHigh; lower it, or raise covarianceHigh",
        ".policyLoss.covarianceLow",
    )
)
def covariance_range_is_a_range(job: Job) -> Iterator[Violation]:
    loss = job.resolved.algorithm.policy_loss
    low, high = loss.covariance_low, loss.covariance_high
    if low is not None and high is not None and low >= high:
        yield Violation(
            "spec.algorithm.policyLoss.covarianceLow",
            f"{low:g} is not below covarianceHigh = {high:g}",
            "lower it, or raise covarianceHigh",
        )


_FORCED = [name for name, method in POLICY_LOSSES.items() if method.aggregation]


@rule(
    cel=Cel(
        ALGORITHM,
        f"!has(self.aggregation) || self.aggregation == 'seqMeanTokenMean' || !{cel.loss_in('self', _FORCED)}",
        "the loss is defined with seqMeanTokenMean; use that, or remove it",
        ".aggregation",
    )
)
def sequence_losses_have_their_aggregation(job: Job) -> Iterator[Violation]:
    needed, chosen = job.policy_loss.aggregation, job.resolved.algorithm.aggregation
    if needed is not None and chosen != needed:
        yield Violation(
            "spec.algorithm.aggregation",
            f"the loss {job.resolved.algorithm.policy_loss.type} is defined with {needed}, not {chosen}",
            f"use {needed}, or remove it",
        )


@rule(
    cel=Cel(
        ALGORITHM,
        "!has(self.aggregation) || self.aggregation != 'promptMean' || !has(self.resampling)",
        "resampling mixes the samples of prompts; use another",
        ".aggregation",
    )
)
def resampled_prompts_have_no_mean(job: Job) -> Iterator[Violation]:
    """A drawn sample may stand in the place of another prompt's, and several times."""
    algorithm = job.resolved.algorithm
    if algorithm.aggregation == "promptMean" and algorithm.resampling is not None:
        yield Violation(
            "spec.algorithm.aggregation",
            "promptMean needs whole prompts, whose samples resampling mixes",
            "use tokenMean, or remove resampling",
        )


_NORMED = "seqMeanTokenSumNorm"


@rule(
    cel=Cel(
        ALGORITHM,
        f"!has(self.aggregationScale) || (has(self.aggregation) ? self.aggregation == {text(_NORMED)} : "
        f"!{cel.loss_in('self', _FORCED)} && {cel.preset_in('self', lambda p: p.algorithm.aggregation == _NORMED)})",
        "has no effect without aggregation: seqMeanTokenSumNorm; remove it",
        ".aggregationScale",
    )
)
def scale_belongs_to_the_normed_sum(job: Job) -> Iterator[Violation]:
    algorithm = job.resolved.algorithm
    if job.spec.algorithm.aggregation_scale is not None and algorithm.aggregation != _NORMED:
        yield Violation(
            "spec.algorithm.aggregationScale",
            f"has no effect with aggregation {algorithm.aggregation}",
            "remove it, or use aggregation: seqMeanTokenSumNorm",
        )
