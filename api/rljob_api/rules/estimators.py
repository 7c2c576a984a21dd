"""Rules about what reaches the estimator: KL in the reward, rewards, and the groups that are kept."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.presets import Preset
from rljob_api.rules import cel
from rljob_api.rules.cel import ALGORITHM, SPEC, Cel, given
from rljob_api.rules.registry import Job, rule
from rljob_api.spec.algorithm import KlControllerSpec
from rljob_api.spec.reward import RewardFunction
from rljob_api.violations import Violation


def _has_kl_in_reward(preset: Preset) -> bool:
    term = preset.algorithm.kl.in_reward
    return term is not None and bool(term.coefficient)


@rule(
    cel=Cel(
        ALGORITHM,
        "!has(self.kl.inReward) || !has(self.kl.inReward.controller) || "
        "self.kl.inReward.controller.type != 'adaptive' || (has(self.kl.inReward.coefficient) ? "
        f"self.kl.inReward.coefficient > 0.0 : {cel.preset_in('self', _has_kl_in_reward)})",
        "is 0, and an adaptive controller can never change that; give it a start value, for example 0.001",
        ".kl.inReward.coefficient",
    )
)
def controller_needs_a_coefficient(job: Job) -> Iterator[Violation]:
    given, term = job.spec.algorithm.kl.in_reward, job.resolved.algorithm.kl.in_reward
    if given is not None and given.controller is not None and given.controller.type == "adaptive" and term is None:
        yield Violation(
            "spec.algorithm.kl.inReward.coefficient",
            "is 0, and an adaptive controller can never change that",
            "give it a start value, for example 0.001",
        )


_FIXED = KlControllerSpec()


@rule(
    cel=Cel(
        (*ALGORITHM, "kl", "inReward", "controller"),
        f"self.type == 'adaptive' || (self.target == {_FIXED.target} && self.horizon == {_FIXED.horizon})",
        "target and horizon have no effect with type: fixed; set type: adaptive, or remove them",
    )
)
def target_belongs_to_an_adaptive_controller(job: Job) -> Iterator[Violation]:
    given = job.spec.algorithm.kl.in_reward
    if given is None or given.controller is None or given.controller.type == "adaptive":
        return
    fixed = KlControllerSpec()
    if (given.controller.target, given.controller.horizon) != (fixed.target, fixed.horizon):
        yield Violation(
            "spec.algorithm.kl.inReward.controller",
            "its target and horizon have no effect with type: fixed",
            "set type: adaptive, or remove them",
        )


@rule(
    cel=Cel(
        SPEC,
        "[self.algorithm.kl].all(c, !has(c.inReward) || !has(c.inReward.controller) || "
        f"c.inReward.controller.type == 'fixed' || {cel.UPDATE} * {cel.SAMPLES} <= c.inReward.controller.horizon)",
        "is less than the samples of a batch",
        ".algorithm.kl.inReward.controller.horizon",
    )
)
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
            f"{term.controller.horizon} is less than the {samples} samples between two updates of the coefficient",
            f"use {samples} or more (10 to 100 times as much is usual)",
        )


@rule(
    cel=Cel(
        ALGORITHM,
        f"!{cel.estimator_in('self', ['maxrl', 'gdpo'])} || (has(self.kl.inReward) && has(self.kl.inReward.coefficient)"
        f" ? self.kl.inReward.coefficient == 0.0 : !({cel.preset_in('self', _has_kl_in_reward)}))",
        "maxrl and gdpo allow no KL penalty in the reward; set coefficient: 0",
        ".kl.inReward",
    )
)
def estimator_takes_a_penalty(job: Job) -> Iterator[Violation]:
    algorithm = job.resolved.algorithm
    reasons = {
        "maxrl": "maxrl divides by a group's mean reward, which a KL penalty in the reward can make 0 or negative",
        "gdpo": "gdpo normalises each reward function separately, and a KL penalty in the reward is not one of them",
    }
    if algorithm.advantage.estimator in reasons and algorithm.kl.in_reward is not None:
        yield Violation(
            "spec.algorithm.kl.inReward",
            reasons[algorithm.advantage.estimator],
            "set coefficient: 0 and use kl.inLoss, or another estimator",
        )


@rule(
    cel=Cel(
        SPEC,
        f"!self.reward.normalize || !{cel.estimator_in('self.algorithm', ['maxrl', 'gdpo', 'remax'])}",
        "maxrl, gdpo and remax need unnormalised rewards; remove it",
        ".reward.normalize",
    )
)
def estimator_takes_normalised_rewards(job: Job) -> Iterator[Violation]:
    estimator = job.resolved.algorithm.advantage.estimator
    reasons = {
        "maxrl": "maxrl divides by a group's mean reward, but normalised rewards have mean 0",
        "gdpo": "gdpo normalises each reward function separately",
        "remax": "remax subtracts the greedy response's reward, which is not normalised",
    }
    if estimator in reasons and job.spec.reward.normalize:
        yield Violation("spec.reward.normalize", reasons[estimator], "remove it, or use another estimator")


def _divides_by_rewards(job: Job) -> bool:
    """Whether maxrl meets rewards as they are: no clip keeps them from being negative."""
    clip = job.spec.reward.clip
    return job.resolved.algorithm.advantage.estimator == "maxrl" and not (clip and clip.low >= 0)


_DIVIDES = "maxrl divides by a group's mean reward and rejects negative rewards"
_CLIP = "set spec.reward.clip: {low: 0, high: ...}, or use another estimator"
_TAKES_NEGATIVE = (
    f"!{cel.estimator_in('self.algorithm', ['maxrl'])} || has(self.reward.clip) && self.reward.clip.low >= 0.0 || "
)


@rule(
    cel=[
        Cel(
            SPEC,
            _TAKES_NEGATIVE + condition,
            "maxrl rejects negative rewards; remove it, or set reward.clip with low: 0",
            place,
        )
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
        )
    ]
)
def estimator_takes_no_negative_rewards(job: Job) -> Iterator[Violation]:
    """What a custom function returns is not known; other terms are 0 where a response is wrong."""
    if not _divides_by_rewards(job):
        return
    reward, truncated = job.spec.reward, job.resolved.algorithm.truncated
    if reward.overlong:
        yield Violation("spec.reward.overlong", f"{_DIVIDES}, as those of long responses would be", _CLIP)
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


def _parameter(function: RewardFunction, name: str, default: float) -> float:
    """A parameter that is a number; what it is instead is said where functions are checked."""
    given = function.params.get(name, default)
    return given if isinstance(given, int | float) else default


@rule(not_in_cel="the content of params is hidden from CEL")
def estimator_takes_no_negative_terms(job: Job) -> Iterator[Violation]:
    """What ``estimator_takes_no_negative_rewards`` says, about parameters of the reward functions."""
    if not _divides_by_rewards(job):
        return
    longest = job.resolved.rollout.max_response_tokens
    for index, function in enumerate(job.spec.reward.functions):
        path = f"spec.reward.functions[{index}].params"
        if function.type == "length" and _parameter(function, "freeTokens", 0) < longest:
            slope = _parameter(function, "coefficient", -0.001)
            if function.weight * slope < 0:
                yield Violation(
                    f"{path}.coefficient", f"{slope:g}: {_DIVIDES}, as those of long responses would be", _CLIP
                )
        elif function.type == "gsm8k" and (score := _parameter(function, "formatScore", 0)) < 0 < function.weight:
            yield Violation(f"{path}.formatScore", f"{score:g}: {_DIVIDES}", f"use 0, or {_CLIP}")


@rule(
    cel=[
        Cel(
            SPEC,
            f"!has(self.reward.clip) || !{cel.estimator_in('self.algorithm', ['gdpo'])}",
            "gdpo uses each reward function separately; remove it",
            ".reward.clip",
        ),
        Cel(
            ALGORITHM,
            f"!has(self.truncated.reward) || self.truncated.reward == 'keep' || !{cel.estimator_in('self', ['gdpo'])}",
            "gdpo uses each reward function separately; use truncated.mask",
            ".truncated.reward",
        ),
    ]
)
def gdpo_sees_parts_alone(job: Job) -> Iterator[Violation]:
    algorithm, why = job.resolved.algorithm, "gdpo uses each reward function separately, not their sum"
    if algorithm.advantage.estimator != "gdpo":
        return
    if job.spec.reward.clip:
        yield Violation("spec.reward.clip", why, "remove it, or use another estimator")
    if algorithm.truncated.reward == "replace":
        yield Violation("spec.algorithm.truncated.reward", why, "use truncated.mask, or another estimator")


@rule(
    cel=Cel(
        ALGORITHM,
        f"!has(self.resampling) || {cel.estimator_in('self', cel.WITH_CRITIC)}",
        "applies only to the estimator gae; remove it",
        ".resampling",
    )
)
def resampling_belongs_to_gae(job: Job) -> Iterator[Violation]:
    if job.spec.algorithm.resampling is not None and not job.estimator.needs_critic:
        yield Violation(
            "spec.algorithm.resampling",
            "weights samples by their own reward, which a comparison within groups already accounts for",
            "remove it, or use advantage.estimator: gae (preset ppo)",
        )


@rule(
    cel=Cel(
        ALGORITHM,
        "!has(self.entropyTarget) || !has(self.entropyCoefficient) || "
        "self.entropyCoefficient <= self.entropyTarget.maximum",
        "is above entropyTarget.maximum; lower it",
        ".entropyCoefficient",
    )
)
def entropy_target_has_room(job: Job) -> Iterator[Violation]:
    given = job.spec.algorithm
    start, target = given.entropy_coefficient, given.entropy_target
    if start is not None and target is not None and start > target.maximum:
        yield Violation(
            "spec.algorithm.entropyCoefficient",
            f"{start:g} is above entropyTarget.maximum = {target.maximum:g}",
            "lower it, or raise the maximum",
        )


@rule(
    cel=Cel(
        SPEC,
        f"!{cel.estimator_in('self.algorithm', ['gdpo'])} || size(self.reward.functions) > 1",
        "gdpo normalises each reward function separately; add another, or use the estimator grpo",
        ".reward.functions",
    )
)
def gdpo_needs_several_rewards(job: Job) -> Iterator[Violation]:
    if job.resolved.algorithm.advantage.estimator == "gdpo" and len(job.spec.reward.functions) < 2:
        yield Violation(
            "spec.reward.functions",
            "gdpo normalises each reward function separately, but there is only one",
            "add another, or use the estimator grpo",
        )


def _drops_uniform_in(algorithm: str) -> str:
    """CEL: whether uniform groups are dropped."""
    by_preset = cel.preset_in(algorithm, lambda preset: bool(preset.algorithm.group_filter.drop_uniform))
    return given(f"{algorithm}.groupFilter.dropUniform", by_preset)


@rule(
    cel=Cel(
        SPEC,
        f"!{_drops_uniform_in('self.algorithm')} || {cel.SAMPLES} >= 2",
        "a group of one sample is always uniform and would be dropped; set batch.samplesPerPrompt to 2 or more",
        ".algorithm.groupFilter.dropUniform",
    )
)
def filter_needs_groups(job: Job) -> Iterator[Violation]:
    if job.resolved.algorithm.group_filter.drop_uniform and job.resolved.batch.samples_per_prompt < 2:
        yield Violation(
            "spec.algorithm.groupFilter.dropUniform",
            "a group of one sample is always uniform and would be dropped",
            "set batch.samplesPerPrompt to 2 or more, or dropUniform: false",
        )


@rule(
    cel=Cel(
        ALGORITHM,
        f"!has(self.groupFilter.maxBatches) || {_drops_uniform_in('self')}",
        "has no effect without dropUniform; set dropUniform: true, or remove it",
        ".groupFilter.maxBatches",
    )
)
def filter_limit_belongs_to_the_filter(job: Job) -> Iterator[Violation]:
    if job.spec.algorithm.group_filter.max_batches is not None and not job.resolved.algorithm.group_filter.drop_uniform:
        yield Violation(
            "spec.algorithm.groupFilter.maxBatches",
            "has no effect without dropUniform",
            "set dropUniform: true, or remove it",
        )
