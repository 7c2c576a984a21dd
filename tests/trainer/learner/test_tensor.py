"""Ranks that compute layers together (``trainer.parallelism.tensor``) give what one process gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_gemma import gemma
from tiny_mixture import mixture
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.layout import DividedFsdp2Layout
from rljob_trainer.learner.metrics import update_result
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch, UpdateRequest
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, LoraSettings, OptimizerSettings
from rljob_trainer.learner.work import RankReport, RankScores, cut
from rljob_trainer.weights import learner_side
from rljob_trainer.weights.manifest import added_up, manifest_of
from rljob_trainer.weights.shards import gathered, inventory

Tensors = dict[str, torch.Tensor]

LOSS = LossSettings(
    policy_loss_params={"clip_low": 0.2, "clip_high": 0.3},
    aggregation="seqMeanTokenMean",
    kl_kind="k3",
    kl_coefficient=0.1,
    entropy_coefficient=0.01,
    value_clip=0.3,
    temperature=0.8,
)
WANTED = ScoreRequest(0.7, log_probs=True, entropy=True, sum_squared_probs=True, reference=True, values=True)
SMOOTH = OptimizerSettings(learning_rate=0.05, epsilon=0.01, gradient_clip=0.5)
"""Adam's steps divided by far more than rounding, so that equal gradients make equal steps."""
ALONE: dict[str, Any] = {"ranks": 2, "tensor": 2}
FOUR: dict[str, Any] = {"ranks": 4, "tensor": 4}
SHARDED: dict[str, Any] = {"ranks": 4, "tensor": 2}
COPIED: dict[str, Any] = {"ranks": 4, "tensor": 2, "replicate": 2}
LONG: dict[str, Any] = {"ranks": 4, "tensor": 2, "context": 2}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory, tied_folder: Path) -> dict[str, Path]:
    """Biases everywhere and a padding word; windows; normed heads and one embedding; caps; two rotations. Words and
    columns cannot be divided evenly, key heads by four."""
    sizes: dict[str, Any] = {
        "vocab_size": 51,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
    }
    made: list[tuple[str, type[Any], Any]] = [
        ("llama", LlamaForCausalLM, LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, pad_token_id=13)),
        ("mistral", MistralForCausalLM, MistralConfig(**sizes, sliding_window=5)),
        ("qwen3", Qwen3ForCausalLM, Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)),
    ]
    folders = {"qwen2": tied_folder}
    for name, family, config in made:
        torch.manual_seed(3)
        model = family(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # biases that are 0 and norms that are 1 would hide what is lost of them
                    parameter.add_(0.1 * torch.randn_like(parameter))
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    for name in ("gemma2", "gemma3_text"):
        folders[name] = tmp_path_factory.mktemp(name)
        gemma(name, vocabulary=51).save_pretrained(folders[name])
    return folders


def plain(folder: Path, **changes: Any) -> LearnerSettings:
    settings = LearnerSettings(
        folder, actor=SMOOTH, critic=SMOOTH, reference=True, micro_batch_tokens=60 if changes else 1 << 20
    )
    return replace(settings, **changes)


def started(rank: int, address: str, settings: LearnerSettings) -> LearnerRank:
    """Some way off the reference, where a KL is not zero, and with a critic's head, which begins at zero."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    with torch.no_grad():
        for trained in learner._trained:
            for number, parameter in enumerate(trained.module.parameters()):
                parameter.mul_(1 + 0.05 * (number % 3))
            if trained is learner.critic:
                trained.module.head.weight.add_(0.1)  # type: ignore[operator,union-attr]
    learner._untouched.keep()
    return learner


def gradients(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, loss: LossSettings
) -> tuple[Tensors, dict[str, float], Tensors]:
    """Whole gradients of all models after one mini-batch, their norms, and the models after the step."""
    learner = started(rank, address, settings)
    backend, layout = Fsdp2(), learner._layout
    share = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings)).sent()[rank]
    found, norms, stepped = {}, {}, {}
    for trained in learner._trained:
        learner.gradient([trained], share, 0, loss)
        named = [(f"{trained.name}.{name}", parameter) for name, parameter in trained.module.named_parameters()]
        for name, parameter in named:
            assert parameter.grad is not None, name
            found[name] = layout.whole(layout.local(parameter.grad), parameter).clone()
        norms[trained.name] = trained.optimizer.step(trained.settings.learning_rate).grad_norm
        layout.release(trained.module)
        stepped |= {name: layout.whole(layout.local(p.detach()), p).clone() for name, p in named}
    return found, norms, stepped


def distances(ours: Tensors, theirs: Tensors) -> Iterator[tuple[str, float]]:
    """Of each parameter: norm of the difference over the norm, or over a hundredth of the largest norm of all."""
    assert ours.keys() == theirs.keys()
    least = 0.01 * max(float(value.norm()) for value in theirs.values())
    for name, value in theirs.items():
        difference = float((ours[name].double() - value.double()).norm())
        yield name, difference / max(float(value.norm()), least)


@pytest.fixture(scope="module")
def alone(ranks: Any, families: dict[str, Path]) -> Callable[[str, SequenceBatch], Any]:
    """What one process gives for ``LOSS``, computed once for each family and batch."""
    known: dict[tuple[str, int], Any] = {}

    def of(family: str, batch: SequenceBatch) -> Any:
        key = (family, len(batch))
        if key not in known:
            known[key] = ranks.run(1, gradients, plain(families[family]), batch, LOSS)[0]
        return known[key]

    return of


@pytest.mark.slow(
    stands_for=["[qwen3-{'ranks': 4, 'tensor': 2, 'replicate': 2}]", "[gemma2-{'ranks': 4, 'tensor': 2, 'context': 2}]"]
)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("qwen3", layout) for layout in (ALONE, FOUR, SHARDED, COPIED, LONG)),
        ("llama", FOUR),
        ("mistral", LONG),
        ("qwen2", ALONE),
        ("gemma2", LONG),
        ("gemma3_text", SHARDED),
    ],
    ids=str,
)
def test_gradients_norms_and_steps_are_those_of_one_process(
    family: str,
    layout: dict[str, Any],
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    families: dict[str, Path],
    alone: Callable[[str, SequenceBatch], Any],
) -> None:
    """Several micro-batches on each rank, some of them without a sequence; the norm is clipped by."""
    batch = make_batch()
    whole, norms, stepped = alone(family, batch)
    assert all(norm > SMOOTH.gradient_clip for norm in norms.values())
    settings = plain(families[family], **layout)
    told = ranks.run(settings.ranks, gradients, settings, batch, LOSS)
    for other, other_norms, other_stepped in told:
        for name, distance in distances(other, whole):
            assert distance < 1e-5, name
        assert other_norms == pytest.approx(norms, rel=1e-6)
        for name, value in stepped.items():
            assert float((other_stepped[name] - value).abs().max()) < 2e-6, name
            # What several ranks have they have alike, to the last bit.
            assert torch.equal(other_stepped[name], told[0][2][name]), name


@pytest.mark.slow(stands_for="[activation_checkpointing-]")
@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"share_prefixes": False}, 1e-5),
        ({"activation_checkpointing": True}, 1e-5),
        ({"log_prob_chunk_tokens": 7, "micro_batch_tokens": 1 << 20}, 1e-5),
        ({"dtype": "bfloat16"}, 0.1),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_changes_memory_and_speed_does_not_change_it(
    changes: dict[str, Any],
    bound: float,
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    families: dict[str, Path],
    alone: Callable[[str, SequenceBatch], Any],
) -> None:
    batch = make_batch(groups=4)
    whole = alone("qwen3", batch)[0]
    for other, _, _ in ranks.run(2, gradients, plain(families["qwen3"], **ALONE | changes), batch, LOSS):
        for name, distance in distances(other, whole):
            assert distance < bound, name


@pytest.mark.slow(stands_for="[full KL and entropy]")
@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        (LossSettings(policy_loss="klCov", policy_loss_params={"covariance_fraction": 0.3}), SHARDED),
        (LossSettings(policy_loss="gspo", aggregation="seqMeanTokenMean"), LONG),
        (LossSettings(kl_kind="full", kl_coefficient=0.5, temperature=0.7), LONG),
        (LossSettings(kl_kind="full", kl_coefficient=0.5, entropy_coefficient=0.1), FOUR),
    ],
    ids=["klCov", "gspo", "full KL", "full KL and entropy"],
)
def test_losses_over_whole_sequences_mini_batches_and_vocabularies(
    loss: LossSettings,
    layout: dict[str, Any],
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    families: dict[str, Path],
) -> None:
    batch = make_batch()
    whole = ranks.run(1, gradients, plain(families["qwen3"], critic=None), batch, loss)[0][0]
    settings = plain(families["qwen3"], critic=None, **layout)
    for other, _, _ in ranks.run(settings.ranks, gradients, settings, batch, loss):
        for name, distance in distances(other, whole):
            assert distance < 1e-5, name


def scores(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, wanted: ScoreRequest
) -> RankScores:
    learner = started(rank, address, settings)
    backend = Fsdp2()
    work = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings))
    return learner.score(work.sent()[rank], wanted)


@pytest.mark.slow(stands_for="[streams-{'ranks': 4, 'tensor': 2, 'context': 2}]")
@pytest.mark.parametrize("layout", [FOUR, LONG], ids=str)
@pytest.mark.parametrize("exact_kl", [False, True], ids=["streams", "exact KL"])
def test_every_stream_is_that_of_one_process(
    exact_kl: bool,
    layout: dict[str, Any],
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    families: dict[str, Path],
) -> None:
    wanted = replace(WANTED, vocabulary_kl=exact_kl)
    folder = families["qwen3"]
    batch = make_batch(groups=3, longest=25)
    [alone] = ranks.run(1, scores, plain(folder), batch, wanted)
    settings = plain(folder, **layout | {"micro_batch_tokens": 40})
    told = ranks.run(settings.ranks, scores, settings, batch, wanted)
    backend = Fsdp2()
    work = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings))
    whole = cut(batch, [range(len(batch))], backend.placement(plain(folder)), backend.rules(plain(folder)))
    assert {"log_probs", "entropy", "sum_squared_probs", "ref_log_probs", "values"} <= alone.streams.keys()
    assert ("vocabulary_kl" in alone.streams) == exact_kl
    for name, stream in alone.streams.items():
        once = name == "final_values"
        ours = work.merge(batch, [rank.streams[name] for rank in work.returned(told)], per_sequence=once)
        np.testing.assert_allclose(ours, whole.merge(batch, [stream], per_sequence=once), atol=3e-6, err_msg=name)
        assert np.abs(ours).max() > 1e-4, name
        assert all(np.array_equal(rank.streams[name], told[0].streams[name]) for rank in told), name


def updated(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, loss: LossSettings
) -> tuple[list[RankReport], Tensors]:
    """Reports of two updates of two mini-batches each, and the weights that are published after them."""
    backend = Fsdp2()
    learner = backend.start(settings, rank, address, timeout_seconds=120)
    half = len(batch) // 2
    work = cut(batch, [range(half), range(half, len(batch))], backend.placement(settings), backend.rules(settings))
    reports = []
    for version in (1, 2):
        reports.append(learner.update(work.sent()[rank], loss, UpdateRequest(update_critic=True)))
        learner.call_present(version)
    return reports, dict(learner.named_parameters_for_publish())


@pytest.mark.slow(stands_for="[muon-layout1]")
@pytest.mark.parametrize(("kind", "layout"), [("adamw", COPIED), ("muon", SHARDED)])
def test_updates_their_metrics_and_what_is_published(
    kind: Any, layout: dict[str, Any], ranks: Any, make_batch: Callable[..., SequenceBatch], families: dict[str, Path]
) -> None:
    optimizer = replace(SMOOTH, kind=kind, learning_rate=0.01)
    batch = make_batch()
    half = len(batch) // 2
    minis = [range(half), range(half, len(batch))]
    backend = Fsdp2()
    results: list[Any] = []
    for changes in ({}, layout):
        settings = replace(plain(families["qwen3"], **changes), actor=optimizer, critic=optimizer)
        told = ranks.run(settings.ranks, updated, settings, batch, LOSS)
        work = cut(batch, minis, backend.placement(settings), backend.rules(settings))
        results.append(
            ([update_result([reports[n] for reports, _ in told], work, batch) for n in (0, 1)], [w for _, w in told])
        )
    (alone, [published]), (together, everywhere) = results
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.actor_steps == theirs.actor_steps == 2
        np.testing.assert_allclose(ours.first_log_probs, theirs.first_log_probs, atol=1e-5)
        for name, value in theirs.metrics.items():
            if name.startswith(("actor/", "critic/", "kl/")):
                assert ours.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for weights in everywhere:
        assert weights.keys() == published.keys()
        for name, tensor in weights.items():
            assert float((tensor - published[name]).abs().max()) < 1e-5, name
            assert torch.equal(tensor, everywhere[0][name]), name


def kept_bytes(rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch) -> int:
    """Of the actor's forward pass over one row, without parameters."""
    learner = started(rank, address, settings)
    backend = Fsdp2()
    share = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings)).sent()[rank]
    _, packed = learner._place.row(share, share.micro_batches[0][0])
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner.actor.module(packed, 1.0)
    return sum(storage.nbytes() for storage in kept.values())


def test_what_is_kept_of_logits_is_divided(
    ranks: Any, make_batch: Callable[..., SequenceBatch], tmp_path: Path
) -> None:
    """Of a vocabulary beside which nothing else counts: nobody has all of a token's logits."""
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    batch = make_batch(groups=4)
    alone, together = (
        max(ranks.run(n, kept_bytes, plain(tmp_path, ranks=n, tensor=n, micro_batch_tokens=1 << 20), batch))
        for n in (1, 4)
    )
    tokens = len(batch.token_ids) - int(batch.prompt_lengths.sum())
    assert alone > 4 * tokens * 4000
    assert together < 0.4 * alone


def begun(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, place: Path, action: str
) -> tuple[Tensors, dict[str, int]]:
    """All of a learner's state, put together from the boxes that ranks say they have, and what each adds up for
    engines. ``save``: after an update; ``load``: as it is read."""
    backend = Fsdp2()
    learner = backend.start(settings, rank, address, timeout_seconds=120)
    if action == "load":
        learner.load(place / "state")
    else:
        work = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings))
        learner.update(work.sent()[rank], LOSS, UpdateRequest(update_critic=True))
        learner.call_present(1)
        learner.save(place / "state")
        learner.export(place / "model")
    boxes = [box for trained in learner._trained for box in trained.state()]
    whole = {name: tensor.clone() for name, tensor in gathered(boxes, inventory(boxes), lambda _: torch.float32)}
    published = {name: tensor.clone() for name, tensor in learner.named_parameters_for_publish()}
    whole |= {f"published {name}": tensor for name, tensor in published.items()}
    return whole, dict(learner_side.sums(learner))


@pytest.mark.slow(stands_for="[{'ranks': 4, 'tensor': 2, 'context': 2}-{'ranks': 1}]")
@pytest.mark.parametrize(
    ("writers", "readers"),
    [(LONG, {"ranks": 1}), ({"ranks": 2}, FOUR), (FOUR, COPIED)],
    ids=str,
)
def test_state_is_read_exported_and_published_alike_in_any_layout(
    writers: dict[str, Any],
    readers: dict[str, Any],
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    families: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = families["qwen3"]
    (tmp_path / "state").mkdir()
    batch = make_batch()
    told = ranks.run(writers["ranks"], begun, plain(folder, **writers), batch, tmp_path, "save")
    again = ranks.run(readers["ranks"], begun, plain(folder, **readers), batch, tmp_path, "load")
    written = told[0][0]
    assert any("exp_avg_sq" in name for name in written)
    for read, _ in (*told, *again):
        assert read.keys() == written.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    exported = load_file(tmp_path / "model" / "model.safetensors")
    published = {
        name.removeprefix("published "): tensor for name, tensor in written.items() if name.startswith("published ")
    }
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in published.items())
    manifest = dict(manifest_of(published.items()).sums)
    for sums in ([own for _, own in told], [own for _, own in again]):
        assert added_up(sums) == manifest


def start(rank: int, address: str, settings: LearnerSettings) -> None:
    Fsdp2().start(settings, rank, address, timeout_seconds=120)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3", {"ranks": 3, "tensor": 3}, r"8 attention heads.*3 x 1 ranks"),
        ("qwen2", {"ranks": 4, "tensor": 4}, r"2 key heads.*4 tensor ranks"),
        ("qwen2", {"ranks": 2, "tensor": 2, "lora": LoraSettings(2, 4)}, r"does not support adapters"),
        ("mixture", {"ranks": 2, "tensor": 2}, r"the type qwen3_moe, but tensor parallelism"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    family: str, changes: dict[str, Any], words: str, ranks: Any, families: dict[str, Path], tmp_path: Path
) -> None:
    if family == "mixture":
        mixture(50).save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match=rf"JobFileError: spec.trainer.parallelism.tensor.*{words}"):
        ranks.run(changes["ranks"], start, plain({**families, "mixture": tmp_path}[family], **changes))


def test_a_neighbour_that_stays_away_ends_the_wait_in_time(ranks: Any, families: dict[str, Path]) -> None:
    settings = plain(families["qwen2"], critic=None, reference=False, **ALONE)
    assert ranks.run(2, waits, settings) == [True, False]


def waits(rank: int, address: str, settings: LearnerSettings) -> bool:
    """Whether rank 0 gave up while its neighbour was still there."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=3)
    layout = learner._layout
    assert isinstance(layout, DividedFsdp2Layout)
    if rank:
        time.sleep(8)
        return False
    try:
        layout._tensor.summed(torch.ones(1))
    except RuntimeError:
        return True
    return False
