"""Ranks that compute layers together (``trainer.parallelism.tensor``) give what one process gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gemma import gemma
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import LossSettings, SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.learner.work import cut

LOSS = LossSettings(
    policy_loss_params={"clip_low": 0.2, "clip_high": 0.3},
    aggregation="seqMeanTokenMean",
    kl_kind="k3",
    kl_coefficient=0.1,
    entropy_coefficient=0.01,
    value_clip=0.3,
    temperature=0.8,
)
LAYOUTS: list[dict[str, Any]] = [
    {"ranks": 2, "tensor": 2},
    {"ranks": 4, "tensor": 4},
    {"ranks": 4, "tensor": 2},
    {"ranks": 4, "tensor": 2, "replicate": 2},
    {"ranks": 4, "tensor": 2, "context": 2},
]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "max_position_embeddings": 256,
    }
    made = [
        (
            "llama",
            LlamaForCausalLM,
            LlamaConfig(**sizes, num_key_value_heads=4, attention_bias=True, mlp_bias=True, pad_token_id=13),
        ),
        ("mistral", MistralForCausalLM, MistralConfig(**sizes, num_key_value_heads=4, sliding_window=5)),
        ("qwen3", Qwen3ForCausalLM, Qwen3Config(**sizes, num_key_value_heads=4, head_dim=16, tie_word_embeddings=True)),
    ]
    folders = {}
    for name, family, config in made:
        torch.manual_seed(3)
        folders[name] = tmp_path_factory.mktemp(name)
        model = family(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folders[name])
    for name in ("gemma2", "gemma3_text"):
        folders[name] = tmp_path_factory.mktemp(name)
        gemma(name, vocabulary=50).save_pretrained(folders[name])
    return folders


def plain(folder: Path, **changes: Any) -> LearnerSettings:
    settings = LearnerSettings(folder, critic=OptimizerSettings(), reference=True, micro_batch_tokens=1 << 20)
    return replace(settings, **changes)


def gradients(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, loss: LossSettings
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    backend = Fsdp2()
    learner = backend.start(settings, rank, address, timeout_seconds=20)
    placement, rules = backend.placement(settings), backend.rules(settings)
    share = cut(batch, [range(len(batch))], placement, rules).sent()[rank]
    found, norms = {}, {}
    for trained in learner._trained:
        with torch.no_grad():
            for number, parameter in enumerate(trained.module.parameters()):
                parameter.mul_(1 + 0.05 * (number % 3))
            if trained is learner.critic:
                trained.module.head.weight.add_(0.1)
        learner.gradient([trained], share, 0, loss)
        layout = learner._layout
        for name, parameter in trained.module.named_parameters():
            assert parameter.grad is not None, name
            found[f"{trained.name}.{name}"] = layout.whole(layout.local(parameter.grad), parameter).clone()
        norms[trained.name] = trained.step().grad_norm
    return found, norms


def distances(ours, theirs):
    assert ours.keys() == theirs.keys()
    least = 0.01 * max(float(value.norm()) for value in theirs.values())
    for name, value in theirs.items():
        difference = float((ours[name].double() - value.double()).norm())
        yield name, difference / max(float(value.norm()), least)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_gradient_is_that_of_one_process(family, layout, ranks, make_batch, families) -> None:
    if family.startswith("gemma") and layout["tensor"] == 4:
        return
    batch = make_batch()
    whole, norms = ranks.run(1, gradients, plain(families[family]), batch, LOSS)[0]
    for budget in (40, 1 << 20):
        settings = plain(families[family], micro_batch_tokens=budget, **layout)
        for other, other_norms in ranks.run(settings.ranks, gradients, settings, batch, LOSS):
            worst = max(distances(other, whole), key=lambda x: x[1])
            print(layout, family, budget, worst, {n: abs(other_norms[n] / v - 1) for n, v in norms.items()})
            for name, distance in distances(other, whole):
                assert distance < 1e-5, (name, distance)
            assert other_norms == pytest.approx(norms, rel=1e-5)
