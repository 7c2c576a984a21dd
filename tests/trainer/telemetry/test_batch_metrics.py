"""Batch metrics against numbers worked out by hand or by plain Python."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.telemetry.batch_metrics import (
    BatchStreams,
    PlayedTurns,
    age_metrics,
    balance_metrics,
    batch_metrics,
    explained_variance,
    generation_metrics,
    length_metrics,
    optimizer_step_metrics,
    reward_metrics,
    spread,
    turn_metrics,
    turns,
)
from rljob_trainer.telemetry.names import check_all
from rljob_trainer.telemetry.speed import (
    ModelSize,
    forward_flops,
    peak_flops,
    throughput_metrics,
    timing_metrics,
    utilisation_metrics,
)

# Two prompts, two samples each: tokens 2, 3, 1, 0; the second token of sample 1 is tool output.
OFFSETS = np.array([0, 2, 5, 6, 6])
MASK = np.array([True, True, True, False, True, True])


def test_spread_is_mean_min_max_and_population_std() -> None:
    got = spread("reward", np.array([1, 2, 3, 6], dtype=np.float32))
    assert got == pytest.approx(
        {"reward/mean": 3, "reward/min": 1, "reward/max": 6, "reward/std": math.sqrt((4 + 1 + 0 + 9) / 4)}
    )
    assert spread("reward", np.array([])) == {}


def test_sums_of_many_float32_do_not_drift() -> None:
    values = np.full(1_000_001, 0.1, dtype=np.float32)
    assert spread("advantage", values)["advantage/std"] < 1e-9
    assert spread("advantage", values)["advantage/mean"] == pytest.approx(float(np.float32(0.1)), rel=1e-12)


def test_rewards_by_part_source_and_verdict() -> None:
    got = reward_metrics(
        np.array([1.0, 0.0, 0.5, 0.5]),
        np.array([7, 7, 9, 9]),
        penalised=np.array([0.9, -0.1, 0.4, 0.4]),
        parts={"exact": np.array([1.0, 0.0, 0.5, 0.5]), "format/x": np.array([1.0, math.nan, 0.0, math.nan])},
        sources=["a", "a", "b", "b"],
        correct=[True, False, None, None],
        errors=1,
    )
    expected = {
        "reward/mean": 0.5,
        "reward/penalised/mean": 0.4,
        "reward/penalised/min": -0.1,
        "reward/part/exact/std": math.sqrt(0.125),
        "reward/part/format-x/mean": 0.5,
        "reward/source/a/mean": 0.5,
        "reward/source/b/mean": 0.5,
        "reward/correct_ratio": 0.5,
        "reward/error_ratio": 0.25,
        "reward/group_std/mean": 0.25,  # 0.5 and 0
        "reward/no_signal_ratio": 0.5,
        "reward/all_lowest_ratio": 0.0,  # the flat group scores 0.5: neither the lowest nor the highest
        "reward/all_highest_ratio": 0.0,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)
    check_all(got)


def test_groups_without_signal_are_told_apart() -> None:
    got = reward_metrics(np.array([0, 0, 1, 1, 0, 1, 1, 1.0]), np.array([0, 0, 1, 1, 2, 2, 3, 3]))
    assert got["reward/no_signal_ratio"] == 0.75
    assert got["reward/all_lowest_ratio"] == 0.25
    assert got["reward/all_highest_ratio"] == 0.5


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100, width=32)), min_size=1, max_size=30))
def test_group_statistics_equal_plain_python(samples: list[tuple[int, float]]) -> None:
    groups, scores = zip(*samples, strict=True)
    members = {g: [s for h, s in samples if h == g] for g in set(groups)}
    got = reward_metrics(np.array(scores), np.array(groups))
    assert got["reward/group_std/mean"] == pytest.approx(
        statistics.fmean(statistics.pstdev(m) for m in members.values()), abs=1e-6
    )
    assert got["reward/no_signal_ratio"] == pytest.approx(statistics.fmean(len(set(m)) == 1 for m in members.values()))


def test_explained_variance_of_known_critics() -> None:
    returns = np.array([0.0, 1.0, 2.0, 3.0, 99.0])
    mask = np.array([True, True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns, np.full(5, 7.0), mask) == pytest.approx(0.0)
    # Off by +-0.5 in turn: var(error) = 0.25, var(returns) = 1.25.
    assert explained_variance(returns, returns + np.array([0.5, -0.5, 0.5, -0.5, math.nan]), mask) == pytest.approx(0.8)
    assert explained_variance(np.ones(5), returns, mask) is None
    assert explained_variance(returns, returns, np.zeros(5, dtype=bool)) is None


def test_lengths_and_ends() -> None:
    got = length_metrics(
        np.array([4, 4, 8, 8]), np.array([2, 3, 1, 0]), ["deadline", "length", "aborted", "stop"], max_prompt_tokens=8
    )
    assert got == pytest.approx(
        {
            "prompt/length/mean": 6,
            "prompt/length/min": 4,
            "prompt/length/max": 8,
            "prompt/length/clip_ratio": 0.5,
            "response/length/mean": 1.5,
            "response/length/min": 0,
            "response/length/max": 3,
            "response/length/clip_ratio": 0.25,
            "response/late_ratio": 0.25,
            "response/aborted_ratio": 0.5,  # one aborted, one empty
            "response/completed_length/mean": 2.5,
            "response/completed_length/min": 2,
            "response/completed_length/max": 3,
            "response/completed_length/clip_ratio": 0.5,
        }
    )


def test_when_all_are_aborted_nothing_is_said_about_completed_ones() -> None:
    got = length_metrics(np.array([1]), np.array([5]), ["aborted"])
    assert got["response/aborted_ratio"] == 1
    assert not [name for name in got if "completed" in name]


def test_the_slowest_sample_is_described() -> None:
    assert generation_metrics(np.array([1.0, 4.0, 1.0]), np.array([5, 6, 7]), np.array([8, 90, 10])) == {
        "rollout/seconds/mean": 2.0,
        "rollout/seconds/min": 1.0,
        "rollout/seconds/max": 4.0,
        "rollout/slowest/seconds": 4.0,
        "rollout/slowest/prompt_length": 6.0,
        "rollout/slowest/response_length": 90.0,
    }


def test_age_is_that_of_a_groups_oldest_token() -> None:
    versions = np.array([5, 5, 3, 4, 4, 6])
    got = age_metrics(6, versions, OFFSETS, np.array([0, 0, 1, 1]))
    # group 0: oldest 3 -> age 3; group 1: 6 -> age 0. Sample 1 is made of two versions, of three samples with tokens.
    expected = {"age/mean": 1.5, "age/min": 0, "age/max": 3, "age/mixed_ratio": 1 / 3, "age/mixed_group_ratio": 1 / 2}
    # The tokens' ages: 1 1 3 2 2 0.
    assert got == pytest.approx(expected | {"age/token_mean": 9 / 6})
    assert age_metrics(6, np.array([]), np.array([0, 0]), np.array([0])) == {}


@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=8))
def test_turns_are_the_runs_of_trained_tokens_between_tool_output(kept: list[list[bool]]) -> None:
    expected = [sum(1 for trained, _ in itertools.groupby(response) if trained) for response in kept]
    offsets = np.cumsum([0, *map(len, kept)])
    assert turns(np.array([*itertools.chain(*kept)], dtype=bool), offsets).tolist() == expected


def test_optimizer_steps_are_counted_to_each_mini_batch_that_has_the_group() -> None:
    groups = np.array([0, 0, 1, 1, 2, 2])
    twice = [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5]]
    # Group 0 at steps 0 and 2, 3 before; group 1 at the same, none before; group 2 has no token.
    assert optimizer_step_metrics({0: 3, 1: 0}, twice, groups, taken=4) == {
        "age/optimizer_steps/mean": (3 + 0 + 5 + 2) / 4,
        "age/optimizer_steps/max": 5,
    }
    # A policy that is not updated (warm-up of the critic) does not move.
    assert optimizer_step_metrics({0: 3, 1: 0, 2: 1}, twice, groups, taken=0)["age/optimizer_steps/max"] == 3
    assert optimizer_step_metrics({}, twice, groups, taken=4) == {}


def test_what_is_masked_cannot_matter() -> None:
    def streams(fill: float) -> BatchStreams:
        def stream(start: float) -> np.ndarray:
            values = np.arange(start, start + 6, dtype=np.float32)
            values[3] = fill
            return values

        return BatchStreams(
            prompt_lengths=np.array([4, 4, 5, 5]),
            offsets=OFFSETS,
            mask=MASK,
            scores=np.array([1.0, 0.0, 1.0, 0.0]),
            groups=np.array([0, 0, 1, 1]),
            finish=["stop", "length", "stop", "stop"],
            advantages=stream(-2),
            returns=stream(0),
            values=stream(1),
            old_log_probs=-stream(1),
            ref_log_probs=-stream(1.5),
            versions=np.zeros(6, dtype=np.int32),
        )

    got = batch_metrics(streams(math.nan))
    assert got == batch_metrics(streams(1e9))
    check_all(got)
    assert all(math.isfinite(value) for value in got.values())
    assert got["advantage/mean"] == pytest.approx((-2 - 1 + 0 + 2 + 3) / 5)
    assert got["kl/reference"] == pytest.approx(0.5)
    assert got["critic/explained_variance"] == pytest.approx(1.0)  # off by a constant
    assert got["response/trained_ratio"] == pytest.approx(5 / 6)
    assert (got["response/turns/mean"], got["response/turns/max"]) == (1.0, 2.0)  # 1, 2, 1 and 0


def test_turns_calls_and_seconds_of_an_environment_s_episodes() -> None:
    played = PlayedTurns(
        answers=np.array([1, 3]),
        answer_tokens=np.array([4, 2, 3, 7]),
        calls=np.array([0, 5]),
        call_seconds=np.array([0.0, 2.5]),
    )
    got = turn_metrics(played, np.array([4.0, 3.0]), np.array([10, 20]), np.array([4, 15]))
    check_all(got)
    # As verl counts: prompt and answer are two; prompt and three answers with what was told in between are six.
    assert [got[f"num_turns/{one}"] for one in ("mean", "min", "max")] == [4.0, 2.0, 6.0]
    assert [got[f"tool_call_counts/{one}"] for one in ("mean", "min", "max")] == [2.5, 0.0, 5.0]
    assert [got[f"response/turn_tokens/{one}"] for one in ("mean", "min", "max")] == [4.0, 2.0, 7.0]
    assert [got[f"agent_loop/generate_sequences/{one}"] for one in ("mean", "min", "max")] == [3.5, 3.0, 4.0]
    assert [got[f"agent_loop/tool_calls/{one}"] for one in ("mean", "min", "max")] == [1.25, 0.0, 2.5]
    slowest = {name: got[f"agent_loop/slowest/{name}"] for name in ("generate_sequences", "tool_calls")}
    assert slowest == {"generate_sequences": 3.0, "tool_calls": 2.5}
    assert [got[f"agent_loop/slowest/{one}_length"] for one in ("prompt", "response")] == [20.0, 15.0]


def test_an_empty_batch_has_no_metrics() -> None:
    nothing = np.array([])
    empty = BatchStreams(nothing, np.array([0]), np.array([], dtype=bool), nothing, nothing, [])
    assert batch_metrics(empty) == {}


def test_balance() -> None:
    got = balance_metrics(np.array([100, 110, 90]), np.array([300, 0, 0]))
    assert got == {
        "balance/rank_tokens/mean": 100,
        "balance/rank_tokens/min": 90,
        "balance/rank_tokens/max": 110,
        "balance/rank_tokens/spread": 20,
        "balance/unbalanced_tokens/min": 0,
        "balance/unbalanced_tokens/max": 300,
    }
    check_all(got)


def test_timing_per_token() -> None:
    got = timing_metrics(
        {"step": 4.0, "generate": 2.0, "update_actor": 1.0, "publish": 0.5}, all_tokens=1000, response_tokens=500
    )
    assert got == pytest.approx(
        {
            "timing/step_seconds": 4,
            "timing/generate_seconds": 2,
            "timing_per_token/generate_milliseconds": 4,
            "timing/update_actor_seconds": 1,
            "timing_per_token/update_actor_milliseconds": 1,
            "timing/publish_seconds": 0.5,
        }
    )
    check_all(got)
    with pytest.raises(KeyError, match="'sleep' is not a stage"):
        timing_metrics({"sleep": 1.0}, all_tokens=1, response_tokens=1)


def test_throughput() -> None:
    got = throughput_metrics(step_seconds=2, prompt_tokens=100, response_tokens=300, samples=10, devices=4)
    assert got == {
        "throughput/tokens": 400,
        "throughput/tokens_per_second": 200,
        "throughput/tokens_per_second_per_device": 50,
        "throughput/generated_tokens_per_second": 150,
        "throughput/samples_per_second": 5,
    }
    check_all(got)
    assert throughput_metrics(step_seconds=0, prompt_tokens=1, response_tokens=1, samples=1, devices=1) == {
        "throughput/tokens": 2
    }


def test_flops_count_matrix_products_and_causal_attention() -> None:
    model = ModelSize(parameters=1000, layers=2, width=8)
    # A token at position i attends to i + 1 positions: QK and AV cost 2 * width each per position and layer.
    attention = sum(2 * 2 * 2 * 8 * (i + 1) for i in range(5))
    assert forward_flops(model, [5]) == 2 * 1000 * 5 + attention
    assert forward_flops(model, [5, 5]) == 2 * forward_flops(model, [5])


def test_utilisation_is_a_share_of_the_peak_and_absent_on_cpus() -> None:
    got = utilisation_metrics(
        forward=1e12,
        critic_forward=2e12,
        peak_flops=1e12,
        devices=2,
        epochs=2,
        actor_update_seconds=6.0,
        critic_update_seconds=8.0,
        inference_seconds=1.0,
    )
    assert got == pytest.approx(
        {
            "throughput/model_flops_utilisation/actor": 0.5,
            "throughput/model_flops_utilisation/critic": 0.75,
            "throughput/model_flops_utilisation/actor_inference": 0.5,
        }
    )
    check_all(got)
    assert utilisation_metrics(forward=1e12, peak_flops=None, devices=2, actor_update_seconds=1) == {}


def test_peaks_by_device_name() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    # Neither a faster one nor a slower one with a name that is longer.
    assert peak_flops("NVIDIA H100 NVL") == 835e12
    assert peak_flops("NVIDIA L40") == 181e12
    assert peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("NVIDIA A10G") == 70e12
    assert peak_flops("NVIDIA GB200") is None
    assert peak_flops("a CPU") is None


def test_a_turn_ends_with_its_sequence_where_history_was_rewritten() -> None:
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 0], dtype=bool)
    assert turns(mask, np.array([0, 5, 8])).tolist() == [2, 1]
    # The first response is two sequences, of three tokens and two; the second three, of which one was left out.
    assert turns(mask, np.array([0, 5, 8]), np.array([0, 2, 5, 6, 7, 8])).tolist() == [2, 1]
    assert turns(mask, np.array([0, 5, 8]), np.array([0, 1, 5, 6, 7, 8])).tolist() == [3, 1]
