"""Whatever the trainer reports has an entry in the catalogue: a run must not meet an unknown name at step 900."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import rljob_trainer
from rljob_api.correction_presets import CORRECTION_PRESETS
from rljob_api.resolved import ResolvedRolloutCorrection
from rljob_api.spec.algorithm import RejectionSpec
from rljob_trainer.algorithms import (
    LossCounts,
    PolicyInputs,
    Rejection,
    Segments,
    actor_loss,
    agreement_metrics,
    correct,
    critic_loss,
    policy_distance,
    policy_losses,
    veto,
)
from rljob_trainer.learner.protocol import LossSettings
from rljob_trainer.telemetry.catalogue import FAMILIES, METRICS
from rljob_trainer.telemetry.names import UnknownMetricError, check, check_all
from rljob_trainer.training.settings import correction_settings

SOURCES = Path(rljob_trainer.__file__).parent
_LOOKS_LIKE_A_NAME = re.compile(rf"({'|'.join(FAMILIES)})(/[a-z_0-9<>@]+)+")


def literals() -> list[tuple[str, str]]:
    """(place, text) of every string in the trainer's sources that could be a metric name, or the root of some."""
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if _LOOKS_LIKE_A_NAME.fullmatch(text):
                found.append((f"{path.relative_to(SOURCES)}:{getattr(node, 'lineno', 0)}", text))
    return found


def is_name_or_root(text: str) -> bool:
    if any(m.name == text or m.name.startswith(f"{text}/") for m in METRICS):
        return True
    try:
        check(text)
    except UnknownMetricError:
        return False
    return True


def test_every_name_written_in_the_sources_is_listed() -> None:
    found = literals()
    assert len(found) > 100  # the search finds something
    assert [entry for entry in found if not is_name_or_root(entry[1])] == []


@pytest.fixture
def inputs() -> PolicyInputs:
    generator = torch.Generator().manual_seed(1)

    def stream() -> torch.Tensor:
        return -torch.rand(12, generator=generator)

    segments = Segments.from_lengths([3, 4, 5])
    mask = torch.ones(12, dtype=torch.bool)
    return PolicyInputs(
        stream().requires_grad_(),
        stream() + 0.5,
        mask,
        segments,
        old_log_probs=stream(),
        rollout_log_probs=stream(),
        ref_log_probs=stream(),
        weights=torch.ones(12),
        entropy=-stream(),
        selection=mask,
    )


@pytest.mark.parametrize("name", sorted(policy_losses))
def test_what_every_policy_loss_reports_is_listed(name: str, inputs: PolicyInputs) -> None:
    rules = (Rejection("k1", "sequenceMean", high=1.001), veto(1e-4))
    for rejection in [(), rules] if name.startswith("bypass") else [()]:
        params = {"rejection": rejection} if rejection else {}
        settings = LossSettings(
            policy_loss=name, policy_loss_params=params, kl_kind="k3", kl_coefficient=0.1, entropy_coefficient=0.1
        )
        metrics = actor_loss(inputs, settings, LossCounts.of(inputs.mask, inputs.segments)).metrics
        assert "actor/policy_loss" in metrics
        check_all(metrics)


def test_what_the_value_loss_reports_is_listed(inputs: PolicyInputs) -> None:
    values = torch.linspace(0, 1, 12, requires_grad=True)
    counts = LossCounts.of(inputs.mask, inputs.segments)
    settings = LossSettings(value_clip=0.1)
    loss = critic_loss(values, torch.ones(12), inputs.mask, inputs.segments, settings, counts, torch.zeros(12))
    check_all(loss.metrics)


@pytest.mark.parametrize("name", sorted(CORRECTION_PRESETS))
def test_what_every_correction_reports_is_listed(name: str, inputs: PolicyInputs) -> None:
    assert inputs.old_log_probs is not None
    assert inputs.rollout_log_probs is not None
    streams = (inputs.old_log_probs, inputs.rollout_log_probs, inputs.mask, inputs.segments)
    preset = CORRECTION_PRESETS[name]
    given = ResolvedRolloutCorrection(
        mode=preset.mode, weights=preset.weights, rejection=preset.rejection, veto=1e-5, proximal="recomputed"
    )
    metrics = correct(*streams, correction_settings(given)).metrics
    assert "rollout_correction/kl" in metrics
    check_all(metrics)
    by_divergence = tuple(RejectionSpec(statistic=statistic, high=0.1) for statistic in ("tv", "binaryKl"))
    metrics = correct(*streams, correction_settings(given.model_copy(update={"rejection": by_divergence}))).metrics
    assert {f"rollout_correction/rejection/token_{rule}/mean" for rule in ("tv", "binary_kl")} <= metrics.keys()
    check_all(metrics)
    check_all(agreement_metrics(*streams[:3]))
    for family in ("mismatch", "drift"):
        check_all(policy_distance(*streams).metrics(family))
