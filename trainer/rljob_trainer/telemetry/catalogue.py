"""Every metric the trainer reports: its name, unit, meaning and how it is reduced.

This is the data; ``names.py`` looks names up and prints ``docs/metrics.md`` from it. Adding a metric means adding a
line here: the sinks refuse names that are not listed. A name is ``family/quantity[/statistic]``; a part in angle
brackets stands for something the job chooses (a data source, a number of samples).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["batch", "mean", "max", "min", "slowest", "sum", "last"]

REDUCTIONS: dict[Reduction, str] = {
    "batch": "computed from the whole batch of a pull; mean over the step's pulls",
    "mean": "mean over the step's optimizer steps",
    "max": "largest over the step's pulls, optimizer steps or processes",
    "min": "smallest over the step's pulls",
    "slowest": "of the step's pull with the slowest sample",
    "sum": "total over the step",
    "last": "the value at the end of the step",
}

STAGES: dict[str, str] = {
    "step": "the whole step, from the first request to the published weights",
    "generate": "waiting for samples while nothing else is done",
    "wait_prev_gen": "oneStepOff: what is left of the generation that began a step before, once the trainer wants it",
    "reward": "waiting for reward functions",
    "score": "the learner's forward passes before the update, when one call makes all streams",
    "old_log_probs": "the proximal policy's log-probs",
    "reference": "the reference policy's log-probs",
    "values": "the critic's values",
    "advantage": "advantages, returns and corrections",
    "update": "the update of actor and critic, when one call does both",
    "update_actor": "the actor's gradients and optimizer steps; one rank on CPUs adds up two threads",
    "update_critic": "the critic's, at the same time there",
    "publish": "gathering, sending and loading the new weights",
    "validation": "the validation set",
    "checkpoint": "writing the checkpoint of the step before",
    "idle": "the learner waiting for a full batch",
    "start": "before the first step: data, model, Ray, ranks and engines",
    "other": "what no stage claims",
}
"""The stages of a run and what each one covers."""

OUTSIDE_STEPS = ("start", "other")
"""Stages that no step's line of metrics has: they are in the shares of time and in ``summary.json``."""

NESTED_STAGES: dict[str, str] = {
    "wait_prev_gen": "generate",
    "old_log_probs": "score",
    "reference": "score",
    "values": "score",
    "update_actor": "update",
    "update_critic": "update",
}
"""Stages that are part of another one where that is reported too; all but ``OUTSIDE_STEPS`` are part of ``step``."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``name`` may contain parts such as ``<source>``; ``unit`` is empty for pure numbers."""

    name: str
    unit: str
    description: str
    reduction: Reduction = "batch"

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]


FAMILIES: dict[str, str] = {
    "progress": "Where the run stands.",
    "reward": "What the reward functions said about the step's samples.",
    "judge": "What a judge was asked for one term of the reward, validation's samples too.",
    "reward_model": "What a reward model computed for one term of the reward, validation's samples too.",
    "advantage": "Per token, over the tokens that are trained on, after whitening.",
    "return": "The critic's targets, per token.",
    "value": "The critic's estimates when the batch was made, per token.",
    "variance": "How much of the policy gradient is signal.",
    "prompt": "Prompts of the step.",
    "response": "Responses of the step.",
    "actor": "The policy's optimizer steps.",
    "critic": "The value model's optimizer steps; absent without a critic.",
    "kl": "Distance to the reference policy; absent without one.",
    "mismatch": "Numerical error: the trainer's log-probs against the engine's, for tokens of the same weights.",
    "drift": "The trainer's weights against those that sampled; only where some tokens are of older weights.",
    "rollout_correction": "The proximal policy against the one that sampled, and what the correction does about it.",
    "age": "Policy versions between sampling and training. Age 0 is on-policy.",
    "pipeline": "Groups under way and what became of them.",
    "rollout": "The engines at work.",
    "num_turns": "Episodes of many turns, named as verl names it.",
    "tool_call_counts": "The same.",
    "agent_loop": "The same.",
    "moe": "Mixtures of experts: how evenly the actor's experts were used in the update; absent without experts.",
    "balance": "How evenly the tokens are spread over the trainer's ranks.",
    "timing": "Seconds of wall clock by stage. Stages may overlap, so they need not add up to the step.",
    "timing_per_token": "The same, per token.",
    "throughput": "Tokens and samples per second of the whole step.",
    "memory": "Memory: of devices at its peak during the step, of hosts at its end.",
    "validation": "The held-out sets. n is the number of samples drawn per prompt, k at most n.",
}
"""The families, in the order of the documentation."""

_STATISTICS = {
    "mean": "mean",
    "min": "smallest",
    "max": "largest",
    "std": "standard deviation (population)",
    "median": "median",
}


# The mean of two pulls' maxima is the maximum of nothing.
_EXTREMES: dict[str, Reduction] = {"min": "min", "max": "max"}


def _spread(name: str, unit: str, of: str, statistics: str = "mean min max std") -> Iterator[Metric]:
    """One metric per statistic: ``name/mean``, ``name/min`` ..."""
    for statistic in statistics.split():
        reduction = _EXTREMES.get(statistic, "batch")
        yield Metric(f"{name}/{statistic}", unit, f"{_STATISTICS[statistic]} of {of}", reduction)


def _metrics() -> Iterator[Metric]:
    yield from _progress()
    yield from _rewards()
    yield from _judges()
    yield from _reward_models()
    yield from _lengths()
    yield from _learning()
    yield from _mismatch()
    yield from _rollout_correction()
    yield from _pipeline()
    yield from _time_and_space()
    yield from _validation()


def _progress() -> Iterator[Metric]:
    yield Metric("progress/step", "steps", "steps finished", "last")
    yield Metric("progress/version", "versions", "policy version the trainer holds", "last")
    yield Metric("progress/epoch", "epochs", "passes over the training data, counting the present one in part", "last")
    yield Metric("progress/groups", "groups", "prompt groups trained since the run began", "last")
    yield Metric("progress/samples", "samples", "samples trained since the run began", "last")
    yield Metric("progress/tokens", "tokens", "prompt and response tokens trained since the run began", "last")
    yield Metric("progress/seconds", "s", "wall clock of training since the run began, over all restarts", "last")


def _rewards() -> Iterator[Metric]:
    yield from _spread("reward", "", "the samples' scores: the reward functions' weighted sum and reward.overlong")
    yield from _spread("reward/penalised", "", "the samples' rewards less the KL, with a KL in the reward only")
    yield from _spread("reward/part/<part>", "", "what one reward function gave, before its weight", "mean min max std")
    yield Metric("reward/source/<source>/mean", "", "mean score of the samples from one data source")
    yield Metric("reward/correct_ratio", "fraction", "samples judged correct, among those judged")
    yield Metric(
        "reward/error_ratio", "fraction", "samples whose reward function failed or timed out and was scored instead"
    )
    yield Metric("reward/group_std/mean", "", "mean over groups of the standard deviation (population) of their scores")
    yield Metric(
        "reward/no_signal_ratio", "fraction", "groups whose samples all have the same score: no gradient from them"
    )
    yield Metric("reward/all_lowest_ratio", "fraction", "groups without signal whose score is the lowest of the batch")
    yield Metric("reward/all_highest_ratio", "fraction", "groups without signal whose score is the batch's highest")
    yield from _spread("advantage", "", "the advantages")
    yield from _spread("return", "", "the returns")
    yield from _spread("value", "", "the values")
    yield Metric("variance/signal_strength", "", "squared norm of the mean gradient: that of actor/grad_norm")
    yield Metric(
        "variance/total_power", "", "mean squared norm of the samples' gradients, by the proxy of the optimal baseline"
    )
    yield Metric("variance/pure_noise", "", "total power less signal, over the number of samples less one")
    yield Metric("variance/squared_advantage", "", "mean of the squared advantages")
    yield Metric("variance/weight", "", "mean of the gradient-norm proxy W")


def _judges() -> Iterator[Metric]:
    yield Metric("judge/<part>/requests", "requests", "made, retries too", "sum")
    yield Metric("judge/<part>/retries", "requests", "that failed: it was away, busy, or sent something else", "sum")
    yield Metric("judge/<part>/unreadable", "answers", "in which no score could be read", "sum")
    yield Metric("judge/<part>/remembered", "samples", "whose question was answered or under way already", "sum")
    yield Metric("judge/<part>/failures", "samples", "that got no score from it", "sum")
    yield Metric("judge/<part>/tokens", "tokens", "of questions and answers, as the endpoint counts them", "sum")
    yield Metric("judge/<part>/requests_of_run", "requests", "since the run began, over all restarts", "last")
    yield Metric("judge/<part>/tokens_of_run", "tokens", "since the run began, over all restarts", "last")
    yield Metric("judge/<part>/asked_elsewhere", "requests", "made again: their engine was lost (spec.judge)", "sum")
    yield from _spread("judge/<part>/seconds", "s", "the times from request to answer", "mean max")


def _reward_models() -> Iterator[Metric]:
    yield Metric("reward_model/<part>/rows", "samples", "scored", "sum")
    yield Metric("reward_model/<part>/tokens", "tokens", "of their prompts and responses", "sum")
    yield Metric("reward_model/<part>/seconds", "s", "its replicas were at work, all together", "sum")
    yield Metric("reward_model/<part>/queue/max", "samples", "that waited for a replica at once", "max")
    yield Metric("reward_model/<part>/losses", "replicas", "that were lost with samples in hand", "sum")
    yield from _spread("reward_model/<part>/wait_seconds", "s", "samples' times in that queue", "mean max")


def _lengths() -> Iterator[Metric]:
    yield from _spread("prompt/length", "tokens", "the prompts' lengths", "mean min max")
    yield Metric("prompt/length/clip_ratio", "fraction", "prompts as long as data.maxPromptTokens allows")
    yield from _spread("response/length", "tokens", "the responses' lengths", "mean min max")
    yield Metric("response/length/clip_ratio", "fraction", "responses cut at rollout.maxResponseTokens")
    yield Metric("response/late_ratio", "fraction", "responses ended as their group was late (staleness.onDeadline)")
    yield from _spread(
        "response/completed_length", "tokens", "the lengths of responses that are not aborted", "mean min max"
    )
    yield Metric("response/completed_length/clip_ratio", "fraction", "as length/clip_ratio, among those not aborted")
    yield Metric("response/aborted_ratio", "fraction", "responses that were aborted or are empty")
    yield Metric("response/trained_ratio", "fraction", "response tokens that are trained on (not masked)")
    yield from _spread("response/turns", "", "runs of such tokens in a response: 1 without tool output", "mean min max")
    yield from _spread(
        "response/turn_tokens", "tokens", "the lengths of an environment's single answers", "mean min max"
    )


def _learning() -> Iterator[Metric]:
    for model, what in (("actor", "policy"), ("critic", "value model")):
        yield Metric(f"{model}/loss", "", f"the whole loss of the {what}, as differentiated", "mean")
        yield Metric(f"{model}/grad_norm", "", "norm of the gradient before clipping", "mean")
        yield Metric(f"{model}/grad_norm/max", "", "largest norm of the gradient before clipping", "max")
        yield Metric(f"{model}/learning_rate", "", "learning rate of the last optimizer step", "last")
        yield Metric(f"{model}/steps", "steps", "optimizer steps that were taken", "sum")
        yield Metric(
            f"{model}/skipped_steps", "steps", "optimizer steps left out for a gradient that is not finite", "sum"
        )
    yield Metric("actor/policy_loss", "", "the policy loss without KL and entropy terms", "mean")
    yield Metric("actor/entropy", "nats", "entropy of the policy per token, at the sampling temperature", "mean")
    yield Metric("actor/entropy_coefficient", "", "weight of the entropy bonus in this step, where it moves", "last")
    yield Metric(
        "actor/approx_kl", "nats", "mean of log pi_old - log pi_theta: how far the step moved the policy", "mean"
    )
    yield Metric(
        "actor/clip_fraction",
        "fraction",
        "tokens (sequences, for sequence ratios) held by the upper or lower clip",
        "mean",
    )
    yield Metric("actor/clip_fraction_low", "fraction", "those of them with negative advantage", "mean")
    yield Metric(
        "actor/cap_fraction", "fraction", "tokens that dppoTv or dppoKl keep, with a ratio cut at ratioCap", "mean"
    )
    yield Metric("actor/dual_clip_fraction", "fraction", "tokens with negative advantage held by the dual clip", "mean")
    yield Metric(
        "actor/rejected_fraction", "fraction", "tokens that a bypass loss rejects against the engine's policy", "mean"
    )
    yield Metric(
        "actor/correction_weight", "", "mean importance weight of a token, where pi_old is interpolated", "mean"
    )
    yield Metric("actor/selected_fraction", "fraction", "tokens that clipCov or klCov pick by their covariance", "mean")
    yield Metric("actor/absolute_kl", "nats", "klCov: mean of |log pi_theta - log pi_old|", "mean")
    yield Metric("actor/ratio/mean", "", "mean of pi_theta / pi_old", "mean")
    yield Metric("actor/ratio/max", "", "largest pi_theta / pi_old", "max")
    yield Metric("actor/ratio/min", "", "smallest pi_theta / pi_old", "min")
    yield Metric("critic/value_loss", "", "the value loss", "mean")
    yield Metric("critic/clip_fraction", "fraction", "tokens whose value is held by the value clip", "mean")
    yield Metric("critic/prediction/mean", "", "mean of the values predicted during the update", "mean")
    yield Metric(
        "critic/explained_variance", "fraction", "1 - var(return - value) / var(return); 1 is perfect, 0 is a constant"
    )
    yield Metric("kl/reference", "nats", "mean of log pi_old - log pi_ref per token (k1)")
    yield Metric("kl/in_loss", "nats", "mean KL of the policy to the reference, of the kind the job names", "mean")
    yield Metric("kl/in_reward", "nats", "mean over sequences of the mean KL per token that the reward was charged for")
    yield Metric("kl/coefficient", "", "the coefficient now in force", "last")


def _mismatch() -> Iterator[Metric]:
    yield Metric("mismatch/tokens", "tokens", "tokens compared", "sum")
    yield from _spread("mismatch/log_prob", "nats", "|log pi_trainer - log pi_engine| per token", "mean max")
    yield from _spread("mismatch/probability", "fraction", "|pi_trainer - pi_engine| per token", "mean max std")
    yield Metric("mismatch/correlation", "", "Pearson correlation of the two probabilities")
    for family in ("mismatch", "drift"):
        yield Metric(f"{family}/kl", "nats", "KL(engine, trainer) estimated by k3 on the sampled tokens")
        yield Metric(f"{family}/chi_square", "", "chi-squared divergence of token ratios, E[rho^2] - 1")
        yield Metric(
            f"{family}/effective_sample_size",
            "fraction",
            "of the sequences, were they reweighted from engine to trainer",
        )
    yield Metric("mismatch/beyond_limits", "steps", "steps in a row beyond rolloutCorrection.limits", "last")
    yield Metric("mismatch/correcting", "", "1 once the limits have switched the correction on", "last")
    yield Metric("mismatch/roll_backs", "", "how often the limits have sent this process back", "last")
    yield Metric(
        "mismatch/canary/max", "nats", "mean |log pi_trainer - log pi_engine| per token of the canaries, worst engine"
    )
    yield Metric("mismatch/canary/reloaded", "engines", "engines that got their weights once more")


def _rollout_correction() -> Iterator[Metric]:
    family = "rollout_correction"
    yield Metric(f"{family}/perplexity/training", "", "mean over sequences of exp(-mean log pi_old)")
    yield Metric(f"{family}/perplexity/rollout", "", "mean over sequences of exp(-mean log pi_roll)")
    yield Metric(f"{family}/perplexity/ratio", "", "mean over sequences of training over rollout perplexity")
    yield Metric(f"{family}/log_perplexity/training", "nats", "mean over sequences of -mean log pi_old")
    yield Metric(f"{family}/log_perplexity/rollout", "nats", "mean over sequences of -mean log pi_roll")
    yield Metric(f"{family}/log_perplexity/absolute_difference", "nats", "mean over sequences of the difference's size")
    yield from _spread(
        f"{family}/log_perplexity/difference", "nats", "training less rollout log-perplexity", "mean min max"
    )
    yield Metric(f"{family}/kl", "nats", "KL(pi_roll, pi_old) per token, by k1")
    yield Metric(f"{family}/k3_kl", "nats", "the same by k3: never negative, less noise")
    yield Metric(f"{family}/chi2_token", "", "chi-squared divergence of token ratios, E[rho^2] - 1")
    yield Metric(f"{family}/chi2_sequence", "", "chi-squared divergence of sequence ratios")
    weight = f"{family}/weight"
    yield from _spread(weight, "", "the importance weights per token")
    yield Metric(f"{weight}/fraction_high", "fraction", "weights above the upper bound, before they are cut")
    yield Metric(f"{weight}/fraction_low", "fraction", "weights below the lower bound")
    yield Metric(f"{weight}/zeroed_ratio", "fraction", "weights set to zero for being out of bounds")
    yield Metric(f"{weight}/effective_sample_size", "fraction", "1 / E[(w / mean w)^2]")
    yield Metric(f"{weight}/normalization", "", "what the weights were divided by to have mean 1")
    yield from _spread(f"{weight}/sequence", "", "the sequences' weights")
    yield Metric(f"{weight}/sequence/max_deviation", "", "largest distance of a sequence's weight from 1", "max")
    yield Metric(f"{weight}/sequence/fraction_high", "fraction", "sequences above the upper bound")
    yield Metric(f"{weight}/sequence/fraction_low", "fraction", "sequences below the lower bound")
    rejection = f"{family}/rejection"
    yield Metric(f"{rejection}/masked_ratio", "fraction", "tokens masked by all rejection rules together")
    yield Metric(f"{rejection}/masked_sequence_ratio", "fraction", "sequences with at least one token masked")
    yield from _spread(f"{rejection}/<rule>", "", "the quantity one rejection rule looks at")
    yield Metric(f"{rejection}/<rule>/fraction_high", "fraction", "above the rule's upper bound")
    yield Metric(f"{rejection}/<rule>/fraction_low", "fraction", "below the rule's lower bound")
    of_tokens = f"{rejection}/<rule>/sequence"
    yield from _spread(of_tokens, "", "the sequences' mean values, for a rule over tokens")
    yield Metric(f"{of_tokens}/max_deviation", "", "largest distance of such a mean from 0", "max")
    yield Metric(f"{of_tokens}/fraction_high", "fraction", "sequences whose mean is above the rule's upper bound")
    yield Metric(f"{of_tokens}/fraction_low", "fraction", "sequences whose mean is below the rule's lower bound")
    yield Metric(f"{rejection}/<rule>/masked_ratio", "fraction", "tokens masked by this rule")
    yield Metric(f"{rejection}/<rule>/masked_sequence_ratio", "fraction", "sequences touched by this rule")


def _pipeline() -> Iterator[Metric]:
    yield from _spread("age", "versions", "the groups' ages when they are trained", "mean min max")
    yield Metric("age/token_mean", "versions", "mean age of the tokens")
    yield from _spread(
        "age/optimizer_steps",
        "steps",
        "the policy's optimizer steps between the weights of a group's oldest token and each mini-batch with the group",
        "mean max",
    )
    yield Metric("age/mixed_ratio", "fraction", "responses with tokens of more than one policy version")
    yield Metric("age/mixed_group_ratio", "fraction", "groups with such a response")
    yield Metric("pipeline/open_groups", "groups", "groups admitted and neither trained nor dropped", "last")
    yield Metric("pipeline/ready_groups", "groups", "groups scored and waiting for the learner", "last")
    yield Metric("pipeline/dropped_groups", "groups", "groups dropped during the step", "sum")
    yield Metric(
        "pipeline/late_groups", "groups", "groups ended or dropped because a batch waited for them alone", "sum"
    )
    yield Metric("pipeline/dropped/length/mean", "tokens", "mean response length of these groups")
    yield Metric("pipeline/dropped/reward/mean", "", "mean score of their samples")
    yield Metric("pipeline/learner_idle_ratio", "fraction", "of the step in which the learner waited")
    yield Metric(
        "pipeline/engine_idle_ratio", "fraction", "of the step in which engines had no request, mean over engines"
    )
    yield from _spread(
        "rollout/seconds",
        "s",
        "the samples' times from request to end, waits and interruptions included",
        "mean min max",
    )
    slowest = "of the sample that took longest"
    yield Metric("rollout/slowest/seconds", "s", f"generation time {slowest}", "slowest")
    yield Metric("rollout/slowest/prompt_length", "tokens", f"prompt length {slowest}", "slowest")
    yield Metric("rollout/slowest/response_length", "tokens", f"response length {slowest}", "slowest")
    yield Metric(
        "rollout/branched_turns",
        "turns",
        "turns that did not continue what the model had seen and said: history was rewritten",
        "sum",
    )
    yield Metric(
        "rollout/recomputed_ratio",
        "",
        "tokens of episodes whose keys and values engines computed again, over the tokens that were generated",
    )
    yield Metric("rollout/recomputed_ratio/forced", "", "the part of it that publications force")
    yield Metric("rollout/diverged_episodes", "episodes", "episodes that could not go on from their record", "sum")
    of_episodes = "of an environment's episodes"
    yield from _spread(
        "num_turns", "", f"messages {of_episodes}: prompt, answers and what is told between", "mean min max"
    )
    yield from _spread(
        "tool_call_counts", "calls", f"calls of the world {of_episodes}; an agent's run is one", "mean min max"
    )
    yield from _spread("agent_loop/generate_sequences", "s", f"generation times {of_episodes}", "mean min max")
    yield from _spread(
        "agent_loop/tool_calls", "s", f"times in calls {of_episodes}; an agent's run is one", "mean min max"
    )
    slowest = "of the episode whose generation and calls took longest"
    yield Metric("agent_loop/slowest/generate_sequences", "s", f"generation time {slowest}", "slowest")
    yield Metric("agent_loop/slowest/tool_calls", "s", f"time in calls of the world {slowest}", "slowest")
    yield Metric("agent_loop/slowest/prompt_length", "tokens", f"prompt length {slowest}", "slowest")
    yield Metric("agent_loop/slowest/response_length", "tokens", f"response length {slowest}", "slowest")
    yield Metric("rollout/tool_calls", "calls", "calls of tools that episodes made", "sum")
    yield Metric("rollout/tool_errors", "calls", "those that were malformed, unknown, late or raised", "sum")
    yield Metric(
        "moe/fullest_expert/mean",
        "ratio",
        "tokens sent to a layer's fullest expert over its even share, mean over layers",
    )
    yield Metric("moe/fullest_expert/max", "ratio", "the same of the layer where it is largest", "max")
    yield Metric("moe/idle_experts", "fraction", "experts that no token was sent to")
    yield Metric("moe/replayed", "fraction", "tokens of an update that went to the experts that their engine chose")
    yield Metric("moe/rerouted", "fraction", "choices of these that the trainer's routers would have made otherwise")
    yield from _spread("balance/rank_tokens", "tokens", "the tokens given to each rank", "mean min max")
    yield Metric("balance/rank_tokens/spread", "tokens", "largest less smallest")
    yield from _spread(
        "balance/unbalanced_tokens", "tokens", "what each rank would have had without balancing", "min max"
    )


def _time_and_space() -> Iterator[Metric]:
    for stage, covers in STAGES.items():
        if stage in OUTSIDE_STEPS:
            continue
        yield Metric(f"timing/{stage}_seconds", "s", covers, "sum")
    yield Metric(
        "timing/publish_seconds/transfer", "s", "from the first gather until the last engine had verified its weights"
    )
    yield Metric(
        "timing/publish_seconds/engine_pause",
        "s",
        "the longest for which an engine made no token because of the publication; where running requests finish first "
        "or are interrupted, from the last token until requests may run again",
    )
    of_response, of_all = "per response token", "per prompt and response token"
    for stage in (
        "generate",
        "score",
        "old_log_probs",
        "reference",
        "values",
        "advantage",
        "update",
        "update_actor",
        "update_critic",
    ):
        per = of_response if stage == "generate" else of_all
        yield Metric(f"timing_per_token/{stage}_milliseconds", "ms", f"timing/{stage}_seconds {per}")
    yield Metric("throughput/tokens", "tokens", "prompt and response tokens of the step", "sum")
    yield Metric("throughput/tokens_per_second", "tokens/s", "prompt and response tokens over the step's seconds")
    yield Metric("throughput/tokens_per_second_per_device", "tokens/s", "the same, over all devices of all pools")
    yield Metric("throughput/generated_tokens_per_second", "tokens/s", "response tokens over the step's seconds")
    yield Metric("throughput/samples_per_second", "samples/s", "samples over the step's seconds")
    yield Metric(
        "throughput/publication_megabytes_per_second", "MB/s", "the new weights' bytes over the transfer's seconds"
    )
    of_peak = "share of the devices' peak FLOPs, if each sequence were computed by itself, in"
    yield Metric(
        "throughput/model_flops_utilisation/actor", "fraction", f"{of_peak} the actor's update; absent on CPUs"
    )
    yield Metric(
        "throughput/model_flops_utilisation/actor_inference",
        "fraction",
        f"{of_peak} the actor's log-probs; absent on CPUs",
    )
    yield Metric(
        "throughput/model_flops_utilisation/critic", "fraction", f"{of_peak} the critic's update; absent on CPUs"
    )
    yield Metric("memory/device_allocated_gigabytes", "GB", "device memory in use by tensors, most over ranks", "max")
    yield Metric(
        "memory/device_reserved_gigabytes", "GB", "device memory held by the allocator, largest over ranks", "max"
    )
    yield Metric(
        "memory/publication_buffers_megabytes", "MB", "most that learner or engine held beside the model to publish"
    )
    yield Metric("memory/host_gigabytes/driver", "GB", "resident memory of the driver's process", "last")
    yield Metric("memory/host_gigabytes/trainer", "GB", "resident memory of all ranks' processes together", "last")


def _validation() -> Iterator[Metric]:
    of_prompts = "mean over the prompts of one data source of"
    for prefix, what in (
        ("validation/<source>", "the score (1 or 0 where correctness is known)"),
        ("validation/<source>/<variable>", "another number (a reward part, say)"),
    ):
        yield Metric(f"{prefix}/mean@<n>", "", f"{of_prompts} the mean over n samples of {what}")
        yield Metric(f"{prefix}/std@<n>", "", f"{of_prompts} the standard deviation over n samples of {what}")
        for choice, chosen in (
            ("best", "the best of k samples"),
            ("worst", "the worst of k samples"),
            ("maj", "the answer most of k samples give"),
        ):
            yield Metric(f"{prefix}/{choice}@<k>/mean", "", f"{of_prompts} the expected {what} of {chosen}")
            yield Metric(f"{prefix}/{choice}@<k>/std", "", f"{of_prompts} its standard deviation over draws of k")
    yield Metric(
        "validation/<source>/pass@<k>",
        "",
        f"{of_prompts} the chance that one of k samples is correct (unbiased: arXiv 2107.03374, equation 1)",
    )
    yield Metric("validation/<source>/response_length/mean", "tokens", "mean length of the responses")
    yield Metric("validation/<source>/response_length/clip_ratio", "fraction", "responses cut at the limit")
    yield Metric("validation/<source>/prompts", "prompts", "prompts asked")
    yield Metric("validation/step", "steps", "of a validation beside training: the step whose weights it saw", "last")
    yield Metric("validation/mean", "", "mean over data sources of their mean@n")


METRICS: tuple[Metric, ...] = tuple(_metrics())
"""All metrics, in the order of the documentation."""
