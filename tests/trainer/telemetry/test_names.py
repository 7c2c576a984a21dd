"""The catalogue of metrics is consistent, covers what users of other trainers expect, and is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_trainer.telemetry.catalogue import FAMILIES, METRICS, REDUCTIONS, STAGES
from rljob_trainer.telemetry.names import UnknownMetricError, check, check_all, markdown, metric

ROOT = Path(__file__).resolve().parents[3]


def test_every_name_is_listed_once_and_belongs_to_a_described_family() -> None:
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names))
    assert {m.family for m in METRICS} == set(FAMILIES)


def test_entries_are_well_formed() -> None:
    for entry in METRICS:
        assert re.fullmatch(r"[a-z_]+(/[a-z0-9_@<>]+)+", entry.name), entry
        assert entry.description, entry
        assert not entry.description.endswith("."), entry
        assert entry.reduction in REDUCTIONS, entry


def test_metrics_page_is_what_the_catalogue_says() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    assert page == markdown(), "run: python -m rljob_trainer.telemetry.names > docs/metrics.md"


def test_every_metric_is_on_the_page() -> None:
    page = markdown()
    assert all(f"| `{m.name}` |" in page for m in METRICS)


def test_every_stage_of_a_step_has_a_timing_and_others_have_none() -> None:
    check_all(f"timing/{stage}_seconds" for stage in STAGES if stage not in ("start", "other"))
    with pytest.raises(UnknownMetricError):
        check("timing/start_seconds")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/part/format/mean", "reward/part/<part>/mean"),
        ("validation/gsm8k/mean@8", "validation/<source>/mean@<n>"),
        ("validation/gsm8k/best@4/std", "validation/<source>/best@<k>/std"),
        ("validation/gsm8k/format/maj@4/mean", "validation/<source>/<variable>/maj@<k>/mean"),
        ("validation/gsm8k/response_length/mean", "validation/<source>/response_length/mean"),
        ("rollout_correction/rejection/seq_mean_k1/max", "rollout_correction/rejection/<rule>/max"),
    ],
)
def test_a_name_with_parts_finds_its_entry(name: str, entry: str) -> None:
    assert check(name).name == entry


@pytest.mark.parametrize(
    "name",
    ["reward", "reward/meen", "validation/gsm8k/mean@", "validation/gsm8k/mean@x", "validation/<source>/mean@1", ""],
)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(UnknownMetricError, match="is not a metric"):
        check(name)


def test_a_refusal_names_the_nearest_metric() -> None:
    with pytest.raises(UnknownMetricError, match="actor/entropy"):
        check("actor/entropi")


def test_parts_are_filled_in_and_cleaned() -> None:
    assert metric("validation/<source>/mean@<n>", source="gsm8k", n=8) == "validation/gsm8k/mean@8"
    assert metric("reward/source/<source>/mean", source="openai/gsm8k test") == "reward/source/openai-gsm8k-test/mean"
    check(metric("reward/part/<part>/mean", part="a/b c"))


def test_wrong_parts_are_refused() -> None:
    with pytest.raises(UnknownMetricError, match="needs the parts"):
        metric("validation/<source>/mean@<n>", source="gsm8k")
    with pytest.raises(UnknownMetricError, match="is not a metric"):
        metric("validation/<thing>/mean", thing="x")


COUNTERPARTS = {
    # What verl reports (its metric_utils), so that nobody who moves here misses a curve.
    "critic/score/mean": "reward/mean",
    "critic/rewards/mean": "reward/penalised/mean",
    "critic/advantages/max": "advantage/max",
    "critic/returns/min": "return/min",
    "critic/values/mean": "value/mean",
    "critic/vf_explained_var": "critic/explained_variance",
    "response_length/clip_ratio": "response/length/clip_ratio",
    "response_length_non_aborted/mean": "response/completed_length/mean",
    "response/aborted_ratio": "response/aborted_ratio",
    "prompt_length/clip_ratio": "prompt/length/clip_ratio",
    "timing_s/gen": "timing/generate_seconds",
    "timing_s/old_log_prob": "timing/old_log_probs_seconds",
    "timing_s/update_weights": "timing/publish_seconds",
    "timing_s/testing": "timing/validation_seconds",
    "timing_s/save_checkpoint": "timing/checkpoint_seconds",
    "timing_per_token_ms/update_actor": "timing_per_token/update_actor_milliseconds",
    "perf/total_num_tokens": "throughput/tokens",
    "perf/time_per_step": "timing/step_seconds",
    "perf/throughput": "throughput/tokens_per_second_per_device",
    "perf/mfu/actor_infer": "throughput/model_flops_utilisation/actor_inference",
    "perf/max_memory_allocated_gb": "memory/device_allocated_gigabytes",
    "perf/cpu_memory_used_gb": "memory/host_gigabytes/trainer",
    "variance_proxy/proxy1_signal_strength": "variance/signal_strength",
    "variance_proxy/expected_w": "variance/weight",
    "actor/pg_loss": "actor/policy_loss",
    "actor/kl_loss": "kl/in_loss",
    "actor/kl_coef": "kl/coefficient",
    "actor/ppo_kl": "actor/approx_kl",
    "actor/pg_clipfrac": "actor/clip_fraction",
    "actor/pg_clipfrac_lower": "actor/dual_clip_fraction",
    "actor/reward_kl_penalty": "kl/in_reward",
    "critic/vf_loss": "critic/value_loss",
    "critic/vf_clipfrac": "critic/clip_fraction",
    "critic/vpred_mean": "critic/prediction/mean",
    "global_seqlen/minmax_diff": "balance/rank_tokens/spread",
    "agent_loop/generate_sequences/max": "rollout/seconds/max",
    "agent_loop/slowest/response_length": "rollout/slowest/response_length",
    "training/global_step": "progress/step",
    "rollout_corr/rollout_is_eff_sample_size": "rollout_correction/weight/effective_sample_size",
    "rollout_corr/chi2_seq": "rollout_correction/chi2_sequence",
    "training/rollout_actor_probs_pearson_corr": "mismatch/correlation",
    "val-core/gsm8k/acc/maj@8/mean": "validation/gsm8k/maj@8/mean",
    "val-aux/gsm8k/reward/worst@8/std": "validation/gsm8k/reward/worst@8/std",
}


@pytest.mark.parametrize("ours", COUNTERPARTS.values(), ids=COUNTERPARTS.keys())
def test_what_other_trainers_report_has_a_name_here(ours: str) -> None:
    check(ours)
