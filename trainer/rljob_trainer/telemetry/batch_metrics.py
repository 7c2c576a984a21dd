"""What a batch says about itself: pure functions from flat streams to metrics under their public names.

Streams are ``[tokens]`` over the response tokens of S sequences, with ``offsets [S + 1]`` and ``mask [tokens]`` (True:
trained on); what is masked cannot matter, even NaN. Everything is reduced in float64. Standard deviations are those of
the population, so a batch of one has 0. A metric whose ingredients are missing or empty is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rljob_trainer.episodes.episode import FinishReason
from rljob_trainer.telemetry.names import metric

Array = npt.NDArray[Any]
Metrics = dict[str, float]


def spread(name: str, values: Array, statistics: Sequence[str] = ("mean", "min", "max", "std")) -> Metrics:
    """``name/mean``, ``name/min``, ``name/max`` and ``name/std`` of any array; nothing of an empty one."""
    if values.size == 0:
        return {}
    values = values.astype(np.float64, copy=False)
    return {f"{name}/{statistic}": float(getattr(values, statistic)()) for statistic in statistics}


def stream_metrics(name: str, stream: Array | None, mask: Array) -> Metrics:
    """The spread of a per-token stream ``[tokens]`` over the tokens that are trained on."""
    return {} if stream is None else spread(name, stream[mask])


def reward_metrics(
    scores: Array,
    groups: Array,
    *,
    penalised: Array | None = None,
    parts: Mapping[str, Array] | None = None,
    sources: Sequence[str] | None = None,
    correct: Sequence[bool | None] | None = None,
    errors: int = 0,
) -> Metrics:
    """Scores of S samples, what they are made of, and how much of them is signal.

    ``scores [S]``; ``groups [S]`` says which prompt group a sample belongs to (any integers); ``penalised [S]`` are the
    rewards less the KL; ``parts`` the reward functions' values ``[S]`` by name (NaN where a function
    was not asked); ``correct`` None where a sample was not judged; ``errors`` counts samples scored without a verdict.
    """
    scores = scores.astype(np.float64)
    result = spread("reward", scores)
    if not result:
        return {}
    if penalised is not None:
        result |= spread("reward/penalised", penalised)
    for name, values in (parts or {}).items():
        asked = np.asarray(values, dtype=np.float64)
        result |= spread(metric("reward/part/<part>/mean", part=name).removesuffix("/mean"), asked[~np.isnan(asked)])
    if sources is not None:
        labels = np.asarray(sources)
        for source in sorted(set(sources)):
            result[metric("reward/source/<source>/mean", source=source)] = float(scores[labels == source].mean())
    judged = [verdict for verdict in correct or () if verdict is not None]
    if judged:
        result["reward/correct_ratio"] = sum(judged) / len(judged)
    return result | {"reward/error_ratio": errors / len(scores)} | _signal_metrics(scores, groups)


def _signal_metrics(scores: Array, groups: Array) -> Metrics:
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    lowest = np.full(len(sizes), np.inf)
    highest = np.full(len(sizes), -np.inf)
    np.minimum.at(lowest, member, scores)
    np.maximum.at(highest, member, scores)
    means = np.bincount(member, weights=scores) / sizes
    variances = np.bincount(member, weights=(scores - means[member]) ** 2) / sizes
    flat = lowest == highest
    return {
        "reward/group_std/mean": float(np.sqrt(variances).mean()),
        "reward/no_signal_ratio": float(flat.mean()),
        "reward/all_lowest_ratio": float((flat & (lowest == scores.min())).mean()),
        "reward/all_highest_ratio": float((flat & (highest == scores.max())).mean()),
    }


def explained_variance(returns: Array, values: Array, mask: Array) -> float | None:
    """1 - var(return - value) / var(return) over the tokens trained on; None if the returns do not vary."""
    targets = returns[mask].astype(np.float64)
    variance = float(targets.var()) if targets.size else 0.0
    if variance == 0.0:
        return None
    return 1.0 - float((targets - values[mask].astype(np.float64)).var()) / variance


def length_metrics(
    prompt_lengths: Array,
    response_lengths: Array,
    finish: Sequence[FinishReason],
    *,
    max_prompt_tokens: int | None = None,
) -> Metrics:
    """Lengths ``[S]`` of prompts and responses in tokens, and why the responses ended."""
    three = ("mean", "min", "max")
    result = spread("prompt/length", prompt_lengths, three) | spread("response/length", response_lengths, three)
    if not result:
        return {}
    if max_prompt_tokens is not None:
        result["prompt/length/clip_ratio"] = float((prompt_lengths >= max_prompt_tokens).mean())
    reasons = np.asarray(finish)
    cut = reasons == "length"
    aborted = (reasons == "aborted") | (response_lengths == 0)
    result["response/length/clip_ratio"] = float(cut.mean())
    result["response/late_ratio"] = float((reasons == "deadline").mean())
    result["response/aborted_ratio"] = float(aborted.mean())
    result |= spread("response/completed_length", response_lengths[~aborted], three)
    if not aborted.all():
        result["response/completed_length/clip_ratio"] = float(cut[~aborted].mean())
    return result


def turns(mask: Array, offsets: Array, leaf_offsets: Array | None = None) -> Array:
    """``[S]``: how often the policy speaks in each response: runs of tokens that are trained on, between the masked.

    1 in a response without tool output; 0 in one that is empty or left out whole. ``leaf_offsets``: where the sequences
    begin that responses consist of, which are more where history was rewritten; None: one each.
    """
    starts = offsets if leaf_offsets is None else leaf_offsets
    begins = mask.copy()
    begins[1:] &= ~mask[:-1]
    firsts = starts[:-1][np.diff(starts) > 0]
    begins[firsts] = mask[firsts]  # whatever the response in front of it ends with
    before = np.concatenate([[0], np.cumsum(begins)])
    return np.diff(before[offsets])


def generation_metrics(seconds: Array, prompt_lengths: Array, response_lengths: Array) -> Metrics:
    """How long samples took ``[S]``, and the one that took longest: what a long tail is made of."""
    result = spread("rollout/seconds", seconds, ("mean", "min", "max"))
    if result:
        slowest = int(seconds.argmax())
        result["rollout/slowest/seconds"] = float(seconds[slowest])
        result["rollout/slowest/prompt_length"] = float(prompt_lengths[slowest])
        result["rollout/slowest/response_length"] = float(response_lengths[slowest])
    return result


def oldest_versions(versions: Array, offsets: Array, groups: Array) -> tuple[Array, Array]:
    """The distinct ``groups`` that have tokens, and the oldest of ``versions [tokens]`` in each."""
    sequences = np.flatnonzero(np.diff(offsets))  # reduceat needs sequences that have tokens
    if sequences.size == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    found, member = np.unique(groups[sequences], return_inverse=True)
    oldest = np.full(len(found), np.iinfo(np.int64).max)
    np.minimum.at(oldest, member, np.minimum.reduceat(versions, offsets[sequences]))
    return found, oldest


def age_metrics(trainer_version: int, versions: Array, offsets: Array, groups: Array) -> Metrics:
    """Ages: ``trainer_version`` less the oldest of ``versions [tokens]`` in each of ``groups [S]``, or each of them."""
    found, oldest = oldest_versions(versions, offsets, groups)
    if found.size == 0:
        return {}
    sequences = np.flatnonzero(np.diff(offsets))
    starts = offsets[sequences]
    mixed = np.minimum.reduceat(versions, starts) != np.maximum.reduceat(versions, starts)
    return spread("age", trainer_version - oldest, ("mean", "min", "max")) | {
        "age/token_mean": float(trainer_version - versions.mean(dtype=np.float64)),
        "age/mixed_ratio": float(mixed.mean()),
        "age/mixed_group_ratio": len(np.unique(groups[sequences][mixed])) / len(found),
    }


def optimizer_step_metrics(
    moved: Mapping[int, int], mini_batches: Sequence[Sequence[int]], groups: Array, taken: int
) -> Metrics:
    """How many optimizer steps away the weights were from those of a group's oldest token, each time it was trained on.

    ``moved``: by how many they were when the update began, for each group that has tokens; ``groups [S]`` of the
    sequences that ``mini_batches`` name; ``taken``: the steps of this update, fewer than mini-batches where some were
    left out.
    """
    distances = [
        moved[group] + min(place, taken)
        for place, mini_batch in enumerate(mini_batches)
        for group in np.unique(groups[np.asarray(mini_batch, np.int64)]).tolist()
        if group in moved
    ]
    return spread("age/optimizer_steps", np.array(distances), ("mean", "max"))


@dataclass(frozen=True, slots=True)
class PlayedTurns:
    """What there is to say of episodes of many turns, of which there are S; A answers of the model in all."""

    answers: Array  # [S]
    answer_tokens: Array  # [A]
    calls: Array  # [S] of the world
    call_seconds: Array  # [S]


def turn_metrics(played: PlayedTurns, seconds: Array, prompt_lengths: Array, response_lengths: Array) -> Metrics:
    """Turns, tokens by turn, calls and seconds, under the names that verl has for the same quantities.

    ``seconds [S]``: of generation. The slowest sample is that whose generation and calls took longest.
    """
    three = ("mean", "min", "max")
    # A prompt, an answer, what it was told, an answer ...
    result = spread("num_turns", 2 * played.answers, three) | spread("tool_call_counts", played.calls, three)
    result |= spread("response/turn_tokens", played.answer_tokens, three)
    result |= spread("agent_loop/generate_sequences", seconds, three)
    result |= spread("agent_loop/tool_calls", played.call_seconds, three)
    if len(seconds):
        slowest = int((seconds + played.call_seconds).argmax())
        result["agent_loop/slowest/generate_sequences"] = float(seconds[slowest])
        result["agent_loop/slowest/tool_calls"] = float(played.call_seconds[slowest])
        result["agent_loop/slowest/prompt_length"] = float(prompt_lengths[slowest])
        result["agent_loop/slowest/response_length"] = float(response_lengths[slowest])
    return result


@dataclass(frozen=True, slots=True)
class BatchStreams:
    """Everything the batch metrics of a step are made of; shapes as in the module's docstring."""

    prompt_lengths: Array  # [S]
    offsets: Array  # [S + 1]
    mask: Array  # [tokens]
    scores: Array  # [S]
    groups: Array  # [S]
    finish: Sequence[FinishReason]  # [S]
    penalised: Array | None = None  # [S]
    parts: Mapping[str, Array] | None = None  # each [S]
    sources: Sequence[str] | None = None  # [S]
    correct: Sequence[bool | None] | None = None  # [S]
    errors: int = 0
    advantages: Array | None = None  # [tokens]
    returns: Array | None = None  # [tokens]
    values: Array | None = None  # [tokens]
    old_log_probs: Array | None = None  # [tokens]
    ref_log_probs: Array | None = None  # [tokens]
    versions: Array | None = None  # [tokens]
    trainer_version: int = 0
    seconds: Array | None = None  # [S]
    max_prompt_tokens: int | None = None
    leaf_offsets: Array | None = None  # [leaves + 1]
    played: PlayedTurns | None = None


def batch_metrics(batch: BatchStreams) -> Metrics:
    """All metrics of a step that follow from its batch: rewards, streams, lengths, ages, KL to the reference."""
    mask = batch.mask.astype(bool)
    result = reward_metrics(
        batch.scores,
        batch.groups,
        penalised=batch.penalised,
        parts=batch.parts,
        sources=batch.sources,
        correct=batch.correct,
        errors=batch.errors,
    )
    for name, stream in (("advantage", batch.advantages), ("return", batch.returns), ("value", batch.values)):
        result |= stream_metrics(name, stream, mask)
    if batch.returns is not None and batch.values is not None:
        explained = explained_variance(batch.returns, batch.values, mask)
        if explained is not None:
            result["critic/explained_variance"] = explained
    lengths = np.diff(batch.offsets)
    result |= length_metrics(batch.prompt_lengths, lengths, batch.finish, max_prompt_tokens=batch.max_prompt_tokens)
    if batch.seconds is not None:
        result |= generation_metrics(batch.seconds, batch.prompt_lengths, lengths)
        if batch.played is not None:
            result |= turn_metrics(batch.played, batch.seconds, batch.prompt_lengths, lengths)
    if mask.size:
        result["response/trained_ratio"] = float(mask.mean())
    result |= spread("response/turns", turns(mask, batch.offsets, batch.leaf_offsets), ("mean", "min", "max"))
    if batch.old_log_probs is not None and batch.ref_log_probs is not None and mask.any():
        difference = batch.old_log_probs[mask].astype(np.float64) - batch.ref_log_probs[mask]
        result["kl/reference"] = float(difference.mean())
    if batch.versions is not None:
        result |= age_metrics(batch.trainer_version, batch.versions, batch.offsets, batch.groups)
    return result


def balance_metrics(rank_tokens: Array, unbalanced: Array | None = None) -> Metrics:
    """Tokens per rank ``[ranks]``, and what they would have been in the order of the batch."""
    result = spread("balance/rank_tokens", rank_tokens, ("mean", "min", "max"))
    if result:
        result["balance/rank_tokens/spread"] = float(rank_tokens.max() - rank_tokens.min())
    if unbalanced is not None:
        result |= spread("balance/unbalanced_tokens", unbalanced, ("min", "max"))
    return result
