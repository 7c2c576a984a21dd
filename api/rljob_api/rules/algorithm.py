"""Rules about spec.algorithm."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.alias_generators import to_camel

from rljob_api.correction_presets import CORRECTION_PRESETS
from rljob_api.methods import ESTIMATOR_PARAMETERS, POLICY_LOSS_PARAMETERS
from rljob_api.rules.registry import Job, rule
from rljob_api.spec.algorithm import KlController
from rljob_api.spec.reward import RewardFunction
from rljob_api.violations import Violation

RATIO_CLIPS = ("ppoClip", "clipCov", "dppoTv", "bypassPpoClip", "cispo", "gspo")
"""Losses whose clipLow is subtracted from 1."""


def _yaml_name(attribute: str) -> str:
    return to_camel(attribute.rstrip("_"))


def _foreign(path: str, given: object, chosen: str, takes: set[str], known: frozenset[str]) -> Iterator[Violation]:
    """Parameters that are set although the chosen method does not take them."""
    for name in sorted(known - takes):
        if getattr(given, name) is not None:
            takable = ", ".join(map(_yaml_name, sorted(takes))) or "none"
            yield Violation(
                f"{path}.{_yaml_name(name)}",
                f"{chosen} does not take it",
                f"remove it; {chosen} takes {takable}",
            )


@rule
def advantage_parameters_belong_to_the_estimator(job: Job) -> Iterator[Violation]:
    chosen, takes = job.resolved.algorithm.advantage.estimator, set(job.estimator.parameters)
    yield from _foreign("spec.algorithm.advantage", job.spec.algorithm.advantage, chosen, takes, ESTIMATOR_PARAMETERS)


@rule
def loss_parameters_belong_to_the_loss(job: Job) -> Iterator[Violation]:
    chosen, takes = job.resolved.algorithm.policy_loss.type, set(job.policy_loss.parameters)
    given = job.spec.algorithm.policy_loss
    yield from _foreign("spec.algorithm.policyLoss", given, chosen, takes, POLICY_LOSS_PARAMETERS)


@rule
def groups_are_compared_with_two_samples_or_more(job: Job) -> Iterator[Violation]:
    samples = job.resolved.batch.samples_per_prompt
    if job.estimator.compares_samples and samples < 2:
        yield Violation(
            "spec.batch.samplesPerPrompt",
            f"{samples} sample gives nothing to compare, which the estimator "
            f"{job.resolved.algorithm.advantage.estimator} needs",
            "use 2 or more",
        )


@rule
def critic_belongs_to_gae(job: Job) -> Iterator[Violation]:
    estimator = job.resolved.algorithm.advantage.estimator
    if job.spec.algorithm.critic is not None and not job.estimator.needs_critic:
        yield Violation(
            "spec.algorithm.critic",
            f"the estimator {estimator} has no critic",
            "remove it, or use advantage.estimator: gae (preset ppo)",
        )


@rule
def bootstrap_needs_a_critic(job: Job) -> Iterator[Violation]:
    if job.spec.algorithm.truncated.bootstrap and not job.estimator.needs_critic:
        yield Violation(
            "spec.algorithm.truncated.bootstrap",
            "needs the value of a critic, which only the estimator gae has",
            "remove it, or use advantage.estimator: gae (preset ppo)",
        )


@rule
def replacement_belongs_to_replace(job: Job) -> Iterator[Violation]:
    if job.spec.algorithm.truncated.replacement is not None and job.resolved.algorithm.truncated.reward != "replace":
        yield Violation(
            "spec.algorithm.truncated.replacement",
            "has no meaning with reward: keep",
            "set reward: replace, or remove it",
        )


@rule
def dual_clip_is_above_one(job: Job) -> Iterator[Violation]:
    dual = job.spec.algorithm.policy_loss.dual_clip
    if dual is not None and dual != 0 and dual <= 1:
        yield Violation(
            "spec.algorithm.policyLoss.dualClip", f"{dual:g} is not above 1", "use about 3, or 0 to turn it off"
        )


@rule
def dual_clip_lies_above_the_upper_clip(job: Job) -> Iterator[Violation]:
    loss = job.resolved.algorithm.policy_loss
    if loss.dual_clip and loss.clip_high is not None and 1 < loss.dual_clip <= 1 + loss.clip_high:
        yield Violation(
            "spec.algorithm.policyLoss.dualClip",
            f"{loss.dual_clip:g} is not above 1 + clipHigh = {1 + loss.clip_high:g}",
            "raise it, or lower clipHigh",
        )


@rule
def lower_clip_is_at_most_one(job: Job) -> Iterator[Violation]:
    loss = job.resolved.algorithm.policy_loss
    if loss.type in RATIO_CLIPS and loss.clip_low is not None and loss.clip_low > 1:
        yield Violation(
            "spec.algorithm.policyLoss.clipLow",
            f"{loss.clip_low:g} would allow negative ratios",
            "use 0 to 1 (1: no lower bound)",
        )


@rule
def covariance_range_is_a_range(job: Job) -> Iterator[Violation]:
    loss = job.resolved.algorithm.policy_loss
    low, high = loss.covariance_low, loss.covariance_high
    if low is not None and high is not None and low >= high:
        yield Violation(
            "spec.algorithm.policyLoss.covarianceLow",
            f"{low:g} is not below covarianceHigh = {high:g}",
            "lower it, or raise covarianceHigh",
        )


@rule
def sequence_losses_have_their_aggregation(job: Job) -> Iterator[Violation]:
    needed, chosen = job.policy_loss.aggregation, job.resolved.algorithm.aggregation
    if needed is not None and chosen != needed:
        yield Violation(
            "spec.algorithm.aggregation",
            f"the loss {job.resolved.algorithm.policy_loss.type} is defined with {needed}, not {chosen}",
            f"use {needed}, or leave it out",
        )


@rule
def scale_belongs_to_the_normed_sum(job: Job) -> Iterator[Violation]:
    algorithm = job.resolved.algorithm
    if job.spec.algorithm.aggregation_scale is not None and algorithm.aggregation != "seqMeanTokenSumNorm":
        yield Violation(
            "spec.algorithm.aggregationScale",
            f"has no meaning with aggregation {algorithm.aggregation}",
            "remove it, or use aggregation: seqMeanTokenSumNorm",
        )


@rule
def controller_needs_a_coefficient(job: Job) -> Iterator[Violation]:
    given, term = job.spec.algorithm.kl.in_reward, job.resolved.algorithm.kl.in_reward
    if given is not None and given.controller is not None and given.controller.type == "adaptive" and term is None:
        yield Violation(
            "spec.algorithm.kl.inReward.coefficient",
            "is 0, from where an adaptive controller never gets away",
            "give it a start value, for example 0.001",
        )


@rule
def target_belongs_to_an_adaptive_controller(job: Job) -> Iterator[Violation]:
    given = job.spec.algorithm.kl.in_reward
    if given is None or given.controller is None or given.controller.type == "adaptive":
        return
    fixed = KlController()
    if (given.controller.target, given.controller.horizon) != (fixed.target, fixed.horizon):
        yield Violation(
            "spec.algorithm.kl.inReward.controller",
            "its target and horizon have no meaning with type: fixed",
            "set type: adaptive, or remove them",
        )


@rule
def controller_sees_no_more_than_its_horizon(job: Job) -> Iterator[Violation]:
    term = job.resolved.algorithm.kl.in_reward
    if term is None or term.controller.type != "adaptive":
        return
    batch, pipeline = job.resolved.batch, job.resolved.pipeline
    pull = pipeline.require_batches * batch.mini_batch_groups
    groups = pull if pipeline.mode == "fullyAsync" else batch.groups
    samples = groups * batch.samples_per_prompt
    if samples > term.controller.horizon:
        yield Violation(
            "spec.algorithm.kl.inReward.controller.horizon",
            f"{term.controller.horizon} is less than the {samples} samples after which the coefficient moves",
            f"use {samples} or more (10 to 100 times as much is usual)",
        )


@rule
def correction_needs_a_mode(job: Job) -> Iterator[Violation]:
    given, mode = job.spec.algorithm.rollout_correction, job.resolved.algorithm.rollout_correction.mode
    idle = [name for name in ("weights", "rejection", "veto") if getattr(given, name)]
    if mode == "none" and idle:
        yield Violation(
            "spec.algorithm.rolloutCorrection",
            f"{' and '.join(idle)} {'have' if len(idle) > 1 else 'has'} no meaning with mode none",
            f"set mode: decoupled (or bypass), or remove {'them' if len(idle) > 1 else 'it'}",
        )


@rule
def correction_preset_has_its_mode_and_loss(job: Job) -> Iterator[Violation]:
    given, loss = job.spec.algorithm.rollout_correction, job.resolved.algorithm.policy_loss.type
    if given.preset is None:
        return
    named = CORRECTION_PRESETS[given.preset]
    if given.mode not in (None, named.mode):
        yield Violation(
            "spec.algorithm.rolloutCorrection.mode",
            f"the correction preset {given.preset} is defined with mode {named.mode}, not {given.mode}",
            "remove it, or the preset",
        )
    if named.policy_loss not in (None, loss):
        yield Violation(
            "spec.algorithm.rolloutCorrection.preset",
            f"{given.preset} is defined with the loss {named.policy_loss}, not {loss}",
            f"set policyLoss.type: {named.policy_loss}, or choose another preset",
        )


@rule
def bypass_corrects_in_its_losses(job: Job) -> Iterator[Violation]:
    """No third policy, hence nothing to correct before the loss."""
    given, algorithm = job.spec.algorithm.rollout_correction, job.resolved.algorithm
    loss = algorithm.policy_loss.type
    if algorithm.rollout_correction.mode != "bypass":
        return
    idle = ["weights"] if given.weights and loss != "bypassReinforce" else []
    if not job.policy_loss.needs_bypass:
        idle += [name for name in ("rejection", "veto") if getattr(given, name)]
    if idle:
        yield Violation(
            "spec.algorithm.rolloutCorrection",
            f"with mode bypass the loss {loss} knows nothing of {' and '.join(idle)}",
            "set mode: decoupled, or the loss bypassReinforce (bypassPpoClip without weights)",
        )


@rule
def weight_cap_is_at_least_one(job: Job) -> Iterator[Violation]:
    weights = job.spec.algorithm.rollout_correction.weights
    if weights and weights.high < 1:
        yield Violation(
            "spec.algorithm.rolloutCorrection.weights.high",
            f"{weights.high:g} would shrink the weights of equal policies, which are 1",
            "use 1 or more (2 is usual)",
        )


@rule
def rejection_bounds_make_sense(job: Job) -> Iterator[Violation]:
    for index, rejection in enumerate(job.spec.algorithm.rollout_correction.rejection):
        path = f"spec.algorithm.rolloutCorrection.rejection[{index}]"
        if rejection.statistic != "k1":
            if rejection.low is not None:
                yield Violation(
                    f"{path}.low", f"{rejection.statistic} is never negative and has no lower bound", "remove it"
                )
        elif rejection.high <= 1:
            yield Violation(
                f"{path}.high", f"{rejection.high:g} would reject equal policies, whose ratio is 1", "use more than 1"
            )
        elif rejection.low is not None and rejection.low >= 1:
            yield Violation(
                f"{path}.low", f"{rejection.low:g} would reject equal policies, whose ratio is 1", "use less than 1"
            )


@rule
def largest_k1_is_no_criterion(job: Job) -> Iterator[Violation]:
    for index, rejection in enumerate(job.spec.algorithm.rollout_correction.rejection):
        if rejection.statistic == "k1" and rejection.over == "sequenceMax":
            yield Violation(
                f"spec.algorithm.rolloutCorrection.rejection[{index}].over",
                "the largest k1 of a sequence says nothing about small ratios",
                "use k2 or k3 with sequenceMax",
            )


@rule
def rejections_differ(job: Job) -> Iterator[Violation]:
    seen: set[tuple[str, str]] = set()
    for index, rejection in enumerate(job.spec.algorithm.rollout_correction.rejection):
        key = (rejection.statistic, rejection.over)
        if key in seen:
            yield Violation(
                f"spec.algorithm.rolloutCorrection.rejection[{index}]",
                f"{rejection.statistic} over {rejection.over} is there twice",
                "keep one of them",
            )
        seen.add(key)


@rule
def limits_limit_something(job: Job) -> Iterator[Violation]:
    limits = job.spec.algorithm.rollout_correction.limits
    if limits and limits.kl is limits.effective_sample_size is limits.chi_square is None:
        yield Violation(
            "spec.algorithm.rolloutCorrection.limits",
            "has none of kl, effectiveSampleSize and chiSquare",
            "give one of them, or remove it",
        )


@rule
def correction_can_be_switched_on(job: Job) -> Iterator[Violation]:
    correction, loss = job.resolved.algorithm.rollout_correction, job.resolved.algorithm.policy_loss.type
    if correction.limits is None or correction.limits.action != "correct":
        return
    path, remedy = "spec.algorithm.rolloutCorrection.limits.action", "use warn or rollBack"
    if correction.mode == "decoupled" and correction.weights is not None:
        yield Violation(path, "correct has nothing to switch on: mode decoupled has weights already", remedy)
    if job.policy_loss.needs_bypass:
        yield Violation(path, f"the loss {loss} stays with mode bypass, so that correct cannot leave it", remedy)


@rule
def interpolation_belongs_to_decoupled(job: Job) -> Iterator[Violation]:
    correction = job.resolved.algorithm.rollout_correction
    if correction.proximal == "interpolated" and correction.mode != "decoupled":
        yield Violation(
            "spec.algorithm.rolloutCorrection.proximal",
            f"mode {correction.mode} has no third policy to interpolate",
            "set mode: decoupled, or remove it",
        )


@rule
def interpolation_is_made_in_the_loss(job: Job) -> Iterator[Violation]:
    algorithm = job.resolved.algorithm
    correction = algorithm.rollout_correction
    if correction.proximal != "interpolated":
        return
    path, remedy = "spec.algorithm.rolloutCorrection.proximal", "use recomputed"
    if correction.weights is not None and correction.weights.normalize:
        yield Violation(path, "the weights of a batch are not known before its update: no weights.normalize", remedy)
    if algorithm.policy_loss.type in ("clipCov", "klCov"):
        yield Violation(path, f"{algorithm.policy_loss.type} chooses its tokens before pi_old is made", remedy)


@rule
def bypass_losses_need_bypass(job: Job) -> Iterator[Violation]:
    algorithm = job.resolved.algorithm
    if job.policy_loss.needs_bypass and algorithm.rollout_correction.mode != "bypass":
        yield Violation(
            "spec.algorithm.rolloutCorrection.mode",
            f"the loss {algorithm.policy_loss.type} needs mode bypass, not {algorithm.rollout_correction.mode}",
            "set mode: bypass, or another policyLoss.type",
        )


@rule
def estimator_takes_a_penalty(job: Job) -> Iterator[Violation]:
    algorithm = job.resolved.algorithm
    reasons = {
        "maxrl": "maxrl divides by the mean reward of a group, which a KL in the reward can make 0 or negative",
        "gdpo": "gdpo takes each reward function by itself, and a KL in the reward is none of them",
    }
    if algorithm.advantage.estimator in reasons and algorithm.kl.in_reward is not None:
        yield Violation(
            "spec.algorithm.kl.inReward",
            reasons[algorithm.advantage.estimator],
            "set coefficient: 0 and use kl.inLoss, or another estimator",
        )


@rule
def estimator_takes_normalised_rewards(job: Job) -> Iterator[Violation]:
    estimator = job.resolved.algorithm.advantage.estimator
    reasons = {
        "maxrl": "maxrl divides by the mean reward of a group, and normalised rewards have mean 0",
        "gdpo": "gdpo takes each reward function by itself, and normalises it",
        "remax": "remax compares with the greedy response's reward, which is not normalised",
    }
    if estimator in reasons and job.spec.reward.normalize:
        yield Violation("spec.reward.normalize", reasons[estimator], "remove it, or use another estimator")


def _divides_by_rewards(job: Job) -> bool:
    """Whether maxrl meets rewards as they are: no clip keeps them from being negative."""
    clip = job.spec.reward.clip
    return job.resolved.algorithm.advantage.estimator == "maxrl" and not (clip and clip.low >= 0)


_DIVIDES = "maxrl divides by the mean reward of a group and refuses negative rewards"
_CLIP = "set spec.reward.clip: {low: 0, high: ...}, or use another estimator"


@rule
def estimator_takes_no_negative_rewards(job: Job) -> Iterator[Violation]:
    """What a custom function returns is not known; other terms are 0 where a response is wrong."""
    if not _divides_by_rewards(job):
        return
    reward, truncated = job.spec.reward, job.resolved.algorithm.truncated
    if reward.overlong:
        yield Violation("spec.reward.overlong", f"{_DIVIDES}, which those of long responses would be", _CLIP)
    if truncated.reward == "replace" and truncated.replacement < 0:
        yield Violation(
            "spec.algorithm.truncated.replacement", f"{truncated.replacement:g}: {_DIVIDES}", f"use 0, or {_CLIP}"
        )
    if reward.error_score < 0:
        yield Violation("spec.reward.errorScore", f"{reward.error_score:g}: {_DIVIDES}", f"use 0, or {_CLIP}")
    for index, function in enumerate(reward.functions):
        if function.weight < 0 and function.type not in ("custom", "length"):
            yield Violation(
                f"spec.reward.functions[{index}].weight", f"{function.weight:g}: {_DIVIDES}", f"raise it, or {_CLIP}"
            )


@rule
def estimator_takes_no_negative_terms(job: Job) -> Iterator[Violation]:
    """As ``estimator_takes_no_negative_rewards``, of the functions' own parameters."""
    if not _divides_by_rewards(job):
        return
    longest = job.resolved.rollout.max_response_tokens
    for index, function in enumerate(job.spec.reward.functions):
        path = f"spec.reward.functions[{index}].params"
        if function.type == "length" and _parameter(function, "freeTokens", 0) < longest:
            slope = _parameter(function, "coefficient", -0.001)
            if function.weight * slope < 0:
                yield Violation(
                    f"{path}.coefficient", f"{slope:g}: {_DIVIDES}, which those of long responses would be", _CLIP
                )
        elif function.type == "gsm8k" and (score := _parameter(function, "formatScore", 0)) < 0 < function.weight:
            yield Violation(f"{path}.formatScore", f"{score:g}: {_DIVIDES}", f"use 0, or {_CLIP}")


def _parameter(function: RewardFunction, name: str, default: float) -> float:
    """A parameter that is a number; what it is instead is said where functions are checked."""
    given = function.params.get(name, default)
    return given if isinstance(given, int | float) else default


@rule
def resampling_belongs_to_gae(job: Job) -> Iterator[Violation]:
    if job.spec.algorithm.resampling is not None and not job.estimator.needs_critic:
        yield Violation(
            "spec.algorithm.resampling",
            "weighs samples by their own reward, which a comparison within groups has taken into account already",
            "remove it, or use advantage.estimator: gae (preset ppo)",
        )


@rule
def entropy_target_has_room(job: Job) -> Iterator[Violation]:
    given = job.spec.algorithm
    start, target = given.entropy_coefficient, given.entropy_target
    if start is not None and target is not None and start > target.maximum:
        yield Violation(
            "spec.algorithm.entropyCoefficient",
            f"{start:g} is above entropyTarget.maximum = {target.maximum:g}",
            "lower it, or raise the maximum",
        )


@rule
def gdpo_sees_parts_alone(job: Job) -> Iterator[Violation]:
    algorithm, why = job.resolved.algorithm, "gdpo takes each reward function by itself and not their sum"
    if algorithm.advantage.estimator != "gdpo":
        return
    if job.spec.reward.clip:
        yield Violation("spec.reward.clip", why, "remove it, or use another estimator")
    if algorithm.truncated.reward == "replace":
        yield Violation("spec.algorithm.truncated.reward", why, "use truncated.mask, or another estimator")


@rule
def gdpo_needs_several_rewards(job: Job) -> Iterator[Violation]:
    if job.resolved.algorithm.advantage.estimator == "gdpo" and len(job.spec.reward.functions) < 2:
        yield Violation(
            "spec.reward.functions",
            "gdpo normalises each reward function by itself, and there is only one",
            "add another, or use the estimator grpo",
        )


@rule
def filter_needs_groups(job: Job) -> Iterator[Violation]:
    if job.resolved.algorithm.group_filter.drop_uniform and job.resolved.batch.samples_per_prompt < 2:
        yield Violation(
            "spec.algorithm.groupFilter.dropUniform",
            "every group of one sample is uniform and would be dropped",
            "set batch.samplesPerPrompt to 2 or more, or dropUniform: false",
        )


@rule
def filter_limit_belongs_to_the_filter(job: Job) -> Iterator[Violation]:
    if job.spec.algorithm.group_filter.max_batches is not None and not job.resolved.algorithm.group_filter.drop_uniform:
        yield Violation(
            "spec.algorithm.groupFilter.maxBatches",
            "has no meaning without dropUniform",
            "set dropUniform: true, or remove it",
        )
