"""Reward functions as they are written for verl and for TRL, with the signatures of their documentation."""

from __future__ import annotations

import asyncio
import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any) -> Any:
    """verl's: a number for one data source, a dictionary for another."""
    if data_source == "openai/gsm8k":
        return float(solution_str == ground_truth)
    return {
        "score": 0.5,
        "acc": solution_str in ground_truth["target"],
        "pred": solution_str,
        "split": extra_info["split"] == "train",
        "turns": extra_info["num_turns"],
        "cut": extra_info["truncated"],
        "remark": "not a number",
        "infinite": float("inf"),
        "bonus": kwargs["bonus"],
    }


async def compute_score_by_a_service(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return {"score": len(solution_str) / 100, "index": extra_info["index"]}


def many_numbers(solution_str: str, ground_truth: str) -> dict[str, float]:
    return {"score": 1.0} | {f"number {i}": 0.0 for i in range(33)}


def length_reward(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [float(len(completion)) for completion in completions]


def format_reward(completions, **kwargs):  # type: ignore[no-untyped-def]
    """For conversations."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", content) else 0.0 for content in contents]


def reference_reward(completions, ground_truth, **kwargs):  # type: ignore[no-untyped-def]
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]  # noqa: B905


def math_only(prompts, completions, task, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0 if t == "math" else None for prompt, completion, t in zip(prompts, completions, task)]  # noqa: B905


async def awaited(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


def what_it_gets(prompts, completions, answer, log_metric=None, **kwargs):  # type: ignore[no-untyped-def]
    assert log_metric is None
    assert "prompt" not in kwargs
    assert kwargs["level"] == [3]
    return [{"score": 1.0, "prediction": repr((prompts, completions, answer))}]


def two_for_one(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0, 2.0]


def a_number(completions, **kwargs):  # type: ignore[no-untyped-def]
    return 1.0


def mixed(response, completions):  # type: ignore[no-untyped-def]
    return 1.0


def whole_batch(data_sources, solution_strs, ground_truths, extra_infos):  # type: ignore[no-untyped-def]
    return [0.0 for _ in solution_strs]


def token_lengths(completion_ids, **kwargs):  # type: ignore[no-untyped-def]
    return [float(len(ids)) for ids in completion_ids]


def by_a_model(data_source, solution_str, ground_truth, extra_info, reward_router_address):  # type: ignore[no-untyped-def]
    return 0.0
