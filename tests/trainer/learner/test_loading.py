"""Ranks read their models layer by layer: the very weights and numbers of a model that is read whole, and never all of
it at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gemma import gemma
from tiny_mixture import mixture
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rljob_trainer.learner.backends.fsdp2 import Fsdp2, mesh
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.loading import FolderWeights
from rljob_trainer.learner.models import PackedRow, load_critic, load_policy, names_in_files
from rljob_trainer.learner.packing import build_row
from rljob_trainer.learner.prefixes import Lengths
from rljob_trainer.learner.protocol import SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings

FAMILIES = ["tied qwen2", "llama in bfloat16", "gemma2", "gemma3_text", "qwen3_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tied_folder: Path, untied_folder: Path
) -> Path:
    given = {"tied qwen2": tied_folder, "llama in bfloat16": untied_folder}
    if request.param in given:
        return given[request.param]
    made = tmp_path_factory.mktemp("model")
    model = mixture(50) if request.param == "qwen3_moe" else gemma(request.param, vocabulary=50)
    # Several files, as large models have them.
    model.save_pretrained(made, max_shard_size="60KB")
    assert len(list(made.glob("*.safetensors"))) > 2
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_filled_is_the_model_that_is_read_whole(
    folder: Path, dtype: torch.dtype, make_batch: Callable[..., SequenceBatch]
) -> None:
    """Bit for bit, buffers and the numbers that come out too."""
    batch = make_batch(groups=2)
    row = build_row(Lengths.of(batch), range(len(batch)), final=True)  # type: ignore[arg-type]
    for load in (load_policy, load_critic):
        whole, empty = load(folder, dtype=dtype), load(folder, dtype=dtype, empty=True)
        names = names_in_files(empty)
        assert all(parameter.is_meta for parameter in names)
        files = FolderWeights(folder)
        for part in (*empty.layers, empty):
            files.fill(part, names.__getitem__, dtype)
        ours, theirs = dict(empty.named_parameters()), dict(whole.named_parameters())
        assert ours.keys() == theirs.keys()
        for name, parameter in theirs.items():
            assert torch.equal(ours[name], parameter), name
            assert ours[name].dtype == parameter.dtype
        buffers = dict(empty.named_buffers())
        assert buffers.keys() == dict(whole.named_buffers()).keys()
        for name, buffer in whole.named_buffers():
            assert torch.equal(buffers[name], buffer), name
            assert buffers[name].dtype == buffer.dtype
        capped = load_policy(folder, dtype=dtype, empty=True).soft_capped
        packed = PackedRow.of(row, batch.token_ids, torch.device("cpu"), dtype, soft_capped=capped)
        with torch.no_grad():
            told = [module(packed) if load is load_critic else module(packed, 1.0) for module in (empty, whole)]
        assert torch.equal(told[0][0], told[1][0])


def shards_and_most(
    rank: int, address: str, settings: LearnerSettings
) -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]]:
    """Whole parameters of all models, and at each cut of a module how many numbers it has, and are in memory."""
    seen: list[tuple[int, int]] = []
    cut = mesh.fully_shard

    def watched(module: nn.Module, **how: Any) -> nn.Module:
        present = [parameter for parameter in roots[-1].parameters() if not parameter.is_meta]
        own = sum(p.numel() for p in module.parameters() if not isinstance(p, DTensor) and not p.is_meta)
        local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in present)
        seen.append((own, local))
        cut(module, **how)
        return module

    roots: list[nn.Module] = []
    spread = mesh.shard

    def noted(model: nn.Module, *args: Any) -> None:
        roots.append(model)
        spread(model, *args)

    with (
        patch.object(mesh, "fully_shard", watched),
        patch("rljob_trainer.learner.backends.fsdp2.build.shard", noted),
    ):
        learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    models: list[tuple[str, nn.Module]] = [(trained.name, trained.module) for trained in learner._trained]
    assert learner._reference is not None
    models.append(("reference", learner._reference))  # type: ignore[arg-type]
    return {f"{of}.{n}": full(p).clone() for of, model in models for n, p in model.named_parameters()}, seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_hold_one_layer_and_their_shards(dtype: Any, ranks: Any, tmp_path: Path) -> None:
    mixture(50).save_pretrained(tmp_path)
    whole = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    every = sum(parameter.numel() for parameter in whole.values())
    settings = LearnerSettings(tmp_path, dtype=dtype, ranks=4, critic=OptimizerSettings(), reference=True)
    for parameters, seen in ranks.run(4, shards_and_most, settings):
        assert len(seen) == 3 * 4  # three models of three layers, and what is left of each
        for own, present in seen:
            assert 0 < own < 0.45 * every
            assert present <= own + every / 4 + 200
        for name, parameter in whole.items():
            rounded = parameter.to(settings.compute_dtype)
            assert torch.equal(parameters[f"actor.language_model.{name}"], parameter)
            assert torch.equal(parameters[f"reference.language_model.{name}"].to(rounded.dtype), rounded)
            if name.startswith("model."):
                assert torch.equal(parameters[f"critic.backbone.{name.removeprefix('model.')}"], parameter)


def start(rank: int, address: str, settings: LearnerSettings) -> None:
    Fsdp2().start(settings, rank, address, timeout_seconds=60)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(ranks: Any, tmp_path: Path) -> None:
    mixture(50).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.2.mlp.experts.5.up_proj.weight"
    stored = load_file(file)
    settings = LearnerSettings(tmp_path, ranks=2)
    for changed, words in (
        ({n: t for n, t in stored.items() if n != name}, f"lacks the tensor {name}"),
        (stored | {name: torch.zeros(3, 64)}, rf"the tensor {name} has the shape \[3, 64\] instead of \[64, 64\]"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(AssertionError, match=rf"(?s)JobFileError.*{words}"):
            ranks.run(2, start, settings)
