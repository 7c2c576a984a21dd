"""CEL for the rules about spec.algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic.alias_generators import to_camel

from rljob_api.correction_presets import CORRECTION_PRESETS
from rljob_api.crd import expressions as cel
from rljob_api.crd.checks.check import ALGORITHM, CORRECTION, SPEC, Check
from rljob_api.crd.expressions import given
from rljob_api.crd.structural import Path, text
from rljob_api.method import Method
from rljob_api.methods import ESTIMATOR_PARAMETERS, ESTIMATORS, POLICY_LOSS_PARAMETERS, POLICY_LOSSES
from rljob_api.presets import Preset
from rljob_api.rules.algorithm import RATIO_CLIPS
from rljob_api.spec.algorithm import KlController

_Family = tuple[str, str, str, frozenset[str], Mapping[Any, Method], Callable[[str, Iterable[str]], str]]


def checks() -> Iterator[Check]:
    """In the order of the rules."""
    yield from _method_parameters()
    yield from _algorithm()
    yield from _correction()


def _has_kl_in_reward(preset: Preset) -> bool:
    term = preset.algorithm.kl.in_reward
    return term is not None and bool(term.coefficient)


def _drops_uniform(preset: Preset) -> bool:
    return bool(preset.algorithm.group_filter.drop_uniform)


def _method_parameters() -> Iterator[Check]:
    """Which method takes which parameter."""
    advantage = "advantage_parameters_belong_to_the_estimator"
    loss = "loss_parameters_belong_to_the_loss"
    families: tuple[_Family, ...] = (
        ("advantage", "estimator", advantage, ESTIMATOR_PARAMETERS, ESTIMATORS, cel.estimator_in),
        ("policyLoss", "loss", loss, POLICY_LOSS_PARAMETERS, POLICY_LOSSES, cel.loss_in),
    )
    for section, kind, rule, parameters, methods, chosen_in in families:
        for parameter in sorted(parameters):
            field = to_camel(parameter.rstrip("_"))
            takers = cel.takers(parameter, methods)
            yield Check(
                rule,
                ALGORITHM,
                f"!has(self.{section}.{field}) || {chosen_in('self', takers)}",
                f"the {kind} does not take it; remove it",
                f".{section}.{field}",
            )


def _algorithm() -> Iterator[Check]:
    yield Check(
        "groups_are_compared_with_two_samples_or_more",
        SPEC,
        f"{cel.SAMPLES} >= 2 || !{cel.estimator_in('self.algorithm', cel.COMPARING)}",
        "one sample gives nothing to compare, which the estimator needs; use 2 or more",
        ".batch.samplesPerPrompt",
    )
    yield Check(
        "critic_belongs_to_gae",
        ALGORITHM,
        f"!has(self.critic) || {cel.estimator_in('self', cel.WITH_CRITIC)}",
        "the estimator has no critic; remove it, or use advantage.estimator: gae (preset ppo)",
        ".critic",
    )
    yield Check(
        "bootstrap_needs_a_critic",
        ALGORITHM,
        f"!has(self.truncated.bootstrap) || !self.truncated.bootstrap || {cel.estimator_in('self', cel.WITH_CRITIC)}",
        "needs the value of a critic, which only the estimator gae has; remove it",
        ".truncated.bootstrap",
    )
    yield Check(
        "replacement_belongs_to_replace",
        (*ALGORITHM, "truncated"),
        "!has(self.replacement) || (has(self.reward) && self.reward == 'replace')",
        "has no meaning without reward: replace; set that, or remove it",
        ".replacement",
    )
    yield Check(
        "dual_clip_is_above_one",
        (*ALGORITHM, "policyLoss"),
        "!has(self.dualClip) || self.dualClip == 0.0 || self.dualClip > 1.0",
        "must be above 1; use about 3, or 0 to turn it off",
        ".dualClip",
    )
    dual, high = (
        cel.loss_parameter("dual_clip", "dualClip", "self"),
        cel.loss_parameter("clip_high", "clipHigh", "self"),
    )
    yield Check(
        "dual_clip_lies_above_the_upper_clip",
        ALGORITHM,
        cel.brief(
            "self.policyLoss",
            f"!{cel.loss_in('self', cel.takers('dual_clip', POLICY_LOSSES))} || "
            f"![{dual}].exists(d, d > 1.0 && d <= 1.0 + {high})",
        ),
        "must be above 1 + clipHigh; raise it, or lower clipHigh",
        ".policyLoss.dualClip",
    )
    yield Check(
        "lower_clip_is_at_most_one",
        ALGORITHM,
        f"!has(self.policyLoss.clipLow) || self.policyLoss.clipLow <= 1.0 || !{cel.loss_in('self', RATIO_CLIPS)}",
        "would allow negative ratios; use 0 to 1 (1: no lower bound)",
        ".policyLoss.clipLow",
    )
    low = cel.loss_parameter("covariance_low", "covarianceLow", "self")
    top = cel.loss_parameter("covariance_high", "covarianceHigh", "self")
    yield Check(
        "covariance_range_is_a_range",
        ALGORITHM,
        f"!{cel.loss_in('self', cel.takers('covariance_low', POLICY_LOSSES))} || {low} < {top}",
        "must be below covarianceHigh; lower it, or raise covarianceHigh",
        ".policyLoss.covarianceLow",
    )
    forced = [name for name, method in POLICY_LOSSES.items() if method.aggregation]
    yield Check(
        "sequence_losses_have_their_aggregation",
        ALGORITHM,
        f"!has(self.aggregation) || self.aggregation == 'seqMeanTokenMean' || !{cel.loss_in('self', forced)}",
        "the loss is defined with seqMeanTokenMean; use that, or leave it out",
        ".aggregation",
    )
    normed = "seqMeanTokenSumNorm"
    yield Check(
        "scale_belongs_to_the_normed_sum",
        ALGORITHM,
        f"!has(self.aggregationScale) || (has(self.aggregation) ? self.aggregation == {text(normed)} : "
        f"!{cel.loss_in('self', forced)} && {cel.preset_in('self', lambda p: p.algorithm.aggregation == normed)})",
        "has no meaning without aggregation: seqMeanTokenSumNorm; remove it",
        ".aggregationScale",
    )
    yield Check(
        "controller_needs_a_coefficient",
        ALGORITHM,
        "!has(self.kl.inReward) || !has(self.kl.inReward.controller) || "
        "self.kl.inReward.controller.type != 'adaptive' || (has(self.kl.inReward.coefficient) ? "
        f"self.kl.inReward.coefficient > 0.0 : {cel.preset_in('self', _has_kl_in_reward)})",
        "is 0, from where an adaptive controller never gets away; give it a start value, for example 0.001",
        ".kl.inReward.coefficient",
    )
    fixed = KlController()
    yield Check(
        "target_belongs_to_an_adaptive_controller",
        (*ALGORITHM, "kl", "inReward", "controller"),
        f"self.type == 'adaptive' || (self.target == {fixed.target} && self.horizon == {fixed.horizon})",
        "target and horizon have no meaning with type: fixed; set type: adaptive, or remove them",
    )
    yield Check(
        "controller_sees_no_more_than_its_horizon",
        SPEC,
        "[self.algorithm.kl].all(c, !has(c.inReward) || !has(c.inReward.controller) || "
        f"c.inReward.controller.type == 'fixed' || {cel.UPDATE} * {cel.SAMPLES} <= c.inReward.controller.horizon)",
        "is less than the samples of a batch",
        ".algorithm.kl.inReward.controller.horizon",
    )
    yield Check(
        "estimator_takes_a_penalty",
        ALGORITHM,
        f"!{cel.estimator_in('self', ['maxrl', 'gdpo'])} || (has(self.kl.inReward) && has(self.kl.inReward.coefficient)"
        f" ? self.kl.inReward.coefficient == 0.0 : !({cel.preset_in('self', _has_kl_in_reward)}))",
        "maxrl and gdpo take no KL in the reward; set coefficient: 0",
        ".kl.inReward",
    )
    yield Check(
        "estimator_takes_normalised_rewards",
        SPEC,
        f"!self.reward.normalize || !{cel.estimator_in('self.algorithm', ['maxrl', 'gdpo', 'remax'])}",
        "maxrl, gdpo and remax take rewards as they are; remove it",
        ".reward.normalize",
    )
    maxrl = cel.estimator_in("self.algorithm", ["maxrl"])
    taken = f"!{maxrl} || has(self.reward.clip) && self.reward.clip.low >= 0.0 || "
    for condition, place in (
        ("!has(self.reward.overlong)", ".reward.overlong"),
        (
            "!has(self.algorithm.truncated.replacement) || self.algorithm.truncated.replacement >= 0.0",
            ".algorithm.truncated.replacement",
        ),
        ("self.reward.errorScore >= 0.0", ".reward.errorScore"),
        (
            "self.reward.functions.all(f, f.weight >= 0.0 || f.type == 'custom' || f.type == 'length')",
            ".reward.functions",
        ),
    ):
        yield Check(
            "estimator_takes_no_negative_rewards",
            SPEC,
            taken + condition,
            "maxrl refuses negative rewards; remove it, or set reward.clip with low: 0",
            place,
        )
    yield Check(
        "gdpo_sees_parts_alone",
        SPEC,
        f"!has(self.reward.clip) || !{cel.estimator_in('self.algorithm', ['gdpo'])}",
        "gdpo takes each reward function by itself; remove it",
        ".reward.clip",
    )
    yield Check(
        "gdpo_sees_parts_alone",
        ALGORITHM,
        f"!has(self.truncated.reward) || self.truncated.reward == 'keep' || !{cel.estimator_in('self', ['gdpo'])}",
        "gdpo takes each reward function by itself; use truncated.mask",
        ".truncated.reward",
    )
    yield Check(
        "resampling_belongs_to_gae",
        ALGORITHM,
        f"!has(self.resampling) || {cel.estimator_in('self', cel.WITH_CRITIC)}",
        "belongs to the estimator gae; remove it",
        ".resampling",
    )
    yield Check(
        "entropy_target_has_room",
        ALGORITHM,
        "!has(self.entropyTarget) || !has(self.entropyCoefficient) || "
        "self.entropyCoefficient <= self.entropyTarget.maximum",
        "is above entropyTarget.maximum; lower it",
        ".entropyCoefficient",
    )
    yield Check(
        "gdpo_needs_several_rewards",
        SPEC,
        f"!{cel.estimator_in('self.algorithm', ['gdpo'])} || size(self.reward.functions) > 1",
        "gdpo normalises each reward function by itself; add another, or use the estimator grpo",
        ".reward.functions",
    )
    drops = "groupFilter.dropUniform"
    yield Check(
        "filter_needs_groups",
        SPEC,
        f"!{given('self.algorithm.' + drops, cel.preset_in('self.algorithm', _drops_uniform))} || {cel.SAMPLES} >= 2",
        "every group of one sample is uniform and would be dropped; set batch.samplesPerPrompt to 2 or more",
        ".algorithm.groupFilter.dropUniform",
    )
    yield Check(
        "filter_limit_belongs_to_the_filter",
        ALGORITHM,
        f"!has(self.groupFilter.maxBatches) || {given('self.' + drops, cel.preset_in('self', _drops_uniform))}",
        "has no meaning without dropUniform; set dropUniform: true, or remove it",
        ".groupFilter.maxBatches",
    )


def _correction() -> Iterator[Check]:
    weights: Path = (*CORRECTION, "weights")
    rejection: Path = (*CORRECTION, "rejection", "[]")
    correction = "self.algorithm.rolloutCorrection"
    rejects = f"(has({correction}.veto) || has({correction}.rejection) && size({correction}.rejection) > 0)"
    yield Check(
        "correction_needs_a_mode",
        SPEC,
        cel.brief(correction, f"!(has({correction}.weights) || {rejects}) || !{cel.IS_WITHOUT_CORRECTION}"),
        "weights, rejection and veto have no meaning with mode none; set mode: decoupled (or bypass), or remove them",
        ".algorithm.rolloutCorrection",
    )
    yield Check(
        "correction_preset_has_its_mode_and_loss",
        CORRECTION,
        "!has(self.preset) || !has(self.mode) || self.mode == (self.preset.startsWith('bypass') ? 'bypass' : "
        "'decoupled')",
        "the preset has its own mode; remove it",
        ".mode",
    )
    yield Check(
        "correction_preset_has_its_mode_and_loss",
        ALGORITHM,
        "!has(self.rolloutCorrection.preset) || !self.rolloutCorrection.preset.startsWith('bypass') || "
        "has(self.policyLoss.type) && self.policyLoss.type == "
        "(self.rolloutCorrection.preset.startsWith('bypass_ppo') ? 'bypassPpoClip' : 'bypassReinforce')",
        "needs policyLoss.type: bypassPpoClip for bypass_ppo..., bypassReinforce for bypass_pg...; set it",
        ".rolloutCorrection.preset",
    )
    yield Check(
        "bypass_corrects_in_its_losses",
        SPEC,
        cel.brief(
            correction,
            f"!{cel.IS_BYPASS} || (!{rejects} || {cel.loss_in('self.algorithm', cel.BYPASSING)}) && "
            f"(!has({correction}.weights) || {cel.loss_in('self.algorithm', ['bypassReinforce'])})",
        ),
        "with mode bypass the loss knows nothing of them; set mode: decoupled, or the loss bypassReinforce "
        "(bypassPpoClip without weights)",
        ".algorithm.rolloutCorrection",
    )
    yield Check(
        "bypass_losses_need_bypass",
        SPEC,
        cel.brief(correction, f"!{cel.loss_in('self.algorithm', cel.BYPASSING)} || {cel.IS_BYPASS}"),
        "the loss needs mode bypass; set it, or another policyLoss.type",
        ".algorithm.rolloutCorrection.mode",
    )
    yield Check(
        "weight_cap_is_at_least_one",
        weights,
        "self.high >= 1.0",
        "would shrink the weights of equal policies, which are 1; use 1 or more (2 is usual)",
        ".high",
    )
    yield Check(
        "rejection_bounds_make_sense",
        rejection,
        "self.statistic == 'k1' || !has(self.low)",
        "k2 and k3 are never negative and have no lower bound; remove it",
        ".low",
    )
    yield Check(
        "rejection_bounds_make_sense",
        rejection,
        "self.statistic != 'k1' || self.high > 1.0",
        "would reject equal policies, whose ratio is 1; use more than 1",
        ".high",
    )
    yield Check(
        "rejection_bounds_make_sense",
        rejection,
        "self.statistic != 'k1' || self.high <= 1.0 || !has(self.low) || self.low < 1.0",
        "would reject equal policies, whose ratio is 1; use less than 1",
        ".low",
    )
    yield Check(
        "largest_k1_is_no_criterion",
        rejection,
        "self.statistic != 'k1' || self.over != 'sequenceMax'",
        "the largest k1 of a sequence says nothing about small ratios; use k2 or k3 with sequenceMax",
        ".over",
    )
    yield Check(
        "rejections_differ",
        CORRECTION,
        "!has(self.rejection) || self.rejection.all(r, "
        "self.rejection.filter(s, s.statistic == r.statistic && s.over == r.over).size() == 1)",
        "a statistic is there twice over the same; keep one of them",
        ".rejection",
    )
    yield Check(
        "limits_limit_something",
        (*CORRECTION, "limits"),
        "has(self.kl) || has(self.effectiveSampleSize) || has(self.chiSquare)",
        "give one of kl, effectiveSampleSize and chiSquare",
    )
    yield Check(
        "interpolation_belongs_to_decoupled",
        CORRECTION,
        "!has(self.proximal) || self.proximal != 'interpolated' || (has(self.mode) ? self.mode == 'decoupled' : "
        "has(self.preset) && !self.preset.startsWith('bypass'))",
        "needs mode: decoupled",
        ".proximal",
    )
    yield Check(
        "interpolation_is_made_in_the_loss",
        CORRECTION,
        "!has(self.proximal) || self.proximal != 'interpolated' || !has(self.weights) || !self.weights.normalize",
        "the weights of a batch are not known before its update; use recomputed, or remove weights.normalize",
        ".proximal",
    )
    yield Check(
        "interpolation_is_made_in_the_loss",
        ALGORITHM,
        "!has(self.rolloutCorrection.proximal) || self.rolloutCorrection.proximal != 'interpolated' || "
        f"!{cel.loss_in('self', ['clipCov', 'klCov'])}",
        "clipCov and klCov choose their tokens before pi_old is made; use recomputed",
        ".rolloutCorrection.proximal",
    )
    weighted = ", ".join(text(name) for name, preset in CORRECTION_PRESETS.items() if preset.weights)
    yield Check(
        "correction_can_be_switched_on",
        CORRECTION,
        "!has(self.limits) || self.limits.action != 'correct' || "
        "!(has(self.mode) ? self.mode == 'decoupled' : has(self.preset) && !self.preset.startsWith('bypass')) || "
        f"!(has(self.weights) || has(self.preset) && self.preset in [{weighted}])",
        "correct has nothing to switch on: mode decoupled has weights already; use warn or rollBack",
        ".limits.action",
    )
    yield Check(
        "correction_can_be_switched_on",
        ALGORITHM,
        "!has(self.rolloutCorrection.limits) || self.rolloutCorrection.limits.action != 'correct' || "
        f"!{cel.loss_in('self', cel.BYPASSING)}",
        "the loss stays with mode bypass, so that correct cannot leave it; use warn or rollBack",
        ".rolloutCorrection.limits.action",
    )
