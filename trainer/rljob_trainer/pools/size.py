"""How many engines a job has, and how many requests run at once in each. Known without starting anything."""

from __future__ import annotations

from rljob_api.resolved import ResolvedSpec
from rljob_api.spec.pools import JudgePool, RolloutSpec

_TORCH_CONCURRENT = 512
"""Small models, which the torch engine is for, profit from wide batches."""
_VLLM_CONCURRENT = 256


def engine_count(spec: ResolvedSpec) -> int:
    """Colocated engines are as many as fill the ranks' devices."""
    return spec.rollout.replicas


def response_lengths(spec: ResolvedSpec) -> dict[str, int]:
    """The longest responses of training and of each validation set that says its own, tokens, by field."""
    lengths = {"spec.rollout.maxResponseTokens": spec.rollout.max_response_tokens}
    for index, part in enumerate(spec.data.validation):
        if part.sampling.max_response_tokens is not None:
            field = f"spec.data.validation[{index}].sampling.maxResponseTokens"
            lengths[field] = part.sampling.max_response_tokens
    return lengths


def max_concurrent(pool: RolloutSpec | JudgePool) -> int:
    """Sequences that are sampled side by side in one engine."""
    return pool.max_concurrent or (_TORCH_CONCURRENT if pool.engine == "torch" else _VLLM_CONCURRENT)


def in_hand(concurrent: int) -> int:
    """Requests below which an engine that samples so many side by side is handed another group.

    A few wait inside for a place, so that none stays empty for the length of a call; the others wait in the driver, for
    whichever engine has room first: what waits inside a slow one would wait for that one.
    """
    return concurrent + max(1, concurrent // 4)
