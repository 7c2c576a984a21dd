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
    "slowest": "from the pull of the step that has the slowest sample",
    "sum": "total over the step",
    "last": "the value at the end of the step",
}

STAGES: dict[str, str] = {
    "step": "the whole step, from the first request to the published weights",
    "generate": "waiting for samples with no other work",
    "wait_prev_gen": "oneStepOff: waiting for the rest of the generation that began a step earlier",
    "reward": "waiting for reward functions",
    "score": "the learner's forward passes before the update, when one call computes all streams",
    "old_log_probs": "the proximal policy's log-probs",
    "reference": "the reference policy's log-probs",
    "values": "the critic's values",
    "advantage": "advantages, returns and corrections",
    "update": "the update of actor and critic, when one call does both",
    "update_actor": "the actor's gradients and optimizer steps; a single CPU rank sums its two threads",
    "update_critic": "the critic's gradients and optimizer steps; concurrent with the actor's on a single CPU rank",
    "publish": "gathering, sending and loading the new weights",
    "validation": "the validation set",
    "checkpoint": "writing the previous step's checkpoint",
    "idle": "the learner waiting for a full batch",
    "start": "before the first step: data, model, Ray, ranks and engines",
    "other": "time in no stage",
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
    "reward": "Scores of the step's samples.",
    "judge": "Requests to a judge for one term of the reward, including validation samples.",
    "reward_model": "Work of a reward model for one term of the reward, including validation samples.",
    "advantage": "Per token, over trained tokens, after whitening.",
    "return": "The critic's targets, per token.",
    "value": "The critic's estimates before the update, per token.",
    "variance": "Signal and noise of the policy gradient.",
    "prompt": "Prompts of the step.",
    "response": "Responses of the step.",
    "actor": "The policy's optimizer steps.",
    "critic": "The value model's optimizer steps; absent without a critic.",
    "kl": "Divergence from the reference policy; absent without one.",
    "mismatch": "Rollout-trainer mismatch: the trainer's log-probs against the engine's, under the same weights.",
    "drift": "The trainer's policy against the older policy that sampled; only if some tokens come from older weights.",
    "rollout_correction": "The proximal policy against the one that sampled; the correction's weights and rejections.",
    "age": "Policy versions between sampling and training. Age 0 is on-policy.",
    "pipeline": "Open groups and their outcomes.",
    "rollout": "Generation by the engines.",
    "num_turns": "Multi-turn episodes; verl's name.",
    "tool_call_counts": "Multi-turn episodes; verl's name.",
    "agent_loop": "Multi-turn episodes; verl's name.",
    "moe": "Mixtures of experts: load balance of the actor's experts in the update; absent without experts.",
    "balance": "Balance of tokens over the trainer's ranks.",
    "timing": "Wall-clock seconds by stage. Stages may overlap, so they need not add up to the step.",
    "timing_per_token": "The same, per token.",
    "throughput": "Tokens and samples per second of the whole step.",
    "memory": "Device memory at its peak during the step, host memory at its end.",
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
    yield Metric("progress/epoch", "epochs", "passes over the training data, the current one as a fraction", "last")
    yield Metric("progress/groups", "groups", "prompt groups trained since the run began", "last")
    yield Metric("progress/samples", "samples", "samples trained since the run began", "last")
    yield Metric("progress/tokens", "tokens", "prompt and response tokens trained since the run began", "last")
    yield Metric("progress/seconds", "s", "wall-clock training time since the run began, over all restarts", "last")


def _rewards() -> Iterator[Metric]:
    yield from _spread("reward", "", "the samples' scores: the reward functions' weighted sum and reward.overlong")
    yield from _spread(
        "reward/penalised", "", "the samples' rewards minus the KL penalty; only with a KL penalty in the reward"
    )
    yield from _spread("reward/part/<part>", "", "the unweighted score of one reward function", "mean min max std")
    yield Metric("reward/source/<source>/mean", "", "mean score of the samples from one data source")
    yield Metric("reward/correct_ratio", "fraction", "samples judged correct, among those judged")
    yield Metric(
        "reward/error_ratio",
        "fraction",
        "samples that got a substitute score because their reward function failed or timed out",
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
    yield Metric("variance/pure_noise", "", "total power minus signal, divided by the number of samples minus one")
    yield Metric("variance/squared_advantage", "", "mean of the squared advantages")
    yield Metric("variance/weight", "", "mean of the gradient-norm proxy W")


def _judges() -> Iterator[Metric]:
    yield Metric("judge/<part>/requests", "requests", "requests sent, including retries", "sum")
    yield Metric(
        "judge/<part>/retries", "requests", "failed requests: no connection, busy, or an invalid response", "sum"
    )
    yield Metric("judge/<part>/unreadable", "answers", "answers without a readable score", "sum")
    yield Metric("judge/<part>/remembered", "samples", "samples whose question was already answered or open", "sum")
    yield Metric("judge/<part>/failures", "samples", "samples without a score from it", "sum")
    yield Metric("judge/<part>/tokens", "tokens", "tokens of questions and answers, as counted by the endpoint", "sum")
    yield Metric("judge/<part>/requests_of_run", "requests", "requests since the run began, over all restarts", "last")
    yield Metric("judge/<part>/tokens_of_run", "tokens", "tokens since the run began, over all restarts", "last")
    yield Metric(
        "judge/<part>/asked_elsewhere", "requests", "requests repeated after their engine was lost (spec.judge)", "sum"
    )
    yield from _spread("judge/<part>/seconds", "s", "the times from request to answer", "mean max")


def _reward_models() -> Iterator[Metric]:
    yield Metric("reward_model/<part>/rows", "samples", "samples scored", "sum")
    yield Metric("reward_model/<part>/tokens", "tokens", "tokens of their prompts and responses", "sum")
    yield Metric("reward_model/<part>/seconds", "s", "total busy time of its replicas", "sum")
    yield Metric("reward_model/<part>/queue/max", "samples", "most samples waiting for a replica at once", "max")
    yield Metric("reward_model/<part>/losses", "replicas", "replicas lost while scoring samples", "sum")
    yield from _spread("reward_model/<part>/wait_seconds", "s", "the samples' waiting times for a replica", "mean max")


def _lengths() -> Iterator[Metric]:
    yield from _spread("prompt/length", "tokens", "the prompts' lengths", "mean min max")
    yield Metric("prompt/length/clip_ratio", "fraction", "prompts as long as data.maxPromptTokens allows")
    yield from _spread("response/length", "tokens", "the responses' lengths", "mean min max")
    yield Metric("response/length/clip_ratio", "fraction", "responses cut at rollout.maxResponseTokens")
    yield Metric(
        "response/late_ratio", "fraction", "responses ended because their group was late (staleness.onDeadline)"
    )
    yield from _spread(
        "response/completed_length", "tokens", "the lengths of responses that are not aborted", "mean min max"
    )
    yield Metric(
        "response/completed_length/clip_ratio",
        "fraction",
        "like length/clip_ratio, among responses that are not aborted",
    )
    yield Metric("response/aborted_ratio", "fraction", "responses that were aborted or are empty")
    yield Metric("response/trained_ratio", "fraction", "response tokens that are trained on (not masked)")
    yield from _spread(
        "response/turns", "", "spans of trained tokens in a response: 1 without tool output", "mean min max"
    )
    yield from _spread(
        "response/turn_tokens", "tokens", "the lengths of the model's single turns in an environment", "mean min max"
    )


def _learning() -> Iterator[Metric]:
    for model, what in (("actor", "policy"), ("critic", "value model")):
        yield Metric(f"{model}/loss", "", f"the total loss of the {what}, as differentiated", "mean")
        yield Metric(f"{model}/grad_norm", "", "norm of the gradient before clipping", "mean")
        yield Metric(f"{model}/grad_norm/max", "", "largest norm of the gradient before clipping", "max")
        yield Metric(f"{model}/learning_rate", "", "learning rate of the last optimizer step", "last")
        yield Metric(f"{model}/steps", "steps", "optimizer steps taken", "sum")
        yield Metric(
            f"{model}/skipped_steps", "steps", "optimizer steps skipped because of a non-finite gradient", "sum"
        )
    yield Metric("actor/policy_loss", "", "the policy loss without KL and entropy terms", "mean")
    yield Metric("actor/entropy", "nats", "entropy of the policy per token, at the sampling temperature", "mean")
    yield Metric("actor/entropy_coefficient", "", "weight of the entropy bonus in this step, if it is adaptive", "last")
    yield Metric(
        "actor/approx_kl", "nats", "mean of log pi_old - log pi_theta: how far the step moved the policy", "mean"
    )
    yield Metric(
        "actor/clip_fraction",
        "fraction",
        "tokens (sequences, for sequence ratios) clipped at the upper or lower bound",
        "mean",
    )
    yield Metric("actor/clip_fraction_low", "fraction", "clipped tokens (sequences) with negative advantage", "mean")
    yield Metric(
        "actor/cap_fraction",
        "fraction",
        "tokens that dppoTv or dppoKl keep, with the ratio truncated at ratioCap",
        "mean",
    )
    yield Metric(
        "actor/dual_clip_fraction", "fraction", "tokens with negative advantage clipped by the dual clip", "mean"
    )
    yield Metric(
        "actor/rejected_fraction", "fraction", "tokens that a bypass loss rejects against the engine's policy", "mean"
    )
    yield Metric("actor/correction_weight", "", "mean importance weight of a token, with interpolated pi_old", "mean")
    yield Metric("actor/selected_fraction", "fraction", "tokens that clipCov or klCov select by covariance", "mean")
    yield Metric("actor/absolute_kl", "nats", "klCov: mean of |log pi_theta - log pi_old|", "mean")
    yield Metric("actor/ratio/mean", "", "mean of pi_theta / pi_old", "mean")
    yield Metric("actor/ratio/max", "", "largest pi_theta / pi_old", "max")
    yield Metric("actor/ratio/min", "", "smallest pi_theta / pi_old", "min")
    yield Metric("critic/value_loss", "", "the value loss", "mean")
    yield Metric("critic/clip_fraction", "fraction", "tokens whose value is clipped", "mean")
    yield Metric("critic/prediction/mean", "", "mean of the values predicted during the update", "mean")
    yield Metric(
        "critic/explained_variance", "fraction", "1 - var(return - value) / var(return); 1 is perfect, 0 is a constant"
    )
    yield Metric("kl/reference", "nats", "mean of log pi_old - log pi_ref per token (k1)")
    yield Metric("kl/in_loss", "nats", "mean KL of policy and reference, by the job's KL estimator", "mean")
    yield Metric("kl/in_reward", "nats", "mean over sequences of the mean KL per token used as penalty in the reward")
    yield Metric("kl/coefficient", "", "the current coefficient", "last")


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
            "effective share of the sequences if reweighted from engine to trainer",
        )
    yield Metric("mismatch/beyond_limits", "steps", "consecutive steps beyond rolloutCorrection.limits", "last")
    yield Metric("mismatch/correcting", "", "1 once the limits have switched the correction on", "last")
    yield Metric("mismatch/roll_backs", "", "rollbacks of this process because of the limits", "last")
    yield Metric(
        "mismatch/canary/max", "nats", "mean |log pi_trainer - log pi_engine| per token of the canaries, worst engine"
    )
    yield Metric("mismatch/canary/reloaded", "engines", "engines that were sent their weights again")


def _rollout_correction() -> Iterator[Metric]:
    family = "rollout_correction"
    yield Metric(f"{family}/perplexity/training", "", "mean over sequences of exp(-mean log pi_old)")
    yield Metric(f"{family}/perplexity/rollout", "", "mean over sequences of exp(-mean log pi_roll)")
    yield Metric(f"{family}/perplexity/ratio", "", "mean over sequences of training over rollout perplexity")
    yield Metric(f"{family}/log_perplexity/training", "nats", "mean over sequences of -mean log pi_old")
    yield Metric(f"{family}/log_perplexity/rollout", "nats", "mean over sequences of -mean log pi_roll")
    yield Metric(
        f"{family}/log_perplexity/absolute_difference", "nats", "mean over sequences of the absolute difference"
    )
    yield from _spread(
        f"{family}/log_perplexity/difference", "nats", "training minus rollout log-perplexity", "mean min max"
    )
    yield Metric(f"{family}/kl", "nats", "KL(pi_roll, pi_old) per token, by k1")
    yield Metric(f"{family}/k3_kl", "nats", "the same by k3: never negative, less noise")
    yield Metric(f"{family}/chi2_token", "", "chi-squared divergence of token ratios, E[rho^2] - 1")
    yield Metric(f"{family}/chi2_sequence", "", "chi-squared divergence of sequence ratios")
    weight = f"{family}/weight"
    yield from _spread(weight, "", "the importance weights per token")
    yield Metric(f"{weight}/fraction_high", "fraction", "weights above the upper bound, before truncation")
    yield Metric(f"{weight}/fraction_low", "fraction", "weights below the lower bound")
    yield Metric(f"{weight}/zeroed_ratio", "fraction", "weights set to zero for being out of bounds")
    yield Metric(f"{weight}/effective_sample_size", "fraction", "1 / E[(w / mean w)^2]")
    yield Metric(f"{weight}/normalization", "", "divisor that gave the weights mean 1")
    yield from _spread(f"{weight}/sequence", "", "the sequences' weights")
    yield Metric(f"{weight}/sequence/max_deviation", "", "largest distance of a sequence's weight from 1", "max")
    yield Metric(f"{weight}/sequence/fraction_high", "fraction", "sequences above the upper bound")
    yield Metric(f"{weight}/sequence/fraction_low", "fraction", "sequences below the lower bound")
    rejection = f"{family}/rejection"
    yield Metric(f"{rejection}/masked_ratio", "fraction", "tokens masked by all rejection rules together")
    yield Metric(f"{rejection}/masked_sequence_ratio", "fraction", "sequences with at least one token masked")
    yield from _spread(f"{rejection}/<rule>", "", "the quantity that one rejection rule tests")
    yield Metric(f"{rejection}/<rule>/fraction_high", "fraction", "values above the rule's upper bound")
    yield Metric(f"{rejection}/<rule>/fraction_low", "fraction", "values below the rule's lower bound")
    of_tokens = f"{rejection}/<rule>/sequence"
    yield from _spread(of_tokens, "", "the sequences' mean values, for a rule over tokens")
    yield Metric(f"{of_tokens}/max_deviation", "", "largest distance of such a mean from 0", "max")
    yield Metric(f"{of_tokens}/fraction_high", "fraction", "sequences whose mean is above the rule's upper bound")
    yield Metric(f"{of_tokens}/fraction_low", "fraction", "sequences whose mean is below the rule's lower bound")
    yield Metric(f"{rejection}/<rule>/masked_ratio", "fraction", "tokens masked by this rule")
    yield Metric(
        f"{rejection}/<rule>/masked_sequence_ratio", "fraction", "sequences with at least one token masked by this rule"
    )


def _pipeline() -> Iterator[Metric]:
    yield from _spread("age", "versions", "the groups' ages when they are trained", "mean min max")
    yield Metric("age/token_mean", "versions", "mean age of the tokens")
    yield from _spread(
        "age/optimizer_steps",
        "steps",
        "the optimizer steps between the weights of a group's oldest token and each mini-batch that contains the group",
        "mean max",
    )
    yield Metric("age/mixed_ratio", "fraction", "responses with tokens of more than one policy version")
    yield Metric("age/mixed_group_ratio", "fraction", "groups with such a response")
    yield Metric("pipeline/open_groups", "groups", "groups admitted but not yet trained or dropped", "last")
    yield Metric("pipeline/ready_groups", "groups", "groups scored and waiting for the learner", "last")
    yield Metric("pipeline/dropped_groups", "groups", "groups dropped during the step", "sum")
    yield Metric(
        "pipeline/late_groups", "groups", "groups ended or dropped because a batch waited only for them", "sum"
    )
    yield Metric("pipeline/dropped/length/mean", "tokens", "mean response length of dropped groups")
    yield Metric("pipeline/dropped/reward/mean", "", "mean score of the dropped groups' samples")
    yield Metric("pipeline/learner_idle_ratio", "fraction", "share of the step in which the learner waited")
    yield Metric(
        "pipeline/engine_idle_ratio",
        "fraction",
        "share of the step in which an engine had no request, mean over engines",
    )
    yield from _spread(
        "rollout/seconds",
        "s",
        "the samples' times from request to end, including waits and interruptions",
        "mean min max",
    )
    slowest = "of the sample that took longest"
    yield Metric("rollout/slowest/seconds", "s", f"generation time {slowest}", "slowest")
    yield Metric("rollout/slowest/prompt_length", "tokens", f"prompt length {slowest}", "slowest")
    yield Metric("rollout/slowest/response_length", "tokens", f"response length {slowest}", "slowest")
    yield Metric(
        "rollout/branched_turns",
        "turns",
        "turns that did not continue the earlier tokens because the history was rewritten",
        "sum",
    )
    yield Metric(
        "rollout/recomputed_ratio",
        "",
        "episode tokens whose keys and values engines recomputed, divided by the tokens generated",
    )
    yield Metric("rollout/recomputed_ratio/forced", "", "the part of it caused by publications")
    yield Metric("rollout/diverged_episodes", "episodes", "episodes that could not continue from their record", "sum")
    of_episodes = "of an environment's episodes"
    yield from _spread("num_turns", "", f"messages {of_episodes}: prompt, answers and tool results", "mean min max")
    yield from _spread(
        "tool_call_counts", "calls", f"calls to the world {of_episodes}; an agent's run counts as one", "mean min max"
    )
    yield from _spread("agent_loop/generate_sequences", "s", f"generation times {of_episodes}", "mean min max")
    yield from _spread(
        "agent_loop/tool_calls", "s", f"call times {of_episodes}; an agent's run counts as one", "mean min max"
    )
    slowest = "of the episode whose generation and calls took longest"
    yield Metric("agent_loop/slowest/generate_sequences", "s", f"generation time {slowest}", "slowest")
    yield Metric("agent_loop/slowest/tool_calls", "s", f"time in calls to the world {slowest}", "slowest")
    yield Metric("agent_loop/slowest/prompt_length", "tokens", f"prompt length {slowest}", "slowest")
    yield Metric("agent_loop/slowest/response_length", "tokens", f"response length {slowest}", "slowest")
    yield Metric("rollout/tool_calls", "calls", "tool calls by episodes", "sum")
    yield Metric(
        "rollout/tool_errors", "calls", "tool calls that were malformed, unknown or late, or raised an error", "sum"
    )
    yield Metric(
        "moe/fullest_expert/mean",
        "ratio",
        "tokens routed to a layer's most loaded expert relative to an even share, mean over layers",
    )
    yield Metric("moe/fullest_expert/max", "ratio", "the same for the layer with the largest value", "max")
    yield Metric("moe/idle_experts", "fraction", "experts that got no token")
    yield Metric("moe/replayed", "fraction", "tokens of an update routed to the experts that their engine chose")
    yield Metric(
        "moe/rerouted", "fraction", "of these choices, those that the trainer's routers would have made differently"
    )
    yield from _spread("balance/rank_tokens", "tokens", "the tokens given to each rank", "mean min max")
    yield Metric("balance/rank_tokens/spread", "tokens", "largest minus smallest")
    yield from _spread(
        "balance/unbalanced_tokens", "tokens", "the tokens that each rank would have had without balancing", "min max"
    )


def _time_and_space() -> Iterator[Metric]:
    for stage, covers in STAGES.items():
        if stage in OUTSIDE_STEPS:
            continue
        yield Metric(f"timing/{stage}_seconds", "s", covers, "sum")
    yield Metric(
        "timing/publish_seconds/transfer", "s", "from the first gather until the last engine has verified its weights"
    )
    yield Metric(
        "timing/publish_seconds/engine_pause",
        "s",
        "longest time in which an engine generated no token because of the publication; if running requests finish "
        "first or are interrupted, from the last token until requests may run again",
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
    yield Metric("throughput/tokens_per_second", "tokens/s", "prompt and response tokens divided by the step's seconds")
    yield Metric("throughput/tokens_per_second_per_device", "tokens/s", "the same, divided by the devices of all pools")
    yield Metric("throughput/generated_tokens_per_second", "tokens/s", "response tokens divided by the step's seconds")
    yield Metric("throughput/samples_per_second", "samples/s", "samples divided by the step's seconds")
    yield Metric(
        "throughput/publication_megabytes_per_second", "MB/s", "the new weights' size divided by the transfer's seconds"
    )
    of_peak = "share of the devices' peak FLOPs, counting each sequence separately, in"
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
    yield Metric("memory/device_allocated_gigabytes", "GB", "device memory used by tensors, largest over ranks", "max")
    yield Metric(
        "memory/device_reserved_gigabytes", "GB", "device memory held by the allocator, largest over ranks", "max"
    )
    yield Metric(
        "memory/publication_buffers_megabytes", "MB", "largest extra memory of learner or engine for the publication"
    )
    yield Metric("memory/host_gigabytes/driver", "GB", "resident memory of the driver's process", "last")
    yield Metric("memory/host_gigabytes/trainer", "GB", "resident memory of all ranks' processes together", "last")


def _validation() -> Iterator[Metric]:
    of_prompts = "mean over the prompts of one data source of"
    for prefix, what, expected in (
        ("validation/<source>", "the score (1 or 0 where correctness is known)", "expected score of"),
        ("validation/<source>/<variable>", "the variable (e.g. a reward part)", "expected value of the variable for"),
    ):
        yield Metric(f"{prefix}/mean@<n>", "", f"{of_prompts} the mean over n samples of {what}")
        yield Metric(f"{prefix}/std@<n>", "", f"{of_prompts} the standard deviation over n samples of {what}")
        for choice, chosen in (
            ("best", "the best of k samples"),
            ("worst", "the worst of k samples"),
            ("maj", "the most frequent answer among k samples"),
        ):
            yield Metric(f"{prefix}/{choice}@<k>/mean", "", f"{of_prompts} the {expected} {chosen}")
            yield Metric(f"{prefix}/{choice}@<k>/std", "", f"{of_prompts} its standard deviation over draws of k")
    yield Metric(
        "validation/<source>/pass@<k>",
        "",
        f"{of_prompts} the probability that any of k samples is correct (unbiased: arXiv 2107.03374, equation 1)",
    )
    yield Metric("validation/<source>/response_length/mean", "tokens", "mean length of the responses")
    yield Metric("validation/<source>/response_length/clip_ratio", "fraction", "responses cut at the limit")
    yield Metric("validation/<source>/prompts", "prompts", "prompts evaluated")
    yield Metric(
        "validation/step", "steps", "for validation during training: the step whose weights were evaluated", "last"
    )
    yield Metric("validation/mean", "", "mean over data sources of their mean@n")


METRICS: tuple[Metric, ...] = tuple(_metrics())
"""All metrics, in the order of the documentation."""
