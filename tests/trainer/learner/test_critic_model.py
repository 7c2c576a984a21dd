"""A critic that starts from another model than the policy has that one's values, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gemma import gemma
from tiny_mixture import mixture
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from whole_state import whole

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.prefixes import offsets_of
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch, UpdateRequest
from rljob_trainer.learner.settings import LearnerSettings, LoraSettings, OptimizerSettings
from rljob_trainer.learner.work import Cut, RankScores, cut
from rljob_trainer.models.critic_start import FIELD
from rljob_trainer.models.fixed import fixed_model

VOCABULARY = 50
LOSS = LossSettings(policy_loss_params={"clip_low": 0.2, "clip_high": 0.2}, value_clip=None)
SMOOTH = OptimizerSettings(learning_rate=0.05, epsilon=0.01, gradient_clip=0.5)
VALUES = ScoreRequest(log_probs=True, values=True)


def scoring(model: PreTrainedModel, folder: Path) -> None:
    """``model`` as a sequence classification with one label, whose head is drawn anew."""
    model.save_pretrained(folder)
    torch.manual_seed(5)
    kind: Any = AutoModelForSequenceClassification
    classification = kind.from_pretrained(folder, num_labels=1)
    with torch.no_grad():
        classification.score.weight.normal_(std=0.05)
    classification.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tied_folder: Path) -> dict[str, Path]:
    """Of the policies and the critics; no two of them have the same size."""
    found = {"qwen2": tied_folder}
    for name in ("llama", "gemma2", "mixture", "bfloat16", "plain", "policy mixture"):
        found[name] = tmp_path_factory.mktemp("model")
    sizes: dict[str, Any] = {
        "vocab_size": 56,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": None,
    }
    torch.manual_seed(3)
    llama = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1))
    with torch.no_grad():
        llama.score.weight.mul_(0.2)
    llama.save_pretrained(found["llama"])
    llama.to(torch.bfloat16).save_pretrained(found["bfloat16"])
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(found["plain"])
    scoring(gemma("gemma2", vocabulary=VOCABULARY), found["gemma2"])
    scoring(mixture(VOCABULARY), found["mixture"])
    mixture(VOCABULARY, seed=1).save_pretrained(found["policy mixture"])
    return found


def settings_of(policy: Path, critic: Path, **changes: Any) -> LearnerSettings:
    settings = LearnerSettings(
        policy,
        actor=SMOOTH,
        critic=SMOOTH,
        critic_model=fixed_model(FIELD, str(critic), None, Path()),
        micro_batch_tokens=60,
    )
    return replace(settings, **changes)


def work_of(settings: LearnerSettings, batch: SequenceBatch) -> Cut:
    return cut(batch, [range(len(batch))], Fsdp2().placement(settings), Fsdp2().rules(settings))


def scored(rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, updates: int = 0) -> RankScores:
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    share = work_of(settings, batch).sent()[rank]
    for _ in range(updates):
        learner.update(share, LOSS, UpdateRequest(update_actor=False, update_critic=True))
    return learner.score(share, VALUES)


def merged(settings: LearnerSettings, batch: SequenceBatch, told: list[RankScores]) -> dict[str, np.ndarray]:
    work = work_of(settings, batch)
    return {
        name: work.merge(batch, [rank.streams[name] for rank in work.returned(told)], per_sequence=name[0] == "f")
        for name in ("values", "final_values", "log_probs")
    }


def expected(folder: Path, batch: SequenceBatch) -> dict[str, np.ndarray]:
    """What transformers' classification says of every beginning of every sequence that ends before a response token,
    and of the whole sequences."""
    kind: Any = AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths)
    before, final = [], []
    with torch.no_grad():
        for s, prompt in enumerate(batch.prompt_lengths.tolist()):
            ids = torch.from_numpy(batch.token_ids[starts[s] : starts[s + 1]].astype(np.int64))
            told = [float(model(ids[None, :end], use_cache=False).logits) for end in range(prompt, len(ids) + 1)]
            before += told[:-1]
            final.append(told[-1])
    return {"values": np.array(before), "final_values": np.array(final)}


@pytest.mark.slow(stands_for="[qwen2-llama-{'ranks': 2}]")
@pytest.mark.parametrize(
    ("policy", "critic", "changes"),
    [
        ("qwen2", "llama", {}),
        ("qwen2", "llama", {"ranks": 2}),
        ("qwen2", "llama", {"ranks": 2, "tensor": 2}),
        ("qwen2", "llama", {"ranks": 4, "context": 2, "replicate": 2, "activation_checkpointing": True}),
        ("qwen2", "bfloat16", {"ranks": 2}),
        # Layers that leave out what nobody reads beside layers that cannot, either way round.
        ("qwen2", "mixture", {}),
        ("policy mixture", "llama", {"ranks": 2}),
        ("qwen2", "gemma2", {"ranks": 4, "tensor": 2}),
    ],
    ids=str,
)
def test_values_are_the_scores_of_transformers(
    policy: str,
    critic: str,
    changes: dict[str, Any],
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    folders: dict[str, Path],
) -> None:
    batch = make_batch(groups=4)
    settings = settings_of(folders[policy], folders[critic], **changes)
    ours = merged(settings, batch, ranks.run(settings.ranks, scored, settings, batch))
    for name, theirs in expected(folders[critic], batch).items():
        assert theirs.std() > 0.1
        np.testing.assert_allclose(ours[name], theirs, atol=1e-5, err_msg=name)
    alone = replace(settings, critic_model=None, ranks=1, tensor=1, context=1, replicate=1)
    of_policy = merged(alone, batch, ranks.run(1, scored, alone, batch))
    np.testing.assert_allclose(ours["log_probs"], of_policy["log_probs"], atol=1e-5)
    assert not of_policy["values"].any()  # a copy of the policy begins at zero


def test_half_precision_rounds_the_scores_and_no_more(
    ranks: Any, make_batch: Callable[..., SequenceBatch], folders: dict[str, Path]
) -> None:
    batch = make_batch(groups=3)
    settings = settings_of(folders["qwen2"], folders["llama"], dtype="bfloat16")
    ours = merged(settings, batch, ranks.run(1, scored, settings, batch))["values"]
    theirs = expected(folders["llama"], batch)["values"]
    assert np.corrcoef(ours, theirs)[0, 1] > 0.99
    assert np.abs(ours - theirs).max() < 0.2 * np.abs(theirs).max()


def test_a_language_model_of_another_size_begins_at_zero_and_learns(
    ranks: Any, make_batch: Callable[..., SequenceBatch], folders: dict[str, Path]
) -> None:
    """One rank and two move it alike."""
    batch = make_batch()
    found = []
    for changes in ({}, {"ranks": 2}):
        settings = settings_of(folders["qwen2"], folders["plain"], **changes)
        begun, moved = (
            merged(settings, batch, ranks.run(settings.ranks, scored, settings, batch, updates)) for updates in (0, 3)
        )
        assert not begun["values"].any()
        assert np.array_equal(begun["log_probs"], moved["log_probs"])
        found.append(moved["values"])
        # From zero the loss falls.
        assert batch.returns is not None
        error = [np.square(values - batch.returns)[batch.mask].mean() for values in (begun["values"], found[-1])]
        assert error[1] < 0.95 * error[0]
    np.testing.assert_allclose(found[0], found[1], atol=1e-3 * np.abs(found[0]).max())


def gradients(rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch) -> dict[str, torch.Tensor]:
    """Of the critic, whole, after one mini-batch."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    assert learner.critic is not None
    learner.gradient([learner.critic], work_of(settings, batch).sent()[rank], 0, LOSS)
    layout = learner._layout
    return {
        name: layout.whole(layout.local(parameter.grad), parameter).clone()
        for name, parameter in learner.critic.module.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.slow(stands_for="[llama-{'ranks': 2, 'tensor': 2}]")
@pytest.mark.parametrize(
    ("critic", "changes"), [("llama", {}), ("llama", {"ranks": 2, "tensor": 2}), ("mixture", {"ranks": 2})], ids=str
)
def test_gradients_are_those_of_transformers(
    critic: str,
    changes: dict[str, Any],
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    folders: dict[str, Path],
) -> None:
    """Of half the mean squared error over the trained tokens, through a model that never saw a packed row."""
    batch = make_batch(groups=3)
    kind: Any = AutoModelForSequenceClassification
    model = kind.from_pretrained(folders[critic], attn_implementation="eager").eval()
    starts, streams = offsets_of(batch.prompt_lengths + batch.response_lengths), offsets_of(batch.response_lengths)
    assert batch.returns is not None
    for s, prompt in enumerate(batch.prompt_lengths.tolist()):
        ids = torch.from_numpy(batch.token_ids[starts[s] : starts[s + 1]].astype(np.int64))
        own = slice(streams[s], streams[s + 1])
        hidden = model.model(ids[None], use_cache=False).last_hidden_state[0]
        error = model.score(hidden)[prompt - 1 : -1, 0] - torch.from_numpy(batch.returns[own])
        (0.5 * error.square() * torch.from_numpy(batch.mask[own])).sum().div(int(batch.mask.sum())).backward()
    theirs = {f"backbone.{name}": p.grad for name, p in model.model.named_parameters()}
    theirs["head.weight"] = model.score.weight.grad
    settings = settings_of(folders["qwen2"], folders[critic], **changes)
    for ours in ranks.run(settings.ranks, gradients, settings, batch):
        assert ours.keys() == theirs.keys() | {"head.bias"}
        for name, gradient in theirs.items():
            distance = float((ours[name] - gradient).norm() / gradient.norm().clamp(min=1e-3))
            assert distance < 1e-4, name


def state(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, place: Path, action: str
) -> dict[str, torch.Tensor]:
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    if action == "load":
        learner.load(place)
    else:
        learner.update(work_of(settings, batch).sent()[rank], LOSS, UpdateRequest(update_critic=True))
        learner.save(place)
    return whole([shard for trained in learner._trained for shard in trained.state()])


@pytest.mark.slow(
    stands_for="tests/trainer/learner/test_state.py::test_another_number_of_ranks_reads_the_same_state[folder-4-2]"
)
def test_its_state_is_read_in_another_layout(
    ranks: Any, make_batch: Callable[..., SequenceBatch], folders: dict[str, Path], tmp_path: Path
) -> None:
    batch = make_batch()
    wrote = settings_of(folders["qwen2"], folders["llama"], ranks=2)
    written = ranks.run(2, state, wrote, batch, tmp_path, "save")[0]
    assert written["critic.model.backbone.embed_tokens.weight"].shape == (56, 48)
    for changes in ({}, {"ranks": 2, "tensor": 2}, {"ranks": 4, "replicate": 2}):
        reads = replace(settings_of(folders["qwen2"], folders["llama"]), **changes)
        for read in ranks.run(reads.ranks, state, reads, batch, tmp_path, "load"):
            assert read.keys() == written.keys()
            assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    copy = replace(wrote, critic_model=None)
    with pytest.raises(AssertionError, match=r"CheckpointError.*critic"):
        ranks.run(2, state, copy, batch, tmp_path, "load")


def start(rank: int, address: str, settings: LearnerSettings) -> None:
    Fsdp2().start(settings, rank, address, timeout_seconds=120)


@pytest.mark.parametrize(
    ("critic", "changes", "words"),
    [
        (
            "llama",
            {"ranks": 4, "tensor": 4},
            r"spec\.trainer\.parallelism\.tensor: the 2 key heads of the critic \(spec",
        ),
        ("llama", {"ranks": 3, "context": 3}, r"context: the 4 attention heads of the critic"),
        ("mixture", {"ranks": 2, "tensor": 2}, r"tensor: the critic .* has the type qwen3_moe"),
        ("llama", {"lora": LoraSettings(2, 4)}, r"critic\.model\.source: with spec\.model\.lora the critic is"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_its_name(
    critic: str, changes: dict[str, Any], words: str, ranks: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    torch.manual_seed(4)
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 12, "num_hidden_layers": 1}
    config = Qwen2Config(vocab_size=VOCABULARY, hidden_size=96, intermediate_size=8, **heads)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)  # which all these layouts divide
    settings = settings_of(tmp_path, folders[critic], **changes)
    with pytest.raises(AssertionError, match=rf"JobFileError: .*{words}"):
        ranks.run(settings.ranks, start, settings)


@pytest.mark.parametrize("count", [1, 2])
def test_a_tensor_that_it_lacks_is_named_with_its_field(
    count: int, ranks: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    stored = load_file(folders["llama"] / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["llama"] / "config.json").read_bytes())
    for name in ("model.layers.2.mlp.up_proj.weight", "score.weight"):
        save_file(
            {n: t for n, t in stored.items() if n != name}, tmp_path / "model.safetensors", metadata={"format": "pt"}
        )
        settings = settings_of(folders["qwen2"], tmp_path, ranks=count)
        with pytest.raises(
            AssertionError, match=rf"JobFileError: spec\.algorithm\.critic\.model\.source: .* lacks the tensor {name}"
        ):
            ranks.run(count, start, settings)


def test_another_model_on_a_node_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Which has not got the files that the driver looked at."""
    settings = settings_of(folders["qwen2"], folders["llama"])
    assert settings.critic_model is not None
    other = replace(settings.critic_model, source=str(folders["plain"]))
    with pytest.raises(Exception, match=r"critic\.model\.source: .* is another model on this node"):
        Fsdp2().start(replace(settings, critic_model=other), 0, "", 0.0)


def test_its_own_size_is_told(folders: dict[str, Path]) -> None:
    facts = Fsdp2().start(settings_of(folders["qwen2"], folders["llama"]), 0, "", 0.0).facts()
    kind: Any = AutoModelForSequenceClassification
    critic = kind.from_pretrained(folders["llama"])
    embedding = critic.model.embed_tokens.weight.numel()
    assert facts.critic is not None
    # The bias of the head is ours.
    assert facts.critic.parameters == sum(p.numel() for p in critic.parameters()) - embedding + 1
    assert (facts.critic.layers, facts.critic.width) == (3, 48)
    policy: Any = AutoModelForCausalLM.from_pretrained(folders["qwen2"])
    assert facts.actor.parameters == sum(p.numel() for p in policy.parameters())
