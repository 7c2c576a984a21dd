"""A mixture of experts (Qwen3-MoE) in the learner: transformers' numbers, files' names, and how even its loads are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_mixture import CHOSEN, EXPERTS, LAYOUTS, log_probs_of, mixture, mixture_folder, share_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from rljob_trainer.errors import StepGivenUpError
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch
from rljob_trainer.learner.published import shards
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.learner.work import RankReport, cut
from rljob_trainer.weights import learner_side
from rljob_trainer.weights.manifest import manifest_of
from rljob_trainer.weights.shards import Shard

VOCABULARY, TEMPERATURE = 50, 0.8
LOSS = LossSettings(policy_loss="reinforce", aggregation="tokenSum", temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tied_folder: Path) -> Path:
    return mixture_folder(tmp_path_factory.mktemp("mixture"), VOCABULARY, tied_folder)


def gradient(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Whole gradients of the actor, and its log-probs in the order of the rank's micro-batches."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    share = share_of(rank, settings, batch)
    streams = learner.score(share, ScoreRequest(TEMPERATURE, log_probs=True)).streams
    learner.gradient([learner.actor], share, 0, LOSS)
    named = learner.actor.module.named_parameters()
    return {name: full(p.grad).clone() for name, p in named if p.grad is not None}, streams["log_probs"]


@pytest.mark.slow(stands_for="[{'ranks': 4, 'context': 2, 'replicate': 2, 'activation_checkpointing': True}]")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_log_probs_and_gradients_are_those_of_transformers(
    layout: dict[str, Any], ranks: Any, make_batch: Callable[..., SequenceBatch], folder: Path
) -> None:
    """Its plain experts, one sequence at a time. On four ranks there are more of them than some layers' experts use."""
    batch = make_batch(groups=4)
    theirs: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    log_probs = log_probs_of(theirs, batch, TEMPERATURE)
    assert batch.advantages is not None
    pull = torch.from_numpy(np.where(batch.mask, batch.advantages * batch.weights, 0))
    (-(log_probs * pull).sum()).backward()
    exact = {name.removeprefix("language_model."): p.grad for name, p in theirs.named_parameters()}
    settings = replace(LearnerSettings(folder, micro_batch_tokens=1 << 20), **layout)
    told = ranks.run(settings.ranks, gradient, settings, batch)
    backend = Fsdp2()
    work = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings))
    ours = work.merge(batch, work.returned([streams for _, streams in told]))
    np.testing.assert_allclose(ours, log_probs.detach().numpy(), rtol=0, atol=1e-5)
    for gradients, _ in told:
        assert len(gradients) == len(exact)
        for name, grad in gradients.items():
            right = exact[name.removeprefix("language_model.")]
            assert right is not None
            assert float((grad - right).norm()) < 2e-5 * max(float(right.norm()), 1e-2), name


def published(
    rank: int, address: str, settings: LearnerSettings, exported: Path
) -> tuple[dict[str, torch.Tensor], Mapping[str, int], Mapping[str, int]]:
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    learner.export(exported)
    sums = dict(learner_side.sums(learner))
    whole = {name: tensor.clone() for name, tensor in learner.named_parameters_for_publish()}
    return whole, sums, dict(manifest_of(whole.items()).sums)


@pytest.mark.slow(stands_for="[2]")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_is_published_has_the_names_of_files_and_ranks_answer_for_all_of_it_once(
    count: int, ranks: Any, folder: Path, tmp_path: Path
) -> None:
    stored = load_file(folder / "model.safetensors")
    assert sum(".experts." in name for name in stored) == 2 * EXPERTS * 3
    told = ranks.run(count, published, LearnerSettings(folder, ranks=count), tmp_path)
    totals: dict[str, int] = {}
    manifest: Mapping[str, int] = {}
    for whole, sums, own in told:
        manifest = own
        assert whole.keys() == stored.keys()
        assert all(torch.equal(whole[name], tensor) for name, tensor in stored.items())
        for name, number in sums.items():
            totals[name] = (totals.get(name, 0) + number) % 2**64
    assert totals == manifest
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert all(torch.equal(before[name], parameter) for name, parameter in again.named_parameters())


def test_a_box_of_a_stack_is_boxes_of_its_matrices() -> None:
    """Cut anywhere, through an expert's gate and up matrices too: the boxes make up exactly what was cut out."""
    generator = torch.Generator().manual_seed(0)
    stack = torch.rand(5, 8, 3, generator=generator)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    matrices = {piece.name: piece for piece in shards(Shard(name, (5, 8, 3), (0, 0, 0), stack))}
    assert torch.equal(matrices["model.layers.0.mlp.experts.4.up_proj.weight"].tensor, stack[4, 4:])
    for first in (0, 2, 4, 6):
        seen = {piece: torch.full(matrices[piece].shape, torch.nan) for piece in matrices}
        for expert, row in ((0, first), (2, first)):
            box = stack[expert : expert + 2, row : row + 3]
            for part in shards(Shard(name, (5, 8, 3), (expert, row, 0), box)):
                rows = slice(part.offset[0], part.offset[0] + part.tensor.shape[0])
                assert part.shape == (4, 3)
                assert torch.isnan(seen[part.name][rows]).all()
                seen[part.name][rows] = part.tensor
        filled = sum(int((~torch.isnan(matrix)).sum()) for matrix in seen.values())
        assert filled == 4 * min(3, 8 - first) * 3
        for piece, matrix in seen.items():
            there = ~torch.isnan(matrix)
            assert torch.equal(matrix[there], matrices[piece].tensor[there])
    plain = Shard("model.norm.weight", (3,), (0,), stack[0, 0])
    assert list(shards(plain)) == [plain]


def updated(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, place: Path, action: str
) -> tuple[RankReport, dict[str, torch.Tensor]]:
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    if action == "load":
        learner.load(place)
    report = learner.update(share_of(rank, settings, batch), LOSS)
    learner.call_present(1)
    if action == "save":
        learner.save(place)
    return report, dict(learner.named_parameters_for_publish())


@pytest.mark.slow(stands_for="[adamw]")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_updates_and_checkpoints_cross_the_number_of_ranks(
    kind: Any, ranks: Any, make_batch: Callable[..., SequenceBatch], folder: Path, tmp_path: Path
) -> None:
    for each in ("one", "two"):
        (tmp_path / each).mkdir()
    batch = make_batch(groups=4)
    optimizer = OptimizerSettings(kind, learning_rate=1e-4)
    one = LearnerSettings(folder, actor=optimizer, micro_batch_tokens=1 << 20)
    two = LearnerSettings(folder, actor=optimizer, micro_batch_tokens=80, ranks=2)
    [(_, whole)] = ranks.run(1, updated, one, batch, tmp_path / "one", "save")
    for _, other in ranks.run(2, updated, two, batch, tmp_path / "two", "save"):
        assert all(float((whole[name] - other[name]).abs().max()) < 1e-5 for name in whole)
    # Each reads what the other has written.
    [(_, ahead)] = ranks.run(1, updated, one, batch, tmp_path / "two", "load")
    for _, other in ranks.run(2, updated, two, batch, tmp_path / "one", "load"):
        assert all(float((ahead[name] - other[name]).abs().max()) < 2e-5 for name in ahead)
        assert any(float((ahead[name] - whole[name]).abs().max()) > 2e-5 for name in ahead)


@pytest.mark.parametrize("count", [1, 2])
def test_the_loads_are_those_of_transformers_routers(
    count: int, ranks: Any, make_batch: Callable[..., SequenceBatch], folder: Path, tmp_path: Path
) -> None:
    batch = make_batch(groups=4)
    settings = LearnerSettings(folder, ranks=count, share_prefixes=False, micro_batch_tokens=60)
    reports = [report for report, _ in ranks.run(count, updated, settings, batch, tmp_path, "none")]
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    seen: list[list[torch.Tensor]] = [[], []]
    routers = [layer.mlp.gate for layer in theirs.model.layers if hasattr(layer.mlp, "gate")]
    for number, router in enumerate(routers):
        router.register_forward_hook(
            lambda _, inputs, outputs, number=number: seen[number].append(
                torch.bincount(outputs[2].flatten(), minlength=EXPERTS)
            )
        )
    start = 0
    for prompt, response in zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True):
        # The last response token predicts nothing, and is left out of the rows.
        ids = batch.token_ids[start : start + prompt + max(response - 1, 0)].astype(np.int64)
        theirs(torch.from_numpy(ids)[None], use_cache=False)
        start += prompt + response
    counts = torch.stack([torch.stack(of_layer).sum(0) for of_layer in seen]).float()
    fullest = counts.amax(1) / (counts.sum(1) / EXPERTS)
    for report in reports:
        assert report.loads["moe/fullest_expert/mean"] == pytest.approx(float(fullest.mean()), rel=0.02)
        assert report.loads["moe/fullest_expert/max"] == pytest.approx(float(fullest.max()), rel=0.02)
        assert report.loads["moe/idle_experts"] == pytest.approx(float((counts == 0).float().mean()))
        assert report.loads == reports[0].loads


def test_a_folder_that_lacks_an_expert_or_says_something_else(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from rljob_trainer.errors import JobFileError
    from rljob_trainer.models.folder import read_folder

    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 1, "num_experts": EXPERTS}
    stored = load_file(folder / "model.safetensors")
    expert = "model.layers.2.mlp.experts.5.up_proj.weight"

    def problem(changes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(JobFileError) as refused:
            read_folder(tmp_path, tokenizer=False)
        return str(refused.value)

    assert f"lacks the tensor {expert}" in problem({}, {n: t for n, t in stored.items() if n != expert})
    assert f"{expert} has the shape" in problem({}, stored | {expert: torch.zeros(2, 2)})
    assert "num_experts_per_tok = 9 is more than num_experts = 8" in problem({"num_experts_per_tok": 9}, stored)
    assert "gate.weight has the shape [8, 64], but config.json requires [7, 64]" in problem({"num_experts": 7}, stored)
    assert "moe_intermediate_size must be a whole number" in problem({"moe_intermediate_size": "64"}, stored)


def test_a_token_counts_the_experts_that_it_is_sent_to(folder: Path) -> None:
    """The size by which the speed is measured."""
    facts = Fsdp2().start(LearnerSettings(folder)).facts()
    config = json.loads((folder / "config.json").read_text())
    expert = 3 * config["moe_intermediate_size"] * config["hidden_size"]
    every = sum(parameter.numel() for parameter in mixture(VOCABULARY).parameters())
    embedding = VOCABULARY * config["hidden_size"]
    assert facts.actor.parameters == every - embedding - 2 * (EXPERTS - CHOSEN) * expert


def test_the_passes_of_an_update_that_was_given_up_count_nowhere(
    folder: Path, make_batch: Callable[..., SequenceBatch]
) -> None:
    learner = Fsdp2().start(LearnerSettings(folder, lanes=1))
    share = share_of(0, learner.settings, make_batch(groups=2))
    calls = iter(range(10))

    def asked_in_the_second_pass() -> None:
        if next(calls) == 1:
            raise StepGivenUpError("asked")

    learner.giving_up.check = asked_in_the_second_pass  # type: ignore[method-assign]
    with pytest.raises(StepGivenUpError):
        learner.update(share, LOSS)
    assert learner._loads.read() == {}
