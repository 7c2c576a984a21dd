"""The same batch gives the same gradient, whatever the number of ranks and the size of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_for import cut_for
from safetensors.torch import load_file

from rljob_trainer.algorithms import LossCounts
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.protocol import LossSettings, SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings

LOSS = LossSettings(
    policy_loss_params={"clip_low": 0.2, "clip_high": 0.3},
    aggregation="seqMeanTokenMean",
    kl_kind="k3",
    kl_coefficient=0.1,
    entropy_coefficient=0.01,
    value_clip=0.3,
    temperature=0.8,
)


def gradients(
    rank: int,
    address: str,
    settings: LearnerSettings,
    batch: SequenceBatch,
    loss: LossSettings = LOSS,
    counts: LossCounts | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Full gradients of actor and critic after one mini-batch, and this rank's shares of the metrics. ``counts``: as
    if it were a part of a mini-batch with these."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    work = cut_for(
        batch,
        [range(len(batch))],
        ranks=settings.ranks,
        token_budget=settings.micro_batch_tokens,
        share_prefixes=settings.share_prefixes,
    )
    share = work.shares[rank] if counts is None else replace(work.shares[rank], counts=[counts])
    result, sums = {}, {}
    for trained in learner._trained:
        sums |= learner.gradient([trained], share, 0, loss)[0].sums
        for name, parameter in trained.module.named_parameters():
            assert parameter.grad is not None, name
            result[f"{trained.name}.{name}"] = full(parameter.grad).clone()
    return result, {name: float(value) for name, value in sums.items()}


def settings_for(folder: Path, **changes: Any) -> LearnerSettings:
    plain = LearnerSettings(folder, critic=OptimizerSettings(), micro_batch_tokens=1 << 20)
    return replace(plain, **changes)


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of all parameters of a model together (the larger of both models)."""
    worst = 0.0
    for model in ("actor", "critic"):
        names = [name for name in theirs if name.startswith(model)]
        difference = torch.cat([(ours[n].double() - theirs[n].double()).flatten() for n in names]).norm()
        worst = max(worst, float(difference / torch.cat([theirs[n].double().flatten() for n in names]).norm()))
    return worst


@pytest.mark.slow(stands_for="[tied_folder]")
@pytest.mark.parametrize("folder", ["tied_folder", "untied_folder"])
def test_any_number_of_ranks_and_any_micro_batch_size(
    folder: str, ranks: Any, make_batch: Callable[..., SequenceBatch], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(folder)
    batch = make_batch()
    whole, metrics = ranks.run(1, gradients, settings_for(path), batch)[0]
    assert distance(whole, whole) == 0.0
    for count in (1, 2, 4):
        for budget in (40, 100):
            results = ranks.run(count, gradients, settings_for(path, ranks=count, micro_batch_tokens=budget), batch)
            for other, _ in results:
                assert distance(other, whole) < 1e-5
            for name, value in metrics.items():
                shares = [share[name] for _, share in results if name in share]
                total = (max if name.endswith("/max") else min if name.endswith("/min") else sum)(shares)
                assert total == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.slow(stands_for="[ranks,activation_checkpointing,micro_batch_tokens]")
@pytest.mark.parametrize(
    "changes",
    [
        {"share_prefixes": False},
        {"activation_checkpointing": True},
        {"log_prob_chunk_tokens": 7},
        {"ranks": 4, "replicate": 2},
        {"ranks": 2, "activation_checkpointing": True, "micro_batch_tokens": 60},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_what_changes_memory_and_speed_does_not_change_the_gradient(
    changes: dict[str, Any], ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path
) -> None:
    batch = make_batch(groups=4)
    whole, _ = ranks.run(1, gradients, settings_for(tied_folder), batch)[0]
    count = changes.get("ranks", 1)
    for other, _ in ranks.run(count, gradients, settings_for(tied_folder, **changes), batch):
        assert distance(other, whole) < 1e-5


def test_more_ranks_than_sequences(ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path) -> None:
    batch = make_batch(groups=1, samples=3, seed=3)
    whole, _ = ranks.run(1, gradients, settings_for(tied_folder), batch)[0]
    for other, _ in ranks.run(4, gradients, settings_for(tied_folder, ranks=4, micro_batch_tokens=8), batch):
        assert distance(other, whole) < 1e-5


def test_bfloat16_is_near_float32(ranks: Any, make_batch: Callable[..., SequenceBatch], untied_folder: Path) -> None:
    batch = make_batch(groups=4)
    whole, _ = ranks.run(1, gradients, settings_for(untied_folder), batch)[0]
    half, _ = ranks.run(1, gradients, settings_for(untied_folder, dtype="bfloat16"), batch)[0]
    for other, _ in ranks.run(2, gradients, settings_for(untied_folder, dtype="bfloat16", ranks=2), batch):
        # bfloat16 has 8 bits: a few layers of it are off by some 2^-7.
        assert distance(other, whole) < 0.05
        assert distance(other, half) < 0.05
        assert all(g.dtype == torch.float32 for g in other.values())


@pytest.mark.slow(stands_for="[tokenMean]")
@pytest.mark.parametrize("aggregation", ["tokenMean", "tokenSum"])
def test_float16_keeps_the_gradient_of_a_large_mini_batch(
    aggregation: str, ranks: Any, make_batch: Callable[..., SequenceBatch], untied_folder: Path
) -> None:
    """Of 262,144 tokens in 512 sequences: a token's share of the mean is below what float16 can tell from 0."""
    counts = LossCounts(1 << 18, 512)
    loss = replace(LOSS, aggregation=aggregation)
    batch = make_batch(groups=4)
    whole, _ = ranks.run(1, gradients, settings_for(untied_folder), batch, loss, counts)[0]
    for other, _ in ranks.run(2, gradients, settings_for(untied_folder, dtype="float16", ranks=2), batch, loss, counts):
        assert distance(other, whole) < 0.01  # float16 has 11 bits
        assert all(g.dtype == torch.float32 for g in other.values())


def test_what_is_masked_cannot_matter(ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path) -> None:
    batch = make_batch(groups=3)
    whole, _ = ranks.run(1, gradients, settings_for(tied_folder), batch)[0]
    names = ("advantages", "returns", "values", "old_log_probs", "rollout_log_probs", "ref_log_probs", "weights")
    spoiled = {name: np.where(batch.mask, getattr(batch, name), np.nan).astype(np.float32) for name in names}
    other, _ = ranks.run(1, gradients, settings_for(tied_folder), replace(batch, **spoiled))[0]
    assert distance(other, whole) == 0.0


@pytest.mark.slow(stands_for=["[clipCov]", "[full KL]", "[promptMean]"])
@pytest.mark.parametrize(
    "loss",
    [
        LossSettings(policy_loss="clipCov", policy_loss_params={"covariance_fraction": 0.3, "covariance_low": 0.0}),
        LossSettings(policy_loss="klCov", policy_loss_params={"covariance_fraction": 0.3}),
        LossSettings(policy_loss="bypassReinforce", policy_loss_params={"level": "sequence", "normalize": True}),
        LossSettings(kl_kind="full", kl_coefficient=0.5, temperature=0.7),
        LossSettings(policy_loss="gspo", aggregation="seqMeanTokenMean"),
        LossSettings(aggregation="promptMean", kl_kind="k3Weighted", kl_coefficient=0.1),
    ],
    ids=["clipCov", "klCov", "normalised bypass weights", "full KL", "gspo", "promptMean"],
)
def test_losses_that_look_beyond_a_micro_batch(
    loss: LossSettings, ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path
) -> None:
    """Selections over the whole mini-batch, ratios of whole sequences, the exact KL to a reference, prompts."""
    batch = make_batch()
    if loss.aggregation == "promptMean":
        own = [part.sum() for part in np.split(batch.mask, np.cumsum(batch.response_lengths)[:-1])]
        of_prompt = np.repeat(np.add.reduceat(own, np.arange(0, len(own), 4)), 4)
        batch = replace(batch, shares=np.repeat(own / of_prompt, batch.response_lengths).astype(np.float32))
    settings = settings_for(tied_folder, reference=True, critic=None, actor=OptimizerSettings(learning_rate=0.01))
    whole, metrics = ranks.run(1, moved_gradient, settings, batch, loss)[0]
    if loss.kl_kind == "full":
        assert metrics["kl/in_loss"] > 1e-3
    if "Cov" in loss.policy_loss:
        assert 0.2 < metrics["actor/selected_fraction"] <= 0.3
    for count, budget in ((1, 60), (2, 60), (4, 1 << 20)):
        changed = replace(settings, ranks=count, micro_batch_tokens=budget)
        for other, _ in ranks.run(count, moved_gradient, changed, batch, loss):
            names = whole.keys()
            difference = torch.cat([(other[n].double() - whole[n].double()).flatten() for n in names]).norm()
            assert difference < 1e-4 * torch.cat([whole[n].double().flatten() for n in names]).norm()


def moved_gradient(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, loss: LossSettings
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The actor's gradient some way off the reference, where a KL is not zero."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    share = cut_for(batch, [range(len(batch))], ranks=settings.ranks, token_budget=settings.micro_batch_tokens).shares[
        rank
    ]
    with torch.no_grad():
        for number, (_, parameter) in enumerate(learner.actor.module.named_parameters()):
            parameter.mul_(1 + 0.05 * (number % 3))
    sums = learner.gradient([learner.actor], share, 0, loss)[0].sums
    named = learner.actor.module.named_parameters()
    return {n: full(p.grad).clone() for n, p in named if p.grad is not None}, {n: float(v) for n, v in sums.items()}


@pytest.mark.slow(stands_for="[2-bfloat16]")
@pytest.mark.parametrize(("count", "dtype"), [(2, "float32"), (4, "float32"), (1, "bfloat16"), (2, "bfloat16")])
def test_publication_and_export_gather_the_folder_again(
    count: int, dtype: Any, ranks: Any, untied_folder: Path, tmp_path: Path
) -> None:
    settings = settings_for(untied_folder, ranks=count, dtype=dtype, critic=None)
    stored = load_file(untied_folder / "model.safetensors")
    for published in ranks.run(count, publish_and_export, settings, tmp_path):
        assert published.keys() == stored.keys()
        for name, tensor in published.items():
            assert tensor.dtype == settings.compute_dtype
            assert torch.equal(tensor, stored[name].to(tensor.dtype)), name
    exported = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())


def publish_and_export(rank: int, address: str, settings: LearnerSettings, folder: Path) -> dict[str, torch.Tensor]:
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    learner.export(folder)
    return dict(learner.named_parameters_for_publish())
