"""What a version consists of that is an adapter alone, and what an engine refuses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from rljob_trainer.errors import EngineError
from rljob_trainer.models.stored import tensors_in
from rljob_trainer.weights.adapters import ALPHA, BASE, PublishedAdapter, described
from rljob_trainer.weights.manifest import manifest_of

pytestmark = pytest.mark.integrity

FIRST = hashlib.sha256(b"one base").hexdigest()
OTHER = hashlib.sha256(b"another").hexdigest()
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def sent(alpha: int = 8, base: str = FIRST, value: float = 0.5) -> dict[str, Tensor]:
    a, b = torch.full((4, 6), value), torch.full((5, 4), 0.25)
    return {f"{LAYER}.lora_A.weight": a, f"{LAYER}.lora_B.weight": b, **dict(described(alpha, base))}


def test_a_version_is_base_adapter_and_scale() -> None:
    made = [sent(), sent(alpha=9), sent(base=OTHER), sent(value=0.75)]
    assert len({manifest_of(tensors.items()).sha256 for tensors in made}) == 4
    assert manifest_of(sent().items()).sha256 == manifest_of(reversed(sent().items())).sha256


def test_an_engine_takes_what_belongs_to_its_model() -> None:
    adapter = PublishedAdapter.of(sent(alpha=70_000), FIRST)
    assert (adapter.rank, adapter.alpha, set(adapter.matrices)) == (4, 70_000, set(list(sent())[:2]))
    config = LoraConfig.from_peft_type(**adapter.config())
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 70_000, {"q_proj"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda tensors: tensors | dict(described(8, OTHER)),
            f"base {OTHER[:12]}, but the engine has read {FIRST[:12]} from its",
        ),
        (lambda tensors: {name: tensors[name] for name in tensors if name != ALPHA}, f"it has no {ALPHA}"),
        (lambda tensors: {name: tensors[name] for name in (ALPHA, BASE)}, "two matrices per layer"),
        (lambda tensors: tensors | {"model.norm.weight": torch.ones(3)}, "two matrices per layer"),
        (lambda tensors: {name: tensors[name] for name in tensors if "lora_B" not in name}, "two matrices per layer"),
    ],
    ids=["base", "alpha", "nothing", "a model", "half"],
)
def test_what_is_no_adapter_of_the_engines_model(
    spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        PublishedAdapter.of(spoil(sent()), FIRST)


def test_a_folders_manifest_is_that_of_its_tensors_in_whatever_files(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    save_file(tensors, one / "model.safetensors")
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, two / f"part-{number}.safetensors")
    index = '{"weight_map": {"a": "part-0.safetensors", "b": "part-1.safetensors"}}'
    (two / "model.safetensors.index.json").write_text(index)
    of_one, of_two = (manifest_of(tensors_in(folder)) for folder in (one, two))
    assert of_one == of_two == manifest_of(tensors.items())
    tensors["b"][3] += 0.01
    assert of_one != manifest_of(tensors.items())
