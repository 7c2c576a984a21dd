"""Gemma 2 and 3 in the learner against transformers' own models in eager attention, one sequence at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_for import cut_for
from tiny_gemma import gemma
from transformers import AutoModelForCausalLM, PreTrainedModel

from rljob_trainer.errors import JobFileError
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.cpu.plain_layer import compute_in_rows
from rljob_trainer.learner.models import Compared, PackedRow, Policy, checkpoint_activations, load_critic, load_policy
from rljob_trainer.learner.packing import build_row
from rljob_trainer.learner.prefixes import Lengths, offsets_of
from rljob_trainer.learner.protocol import LossSettings, SequenceBatch, UpdateRequest
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings

CPU = torch.device("cpu")
VOCABULARY, TEMPERATURE = 50, 0.8
FAMILIES = ["gemma2", "gemma3_text", "gemma3_text with a cap"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gemma")
    family, _, capped = request.param.partition(" ")
    extra = {"final_logit_softcapping": 2.0} if capped else {}
    gemma(family, vocabulary=VOCABULARY, **extra).save_pretrained(made)
    return made


def eager(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model


def logits_of(model: PreTrainedModel, batch: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the vocabulary ``[tokens, vocabulary]`` before each response token, and the tokens; each sequence by
    itself."""
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths)
    parts, targets = [], []
    for s, prompt in enumerate(batch.prompt_lengths.tolist()):
        ids = torch.from_numpy(batch.token_ids[starts[s] : starts[s + 1]].astype(np.int64))
        logits = model(ids[None], use_cache=False).logits[0]
        parts.append(torch.log_softmax(logits.double() / TEMPERATURE, -1)[prompt - 1 : -1])
        targets.append(ids[prompt:])
    return torch.cat(parts), torch.cat(targets)


def lengths_of(batch: SequenceBatch, *, share: bool) -> Lengths:
    return Lengths.of(batch) if share else Lengths.apart(batch.prompt_lengths, batch.response_lengths)


def packed_for(policy: Policy, batch: SequenceBatch, dtype: torch.dtype, *, share: bool = True) -> PackedRow:
    row = build_row(lengths_of(batch, share=share), np.arange(len(batch)))
    assert policy.outputs_only
    return PackedRow.of(row, batch.token_ids, CPU, dtype, outputs_only=True, soft_capped=policy.soft_capped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [True, False])
def test_every_stream_and_its_gradient_are_those_of_transformers(
    folder: Path, share: bool, dtype: torch.dtype, make_batch: Callable[..., SequenceBatch]
) -> None:
    """Sequences of up to 60 tokens and windows of 5: log-probs, entropy, squares and exact KL to a reference."""
    batch = make_batch(groups=3, samples=3, longest=32)
    theirs, other = eager(folder, dtype), eager(folder, dtype)
    ours, reference = load_policy(folder, dtype=dtype), load_policy(folder, dtype=dtype)
    moved = torch.Generator().manual_seed(4)
    with torch.no_grad():  # a reference that is another model
        for a, b in zip(other.parameters(), reference.parameters(), strict=True):
            a.add_(0.1 * torch.randn(a.shape, generator=moved, dtype=torch.float32).to(dtype))
            b.copy_(a)
    compute_in_rows(ours.layers)
    checkpoint_activations(ours.layers)
    row = packed_for(ours, batch, dtype, share=share)
    with torch.no_grad():
        told = reference(row, TEMPERATURE, states=True)
        weight = reference.language_model.get_output_embeddings().weight
        to = Compared(told.states, weight, told.log_probs)
    out = ours(row, TEMPERATURE, squares=True, reference=to)

    log_p, targets = logits_of(theirs, batch)
    with torch.no_grad():
        log_q, _ = logits_of(other, batch)
    expected = {
        "log_probs": log_p.gather(1, targets[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "sum_squared_probs": log_p.exp().square().sum(-1),
        "vocabulary_kl": (log_p.exp() * (log_p - log_q)).sum(-1),
    }
    assert float(expected["vocabulary_kl"].detach().mean()) > 0.01
    close = {"rtol": 0.0, "atol": 1e-5}  # transformers' norms are float32 in any dtype
    for name, values in expected.items():
        torch.testing.assert_close(getattr(out, name).double(), values, **close, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(told.log_probs.double(), log_q.gather(1, targets[:, None])[:, 0], **close)

    pulls = torch.randn(3, len(targets), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    trained = ("log_probs", "entropy", "vocabulary_kl")
    torch.stack([(getattr(out, n) * pull).sum() for n, pull in zip(trained, pulls, strict=True)]).sum().backward()
    torch.stack([(expected[n] * pull).sum() for n, pull in zip(trained, pulls, strict=True)]).sum().backward()
    of_theirs = dict(theirs.named_parameters())
    for name, parameter in ours.published():
        grad, exact = parameter.grad, of_theirs[name].grad
        assert grad is not None
        assert exact is not None
        assert float((grad - exact).norm()) < 2e-5 * max(float(exact.norm()), 1e-3), name


def test_the_critic_from_the_same_base(folder: Path, make_batch: Callable[..., SequenceBatch]) -> None:
    """Values are a linear function of transformers' last hidden states, final ones too."""
    batch = make_batch(groups=3, samples=3, longest=32)
    critic = load_critic(folder, dtype=torch.float32)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(2))
    row = build_row(Lengths.of(batch), np.arange(len(batch)), final=True)
    soft_capped = load_policy(folder, dtype=torch.float32).soft_capped
    packed = PackedRow.of(row, batch.token_ids, CPU, torch.float32, outputs_only=True, soft_capped=soft_capped)
    values, finals = critic(packed)
    assert finals is not None
    backbone: Any = eager(folder, torch.float32).base_model
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths)
    parts, ends = [], []
    for s, prompt in enumerate(batch.prompt_lengths.tolist()):
        ids = torch.from_numpy(batch.token_ids[starts[s] : starts[s + 1]].astype(np.int64))
        value = backbone(ids[None], use_cache=False).last_hidden_state[0] @ critic.head.weight[0]
        parts.append(value[prompt - 1 : -1])
        ends.append(value[-1:])
    torch.testing.assert_close(values, torch.cat(parts), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(finals, torch.cat(ends), rtol=1e-5, atol=1e-5)


def test_half_precision_is_near_float32(folder: Path, make_batch: Callable[..., SequenceBatch]) -> None:
    """By the path that a GPU takes where scores have a cap: the same blocks in bfloat16."""
    batch = make_batch(groups=3, samples=3, longest=32)
    streams = []
    for dtype in (torch.bfloat16, torch.float32):
        policy = load_policy(folder, dtype=dtype)
        compute_in_rows(policy.layers)
        out = policy(packed_for(policy, batch, dtype), TEMPERATURE)
        out.log_probs.sum().backward()
        embedding = policy.language_model.get_input_embeddings().weight.grad
        assert isinstance(embedding, torch.Tensor)
        streams.append((out.log_probs.detach(), out.entropy.detach(), embedding.float()))
    assert float(streams[1][0].std()) > 0.5
    for half, whole in zip(*streams, strict=True):  # bfloat16 has 8 bits: a few layers of it are off by some 2^-6
        assert float((half - whole).norm() / whole.norm()) < 0.06


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "olmo2"}, "supports the model types llama, .* but this model is a 'olmo2'"),
        ({"use_bidirectional_attention": True}, "does not support attention to later tokens"),
    ],
)
def test_what_is_not_computed_is_refused_before_weights_are_read(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    gemma("gemma2", vocabulary=VOCABULARY).config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | changes))
    with pytest.raises(JobFileError, match=f"spec.model: the learner {problem}"):
        load_policy(tmp_path, dtype=torch.float32)


LOSS = LossSettings(
    policy_loss_params={"clip_low": 0.2, "clip_high": 0.2},
    kl_kind="full",
    kl_coefficient=0.1,
    entropy_coefficient=0.01,
    value_clip=0.5,
    temperature=TEMPERATURE,
)


def ppo_step(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of actor and critic, and their parameters after one update."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    work = cut_for(
        batch,
        [range(len(batch))],
        ranks=settings.ranks,
        token_budget=settings.micro_batch_tokens,
        share_prefixes=settings.share_prefixes,
    )
    share = work.shares[rank]
    learner.update(share, LOSS, UpdateRequest(update_actor=True, update_critic=True))
    after, gradients = {}, {}
    for trained in learner._trained:
        for name, parameter in trained.module.named_parameters():
            after[f"{trained.name}.{name}"] = full(parameter.detach()).clone()
        trained.module.zero_grad()
        learner.gradient([trained], share, 0, LOSS)
        for name, parameter in trained.module.named_parameters():
            assert parameter.grad is not None, name
            gradients[f"{trained.name}.{name}"] = full(parameter.grad).clone()
    return gradients, after


@pytest.mark.slow(stands_for="[gemma2]")
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_ppo_on_two_ranks_with_recomputed_activations_equals_one_process(
    family: str, ranks: Any, make_batch: Callable[..., SequenceBatch], tmp_path: Path
) -> None:
    gemma(family, vocabulary=VOCABULARY).save_pretrained(tmp_path)
    batch = make_batch(groups=4, samples=3, longest=24)
    optimizer = OptimizerSettings(learning_rate=1e-3)
    one = LearnerSettings(tmp_path, actor=optimizer, critic=optimizer, reference=True, micro_batch_tokens=1 << 20)
    ((gradients, after),) = ranks.run(1, ppo_step, one, batch)
    for changes in ({"share_prefixes": False}, {"activation_checkpointing": True}):
        two = replace(one, ranks=2, micro_batch_tokens=120, **changes)
        for theirs, moved in ranks.run(2, ppo_step, two, batch):
            for mine, others, close in ((gradients, theirs, 2e-5), (after, moved, 1e-5)):
                assert mine.keys() == others.keys()
                for model in ("actor", "critic"):
                    flat, same = (
                        torch.cat([x[n].flatten() for n in mine if n.startswith(model)]) for x in (mine, others)
                    )
                    assert float((flat - same).norm() / flat.norm()) < close, (changes, model)
