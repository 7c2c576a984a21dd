"""The rules of ``rljob_api.rules`` in CEL, so that ``kubectl apply`` refuses what ``rljob validate`` refuses.

Each entry names the rule that it expresses. Rules that CEL cannot express are listed with the reason in ``NOT_IN_CEL``;
they become the condition Accepted=False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.alias_generators import to_camel

from rljob_api.crd import expressions as cel
from rljob_api.crd.expressions import given, one_of
from rljob_api.crd.structural import Path, text
from rljob_api.methods import ESTIMATOR_PARAMETERS, ESTIMATORS, POLICY_LOSS_PARAMETERS, POLICY_LOSSES, Method
from rljob_api.presets import Preset
from rljob_api.rules.algorithm import RATIO_CLIPS, WITHOUT_RATIO
from rljob_api.rules.data import NEEDS_ANSWER, SMALLEST_VLLM_HEAD
from rljob_api.rules.lifecycle import SCHEMES
from rljob_api.rules.naming import RESERVED_NAMES
from rljob_api.rules.pods import RESERVED_DOMAINS, RESERVED_MOUNTS
from rljob_api.rules.pools import RESERVED_ENV

NOT_IN_CEL: Mapping[str, str] = {
    "tokenizer_characters_differ": "CEL cannot take text apart into characters at a bounded cost",
    "prompt_template_is_well_formed": "needs a parser of templates",
    "patterns_compile": "Python's regular expressions are not CEL's",
    "reward_sources_exist": "the default names of sources are made from paths",
    "every_source_has_a_reward": "the default names of sources are made from paths",
    "engine_args_are_for_vllm": "the content of engineArgs is hidden from CEL",
    "engine_args_exist": "the content of engineArgs is hidden from CEL",
    "engine_args_leave_ours_alone": "the content of engineArgs is hidden from CEL",
    "volumes_have_names": "the content of volumes is hidden from CEL",
    "mounts_have_volumes": "the content of volumes is hidden from CEL",
    "templates_leave_ray_alone": "the content of the template is hidden from CEL",
    "variables_differ": "the list is a map by name: the API server itself refuses duplicates",
    "validation_names_differ": "the list is a map by name: the API server itself refuses duplicates",
    "name_leaves_room_for_children": "bounds of metadata.name stand in the schema",
    "name_is_a_dns_label": "bounds of metadata.name stand in the schema",
}


@dataclass(frozen=True)
class Check:
    """One CEL validation: which rule it expresses, where it stands, and the field that it blames."""

    rule: str
    at: Path
    expression: str
    message: str
    field: str = ""
    """Relative to ``at``, with a leading point; empty: ``at`` itself."""


ROOT: Path = ()
SPEC: Path = ("spec",)
MODEL: Path = ("spec", "model")
RANDOM: Path = (*MODEL, "random")
TRAIN: Path = ("spec", "data", "train")
VALIDATION: Path = ("spec", "data", "validation", "[]")
REWARD: Path = ("spec", "reward")
FUNCTION: Path = (*REWARD, "functions", "[]")
ALGORITHM: Path = ("spec", "algorithm")
CORRECTION: Path = (*ALGORITHM, "rolloutCorrection")
TRAINER: Path = ("spec", "trainer")
PODS: tuple[Path, ...] = (("spec", "rollout", "pod"), ("spec", "trainer", "pod"), ("spec", "head", "pod"))


_Family = tuple[str, str, frozenset[str], Mapping[Any, Method], Callable[[str, Iterable[str]], str]]


def _has_kl_in_reward(preset: Preset) -> bool:
    term = preset.algorithm.kl.in_reward
    return term is not None and bool(term.coefficient)


def _drops_uniform(preset: Preset) -> bool:
    return bool(preset.algorithm.group_filter.drop_uniform)


def _exactly_one(*fields: str) -> str:
    listed = ", ".join(f"has({field})" for field in fields)
    return f"[{listed}].filter(x, x).size() == 1"


def checks() -> Iterator[Check]:
    """All validations, in the order of the rules."""
    yield from _model()
    yield from _data()
    yield from _reward()
    yield from _method_parameters()
    yield from _algorithm()
    yield from _correction()
    yield from _pipeline()
    yield from _stop()
    yield from _pools()
    yield from _pods()
    yield from _lifecycle()


def _model() -> Iterator[Check]:
    yield Check(
        "model_is_source_or_random",
        MODEL,
        "has(self.source) != has(self.random)",
        "needs exactly one of source and random",
    )
    for name in ("revision", "tokenizer"):
        yield Check(
            "random_model_has_no_source_settings",
            MODEL,
            f"!has(self.random) || !has(self.{name})",
            "has no meaning for a random model; remove it",
            f".{name}",
        )
    yield Check(
        "random_tokenizer_is_characters_or_source",
        (*RANDOM, "tokenizer"),
        "has(self.characters) != has(self.source)",
        "needs exactly one of characters and source",
    )
    yield Check(
        "heads_divide_hidden_size",
        RANDOM,
        "self.hiddenSize % self.heads == 0",
        "must divide hiddenSize; choose heads that divide it",
        ".heads",
    )
    yield Check(
        "kv_heads_divide_heads",
        RANDOM,
        "!has(self.kvHeads) || self.heads % self.kvHeads == 0",
        "must divide heads; choose a divisor",
        ".kvHeads",
    )
    yield Check(
        "vllm_needs_wide_heads",
        SPEC,
        "!has(self.model.random) || self.rollout.engine != 'vllm' || "
        f"self.model.random.hiddenSize >= {SMALLEST_VLLM_HEAD} * self.model.random.heads",
        f"hiddenSize / heads must be {SMALLEST_VLLM_HEAD} or more for vLLM; use fewer heads or rollout.engine: torch",
        ".model.random.heads",
    )
    yield Check(
        "lengths_fit_the_random_models_context",
        SPEC,
        "!has(self.model.random) || "
        "self.data.maxPromptTokens + self.rollout.maxResponseTokens <= self.model.random.contextLength",
        "is less than data.maxPromptTokens + rollout.maxResponseTokens; raise it, or lower one of the two",
        ".model.random.contextLength",
    )
    yield Check(
        "validation_lengths_fit_the_random_models_context",
        SPEC,
        "!has(self.model.random) || !has(self.data.validation) || self.data.validation.all(v, "
        "!has(v.sampling.maxResponseTokens) || "
        "self.data.maxPromptTokens + v.sampling.maxResponseTokens <= self.model.random.contextLength)",
        "sampling.maxResponseTokens and data.maxPromptTokens together exceed the model's context; lower one of them",
        ".data.validation",
    )


def _data() -> Iterator[Check]:
    yield Check(
        "training_data_has_one_origin",
        TRAIN,
        "[has(self.source), has(self.task), has(self.parts) && size(self.parts) > 0].filter(x, x).size() == 1",
        "needs exactly one of source, task and parts",
    )
    part: Path = (*TRAIN, "parts", "[]")
    for at in (part, VALIDATION):
        rule = "training_data_has_one_origin" if at == part else "validation_sets_have_one_origin"
        yield Check(rule, at, "has(self.source) != has(self.task)", "needs exactly one of source and task")
    yield Check(
        "parts_have_names",
        part,
        "has(self.name)",
        "is required for each of several parts; give the part a name",
        ".name",
    )
    yield Check(
        "parts_have_names",
        TRAIN,
        "!has(self.parts) || self.parts.all(p, !has(p.name) || "
        "self.parts.filter(q, has(q.name) && q.name == p.name).size() == 1)",
        "two parts have the same name; give each its own",
        ".parts",
    )
    for name in ("name", "split", "limit"):
        yield Check(
            "parts_stand_alone",
            TRAIN,
            f"!has(self.parts) || size(self.parts) == 0 || !has(self.{name})",
            "has no meaning beside parts; set it on the parts",
            f".{name}",
        )
    for at in (TRAIN, part, VALIDATION):
        yield Check(
            "tasks_have_no_split",
            at,
            "!has(self.task) || !has(self.split)",
            "a generated task has no splits; remove it",
            ".split",
        )
        # The largest size a job may ask for is 1e8, so larger powers need not be known.
        copies = [10**digits for digits in range(9)]
        additions = [0, 100, *((9 * 10 ** (digits - 1)) ** 2 for digits in range(2, 5))]
        yield Check(
            "tasks_have_enough_problems",
            (*at, "task"),
            f"!has(self.size) || (self.type == 'copy' ? "
            f"self.digits >= {len(copies)} || self.size <= {copies}[self.digits] : "
            f"self.digits >= {len(additions)} || self.size <= {additions}[self.digits])",
            "there are fewer different problems; lower size, or raise digits",
            ".size",
        )
    yield Check(
        "greedy_validation_takes_one_sample",
        VALIDATION,
        "self.samplesPerPrompt == 1 || self.sampling.temperature > 0.0",
        "several samples at temperature 0 are all the same; set sampling.temperature above 0",
        ".samplesPerPrompt",
    )
    yield Check(
        "answers_are_there_for_rewards_that_compare",
        SPEC,
        f"has(self.data.answer) || !self.reward.functions.exists(f, f.type in {one_of(NEEDS_ANSWER)}) || "
        "has(self.data.train.task) || (has(self.data.train.parts) && size(self.data.train.parts) > 0 && "
        "self.data.train.parts.all(p, has(p.task)))",
        "is required by a reward function that compares; name the column with the reference answer",
        ".data.answer",
    )


def _reward() -> Iterator[Check]:
    # `function` is a reserved word of CEL; Kubernetes escapes it.
    yield Check(
        "custom_rewards_name_a_function",
        FUNCTION,
        "(self.type == 'custom') == has(self.__function__)",
        "belongs to type custom, which needs it; write module:function",
        ".function",
    )
    yield Check(
        "pattern_rewards_have_a_pattern",
        FUNCTION,
        "(self.type == 'pattern') == has(self.pattern)",
        "belongs to type pattern, which needs it; write a regular expression",
        ".pattern",
    )
    name = "(has({0}.name) ? {0}.name : {0}.type)"
    yield Check(
        "reward_names_differ",
        REWARD,
        f"self.functions.all(f, self.functions.filter(g, {name.format('g')} == {name.format('f')}).size() == 1)",
        "two functions have the same name (or, without names, the same type); give each its own name",
        ".functions",
    )
    yield Check(
        "some_reward_counts",
        REWARD,
        "self.functions.exists(f, f.weight != 0.0)",
        "all weights are 0, so every sample scores 0; give one a weight",
        ".functions",
    )
    yield Check(
        "overlong_buffer_is_shorter_than_the_response",
        SPEC,
        "!has(self.reward.overlong) || self.reward.overlong.bufferTokens < self.rollout.maxResponseTokens",
        "must be less than rollout.maxResponseTokens; lower it (a fifth is usual)",
        ".reward.overlong.bufferTokens",
    )
    yield Check(
        "error_score_belongs_to_on_error_score",
        REWARD,
        "self.errorScore == 0.0 || self.onError == 'score'",
        "has no meaning without onError: score; set that, or remove it",
        ".errorScore",
    )


def _method_parameters() -> Iterator[Check]:
    """Which method takes which parameter."""
    advantage = "advantage_parameters_belong_to_the_estimator"
    loss = "loss_parameters_belong_to_the_loss"
    families: tuple[_Family, ...] = (
        ("advantage", advantage, ESTIMATOR_PARAMETERS, ESTIMATORS, cel.estimator_in),
        ("policyLoss", loss, POLICY_LOSS_PARAMETERS, POLICY_LOSSES, cel.loss_in),
    )
    for section, rule, parameters, methods, chosen_in in families:
        for parameter in sorted(parameters):
            field = to_camel(parameter.rstrip("_"))
            takers = cel.takers(parameter, methods)
            yield Check(
                rule,
                ALGORITHM,
                f"!has(self.{section}.{field}) || {chosen_in('self', takers)}",
                f"is a parameter of {', '.join(takers)} only; remove it",
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
        f"!{cel.loss_in('self', cel.takers('dual_clip', POLICY_LOSSES))} || {dual} <= 1.0 || {dual} > 1.0 + {high}",
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
    for name, is_there in (
        ("weights", "has(self.algorithm.rolloutCorrection.weights)"),
        (
            "rejection",
            "(has(self.algorithm.rolloutCorrection.rejection) && size(self.algorithm.rolloutCorrection.rejection) > 0)",
        ),
    ):
        yield Check(
            "correction_needs_a_mode",
            SPEC,
            f"!{is_there} || !{cel.IS_WITHOUT_CORRECTION}",
            "has no meaning with mode none; set mode: decoupled (or bypass), or remove it",
            f".algorithm.rolloutCorrection.{name}",
        )
    yield Check(
        "weights_differ_from_one",
        SPEC,
        f"!has(self.algorithm.rolloutCorrection.weights) || !{cel.IS_BYPASS} || "
        f"{cel.loss_in('self.algorithm', WITHOUT_RATIO)}",
        "with mode bypass the loss's ratio is already the importance weight; remove it, or set mode: decoupled",
        ".algorithm.rolloutCorrection.weights",
    )
    yield Check(
        "bypass_losses_need_bypass",
        SPEC,
        f"!{cel.loss_in('self.algorithm', cel.BYPASSING)} || {cel.IS_BYPASS}",
        "the loss needs mode bypass; set it, or another policyLoss.type",
        ".algorithm.rolloutCorrection.mode",
    )
    yield Check(
        "weight_bounds_are_a_range",
        weights,
        "!has(self.low) || self.low < self.high",
        "must be below high; lower it, or raise high",
        ".low",
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


def _pipeline() -> Iterator[Check]:
    yield Check(
        "mini_batches_fill_the_batch",
        SPEC,
        f"{cel.IS_ASYNC} || {cel.GROUPS} % {cel.MINI} == 0",
        "must divide groups (128 unless set); choose a divisor",
        ".batch.miniBatchGroups",
    )
    yield Check(
        "async_groups_follow_from_the_pulls",
        SPEC,
        f"!({cel.IS_ASYNC}) || !has(self.batch.groups) || self.batch.groups == {cel.PULL}",
        "differs from syncEvery x requireBatches x miniBatchGroups; leave it out",
        ".batch.groups",
    )
    yield Check(
        "every_rank_gets_a_sequence",
        SPEC,
        f"{cel.MINI} * {cel.SAMPLES} >= self.trainer.parallelism.replicate * {cel.shards('self.trainer')}",
        "a mini-batch has fewer sequences than there are trainer ranks; raise miniBatchGroups or samplesPerPrompt",
        ".batch.miniBatchGroups",
    )
    for field in ("syncEvery", "requireBatches", "staleness.maxAge", "staleness.fraction", "partialRollout"):
        yield Check(
            "async_settings_belong_to_fully_async",
            ("spec", "pipeline"),
            f"self.mode == 'fullyAsync' || !has(self.{field})",
            "has a meaning in mode fullyAsync only; remove it, or set that mode",
            f".{field}",
        )
    yield Check(
        "partial_rollout_needs_age",
        SPEC,
        f"!({cel.IS_ASYNC}) || !has(self.pipeline.partialRollout) || self.pipeline.partialRollout == 'none' || "
        f"{cel.MAX_AGE} > 0",
        "a response that goes on under new weights is at least one version old; raise staleness.maxAge",
        ".pipeline.partialRollout",
    )
    yield Check(
        "sample_budget_needs_age",
        ("spec", "pipeline", "staleness"),
        "!has(self.fraction) || self.fraction == 0.0 || !has(self.maxAge) || self.maxAge > 0",
        "samples ahead of the trainer are at least one version old; raise maxAge, or remove fraction",
        ".fraction",
    )


def _stop() -> Iterator[Check]:
    fields = ("steps", "epochs", "samples", "reward", "seconds")
    yield Check(
        "training_ends",
        ("spec", "stop"),
        " || ".join(f"has(self.{field})" for field in fields),
        "names no condition; set steps, epochs, samples, reward or seconds",
    )
    yield Check(
        "schedules_know_the_last_step",
        SPEC,
        f"self.trainer.optimizer.schedule == 'constant' || {cel.STEPS_GIVEN}",
        "stop.steps is required by a schedule that falls until the last step; set it, or use schedule: constant",
        ".stop",
    )
    yield Check(
        "least_rate_belongs_to_a_falling_schedule",
        (*TRAINER, "optimizer"),
        "self.minLearningRateRatio == 0.0 || self.schedule != 'constant'",
        "has no meaning with schedule: constant; set cosine or linear, or remove it",
        ".minLearningRateRatio",
    )
    yield Check(
        "warmup_ends_before_training",
        SPEC,
        f"!{cel.STEPS_GIVEN} || self.trainer.optimizer.warmupSteps == 0 || "
        "self.trainer.optimizer.warmupSteps < self.stop.steps",
        "the warm-up does not end before stop.steps; lower it, or raise stop.steps",
        ".trainer.optimizer.warmupSteps",
    )
    yield Check(
        "critic_warmup_ends_before_training",
        SPEC,
        f"!{cel.STEPS_GIVEN} || !has(self.algorithm.critic) || !has(self.algorithm.critic.warmupSteps) || "
        f"!{cel.estimator_in('self.algorithm', cel.WITH_CRITIC)} || "
        "self.algorithm.critic.warmupSteps < self.stop.steps",
        "in all steps only the critic would learn; lower it, or raise stop.steps",
        ".algorithm.critic.warmupSteps",
    )
    yield Check(
        "stop_comes_before_the_deadline",
        SPEC,
        "!has(self.stop) || !has(self.stop.seconds) || !has(self.deadlines.runSeconds) || "
        "self.stop.seconds < self.deadlines.runSeconds",
        "must be less than deadlines.runSeconds, or the job fails instead of ending; lower it",
        ".stop.seconds",
    )


def _pools() -> Iterator[Check]:
    colocated = "colocated engines take the trainer's devices and have no pool of their own; remove it"
    for field in ("replicas", "minReplicas", "maxReplicas"):
        yield Check(
            "colocated_engines_are_sized_by_the_trainer",
            SPEC,
            f"!{cel.IS_COLOCATED} || !has(self.rollout.{field})",
            colocated,
            f".rollout.{field}",
        )
    yield Check(
        "colocated_engines_are_sized_by_the_trainer",
        SPEC,
        f"!{cel.IS_COLOCATED} || self.rollout.gpusPerReplica == 0",
        colocated,
        ".rollout.gpusPerReplica",
    )
    yield Check(
        "colocated_engines_need_turns",
        SPEC,
        "!has(self.placement) || self.placement != 'colocated' || self.pipeline.mode == 'sync'",
        "colocated engines and trainer take turns, which only mode sync does; set placement: separate",
        ".placement",
    )
    engine = "(self.rollout.parallelism.tensor * self.rollout.parallelism.pipeline)"
    yield Check(
        "colocated_engines_fill_the_ranks",
        SPEC,
        f"!{cel.IS_COLOCATED} || self.trainer.gpusPerReplica == 0 || {cel.ranks('self.trainer')} % {engine} == 0",
        "tensor x pipeline must divide the trainer's GPUs; choose a divisor",
        ".rollout.parallelism",
    )
    yield Check(
        "engine_parallelism_fits_its_gpus",
        SPEC,
        f"{cel.IS_COLOCATED} || self.rollout.gpusPerReplica == 0 || self.rollout.gpusPerReplica == {engine}",
        "tensor x pipeline must equal gpusPerReplica; change one of them",
        ".rollout.parallelism",
    )
    for field, sign, remedy in (
        ("minReplicas", "<=", "is more than replicas; lower it, or raise replicas"),
        ("maxReplicas", ">=", "is less than replicas; raise it, or lower replicas"),
    ):
        yield Check(
            "replicas_lie_between_least_and_most",
            SPEC,
            f"{cel.IS_COLOCATED} || !has(self.rollout.{field}) || self.rollout.{field} {sign} {cel.REPLICAS}",
            remedy,
            f".rollout.{field}",
        )
    yield Check(
        "hosts_share_the_gpus_evenly",
        ("spec", "rollout"),
        "self.hostsPerReplica == 1 || (self.gpusPerReplica > 0 && self.gpusPerReplica % self.hostsPerReplica == 0)",
        "must divide gpusPerReplica; choose a divisor",
        ".hostsPerReplica",
    )
    for field in ("parallelism.tensor", "parallelism.pipeline", "hostsPerReplica"):
        yield Check(
            "torch_engine_runs_on_one_device",
            ("spec", "rollout"),
            f"self.engine != 'torch' || self.{field} == 1",
            "the torch engine runs on one device; set it to 1, or use engine: vllm",
            f".{field}",
        )
    for field, value in (("topP", "1.0"), ("topK", "0")):
        yield Check(
            "training_samples_from_the_whole_distribution",
            ("spec", "rollout", "sampling"),
            f"self.{field} == {value}",
            f"training on a cut distribution needs its renormalisation; leave it at {value}",
            f".{field}",
        )
    ways = "self.parallelism"
    yield Check(
        "trainer_parallelism_fits_its_ranks",
        TRAINER,
        f"{ways}.replicate * {cel.shards('self')} * {ways}.sequence * {ways}.tensor == {cel.ranks('self')}",
        "replicate x shard x sequence x tensor must equal the ranks (replicas x gpusPerReplica); shard may be left out",
        ".parallelism",
    )
    yield Check(
        "tensor_parallel_ranks_share_a_replica",
        TRAINER,
        f"self.gpusPerReplica == 0 || self.gpusPerReplica % {ways}.tensor == 0",
        "must divide gpusPerReplica, or a layer would span two pods; choose a divisor",
        ".parallelism.tensor",
    )
    message = "is set by rljob or Ray themselves; remove it"
    for pool in ("rollout", "trainer"):
        yield Check(
            "environment_leaves_ours_alone",
            ("spec", pool),
            f"!has(self.env) || self.env.all(k, {_free_name('k')})",
            f"a variable {message}",
            ".env",
        )
        yield Check(
            "variables_are_set_in_one_place",
            ("spec", pool),
            "!has(self.env) || !has(self.pod.env) || self.pod.env.all(e, !(e.name in self.env))",
            f"a variable is set in spec.{pool}.env too; keep one of them",
            ".pod.env",
        )
    for pod in PODS:
        yield Check("environment_leaves_ours_alone", (*pod, "env", "[]"), _free_name("self.name"), message, ".name")


def _free_name(name: str) -> str:
    prefixes = [taken for taken in RESERVED_ENV if taken.endswith("_")]
    whole = [taken for taken in RESERVED_ENV if not taken.endswith("_")]
    return " && ".join([f"!({name} in {one_of(whole)})", *(f"!{name}.startsWith({text(p)})" for p in prefixes)])


def _pods() -> Iterator[Check]:
    domains = "|".join(domain.replace(".", r"\.") for domain in RESERVED_DOMAINS)
    reserved = text(rf"^([^/]*\.)?({domains})/")
    for pod in PODS:
        variable: Path = (*pod, "env", "[]")
        toleration: Path = (*pod, "tolerations", "[]")
        yield Check(
            "variables_have_one_value",
            variable,
            "!has(self.value) || !has(self.valueFrom)",
            "has value and valueFrom, of which only one can be; keep one of them",
        )
        yield Check(
            "variables_have_one_value",
            (*variable, "valueFrom"),
            _exactly_one("self.secretKeyRef", "self.configMapKeyRef", "self.fieldRef"),
            "needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        )
        taken = " && ".join(
            f"self.mountPath != {text(path)} && !self.mountPath.startsWith({text(path + '/')})"
            for path in RESERVED_MOUNTS
        )
        yield Check(
            "mount_paths_are_free",
            (*pod, "volumeMounts", "[]"),
            taken,
            "is used by rljob or Ray themselves; use another path (for /dev/shm: pod.sharedMemory)",
            ".mountPath",
        )
        yield Check(
            "mount_paths_are_free",
            pod,
            "!has(self.volumeMounts) || self.volumeMounts.all(m, "
            "self.volumeMounts.filter(n, n.mountPath == m.mountPath || n.mountPath + '/' == m.mountPath || "
            "n.mountPath == m.mountPath + '/').size() == 1)",
            "two volumes are mounted at the same path; use another path",
            ".volumeMounts",
        )
        yield Check(
            "tolerations_are_complete",
            toleration,
            "self.operator != 'Exists' || !has(self.value) || self.value == ''",
            "has no meaning with operator Exists; remove it",
            ".value",
        )
        yield Check(
            "tolerations_are_complete",
            toleration,
            "self.operator != 'Equal' || (has(self.key) && self.key != '')",
            "is required by operator Equal; add it, or use operator: Exists",
            ".key",
        )
        yield Check(
            "tolerations_are_complete",
            toleration,
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "has a meaning for effect NoExecute only; set that",
            ".tolerationSeconds",
        )
        for kind in ("requests", "limits"):
            yield Check(
                "gpus_are_counted_once",
                pod,
                f"!has(self.resources.{kind}) || !(self.gpuResource in self.resources.{kind})",
                "GPUs are counted by gpusPerReplica (the head uses none); remove them here",
                f".resources.{kind}",
            )
        for kind in ("labels", "annotations"):
            yield Check(
                "own_labels_have_own_domains",
                pod,
                f"!has(self.{kind}) || self.{kind}.all(k, !k.matches({reserved}))",
                f"the domains {', '.join(RESERVED_DOMAINS)} are reserved; use a domain of your own",
                f".{kind}",
            )
        yield Check(
            "topology_needs_a_queue",
            SPEC,
            f"has(self.queueName) || !has(self.{'.'.join(pod[1:])}.topology)",
            "is Kueue's, but the job has no queue; set spec.queueName, or use affinity",
            f".{'.'.join(pod[1:])}.topology",
        )
    code: Path = ("spec", "code", "[]")
    yield Check(
        "code_has_one_origin", code, "has(self.configMap) != has(self.pvc)", "needs exactly one of configMap and pvc"
    )
    yield Check(
        "code_has_one_origin",
        code,
        "!has(self.path) || has(self.pvc)",
        "has a meaning for pvc only; remove it",
        ".path",
    )
    yield Check(
        "code_is_mounted_once",
        SPEC,
        "!has(self.code) || self.code.all(c, self.code.filter(d, d == c).size() == 1)",
        "the same is there twice; keep one of them",
        ".code",
    )


def _lifecycle() -> Iterator[Check]:
    yield Check(
        "name_is_not_reserved",
        ROOT,
        f"!(self.metadata.name in {one_of(RESERVED_NAMES)})",
        "the name is reserved; choose another",
        ".metadata.name",
    )
    yield Check(
        "validation_has_data",
        SPEC,
        "!has(self.validation.every) || (has(self.data.validation) && size(self.data.validation) > 0)",
        "there is no data to validate on; add data.validation, or remove it",
        ".validation.every",
    )
    known = text(f"^({'|'.join(SCHEMES)})://")
    places: tuple[tuple[Path, str], ...] = (("spec", "checkpoint"), "uri"), (("spec", "restore"), "from")
    for at, field in places:
        value = f"self.{field}"
        yield Check(
            "locations_have_known_schemes",
            at,
            f"!has({value}) || !{value}.matches('^[A-Za-z][A-Za-z0-9+.-]*://') || {value}.matches({known})",
            f"no such storage; use a folder, or {', '.join(scheme + '://' for scheme in SCHEMES)}",
            f".{field}",
        )
    sources = (
        *places,
        (MODEL, "source"),
        (TRAIN, "source"),
        ((*TRAIN, "parts", "[]"), "source"),
        (VALIDATION, "source"),
    )
    for at, field in sources:
        value = f"self.{field}"
        yield Check(
            "volume_locations_name_a_claim",
            at,
            f"!has({value}) || !{value}.startsWith('pvc://') || "
            f"({value}.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/|$)') && !{value}.matches('(^|/)[.][.](/|$)'))",
            "is not a place in a volume; write pvc://claim/path, without ..",
            f".{field}",
        )
    yield Check(
        "backoff_grows",
        ("spec", "retry"),
        "self.backoffSeconds <= self.maxBackoffSeconds",
        "is more than maxBackoffSeconds; lower it, or raise maxBackoffSeconds",
        ".backoffSeconds",
    )
    for field in ("startSeconds", "progressSeconds"):
        yield Check(
            "parts_of_the_run_fit_its_deadline",
            ("spec", "deadlines"),
            f"!has(self.runSeconds) || self.{field} <= self.runSeconds",
            "is more than runSeconds, so it never counts; lower it",
            f".{field}",
        )
