"""Ranks that compute rows together (``trainer.parallelism.context``) give what one process gives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import distances, gradients, plain, scores
from tiny_gemma import gemma
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.metrics import update_result
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch, UpdateRequest
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.learner.work import RankReport, cut

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
LAYOUTS: list[dict[str, Any]] = [
    {"ranks": 2, "context": 2},
    {"ranks": 4, "context": 4},
    {"ranks": 4, "context": 2},
    {"ranks": 4, "context": 2, "replicate": 2},
]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory, tied_folder: Path, untied_folder: Path) -> dict[str, Path]:
    """Grouped heads with biases (2 of 4), one head of keys for all, windows, normed heads, capped scores."""
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    made: list[tuple[str, type[Any], PreTrainedConfig]] = [
        ("llama", LlamaForCausalLM, LlamaConfig(**sizes, num_key_value_heads=1)),
        ("mistral", MistralForCausalLM, MistralConfig(**sizes, num_key_value_heads=4, sliding_window=5)),
        ("qwen3", Qwen3ForCausalLM, Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16)),
    ]
    folders = {"qwen2": tied_folder}
    for name, family, config in made:
        torch.manual_seed(3)
        folders[name] = tmp_path_factory.mktemp(name)
        family(config).save_pretrained(folders[name])
    folders["gemma2"] = tmp_path_factory.mktemp("gemma2")
    gemma("gemma2", vocabulary=50).save_pretrained(folders["gemma2"])
    return folders


def updated(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, loss: LossSettings
) -> tuple[list[RankReport], dict[str, torch.Tensor]]:
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


@pytest.fixture(scope="module")
def by_one_process(ranks: Any, families: dict[str, Path]) -> Callable[[str, SequenceBatch], dict[str, torch.Tensor]]:
    """What one process gives for ``LOSS``, computed once for each family and batch."""
    known: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def of(family: str, batch: SequenceBatch) -> dict[str, torch.Tensor]:
        key = (family, len(batch))
        if key not in known:
            known[key] = ranks.run(1, gradients, plain(families[family]), batch, LOSS)[0]
        return known[key]

    return of


@pytest.mark.slow(
    stands_for=["[qwen2-{'ranks': 4, 'context': 2, 'replicate': 2}]", "[gemma2-{'ranks': 2, 'context': 2}]"]
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "qwen3", "gemma2"])
def test_the_gradient_is_that_of_one_process(
    family: str,
    layout: dict[str, Any],
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    families: dict[str, Path],
    by_one_process: Callable[[str, SequenceBatch], dict[str, torch.Tensor]],
) -> None:
    batch = make_batch()
    whole = by_one_process(family, batch)
    for budget in (40, 1 << 20) if family == "qwen2" else (60,):
        settings = plain(families[family], micro_batch_tokens=budget, **layout)
        for other in ranks.run(settings.ranks, gradients, settings, batch, LOSS):
            for name, distance in distances(other, whole):
                assert distance < 1e-5, name


@pytest.mark.slow(stands_for="[activation_checkpointing,micro_batch_tokens-]")
@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"share_prefixes": False}, 1e-5),
        ({"activation_checkpointing": True, "micro_batch_tokens": 60}, 1e-5),
        ({"log_prob_chunk_tokens": 7}, 1e-5),
        ({"dtype": "bfloat16"}, 0.1),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_changes_memory_and_speed_does_not_change_it(
    changes: dict[str, Any],
    bound: float,
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    tied_folder: Path,
    by_one_process: Callable[[str, SequenceBatch], dict[str, torch.Tensor]],
) -> None:
    batch = make_batch(groups=4)
    whole = by_one_process("qwen2", batch)
    for other in ranks.run(4, gradients, plain(tied_folder, ranks=4, context=2, **changes), batch, LOSS):
        for name, distance in distances(other, whole):
            assert distance < bound, name


@pytest.mark.slow(stands_for="[gspo]")
@pytest.mark.parametrize(
    "loss",
    [
        LossSettings(policy_loss="klCov", policy_loss_params={"covariance_fraction": 0.3}),
        LossSettings(policy_loss="gspo", aggregation="seqMeanTokenMean"),
        LossSettings(kl_kind="full", kl_coefficient=0.5, temperature=0.7),
    ],
    ids=["klCov", "gspo", "full KL"],
)
def test_losses_over_whole_sequences_and_mini_batches(
    loss: LossSettings, ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path
) -> None:
    batch = make_batch()
    whole = ranks.run(1, gradients, plain(tied_folder, critic=None), batch, loss)[0]
    settings = plain(tied_folder, critic=None, ranks=4, context=2, micro_batch_tokens=60)
    for other in ranks.run(4, gradients, settings, batch, loss):
        for name, distance in distances(other, whole):
            assert distance < 1e-4, name


@pytest.mark.slow(stands_for="[streams-{'ranks': 4, 'context': 2, 'replicate': 2}]")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("wanted", [WANTED, replace(WANTED, vocabulary_kl=True)], ids=["streams", "exact KL"])
def test_every_stream_is_that_of_one_process(
    wanted: ScoreRequest,
    layout: dict[str, Any],
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    tied_folder: Path,
) -> None:
    """Of sequences without a response too, and where a rank has no response token in its part of a row."""
    batch = make_batch(groups=3, longest=25)
    [alone] = ranks.run(1, scores, plain(tied_folder), batch, wanted)
    settings = plain(tied_folder, micro_batch_tokens=40, **layout)
    told = ranks.run(settings.ranks, scores, settings, batch, wanted)
    backend = Fsdp2()
    work = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings))
    whole = cut(batch, [range(len(batch))], backend.placement(plain(tied_folder)), backend.rules(plain(tied_folder)))
    assert "values" in alone.streams
    assert ("vocabulary_kl" in alone.streams) == wanted.vocabulary_kl
    for name, stream in alone.streams.items():
        once = name == "final_values"
        ours = work.merge(batch, [rank.streams[name] for rank in work.returned(told)], per_sequence=once)
        np.testing.assert_allclose(ours, whole.merge(batch, [stream], per_sequence=once), atol=3e-6, err_msg=name)
        assert np.abs(ours).max() > 1e-4, name
    # The others have the same: whichever returns outputs.
    for place, rank in zip(backend.placement(settings), told, strict=True):
        first = work.returned(told)[place.data_index]
        assert all(np.array_equal(rank.streams[name], first.streams[name]) for name in alone.streams)


@pytest.mark.slow(stands_for="[{'ranks': 4, 'context': 2, 'replicate': 2}]")
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each["context"] == 2], ids=str)
def test_updates_their_metrics_and_what_is_published(
    layout: dict[str, Any], ranks: Any, make_batch: Callable[..., SequenceBatch], untied_folder: Path
) -> None:
    optimizer = OptimizerSettings(learning_rate=1e-3, gradient_clip=0.5)
    batch = make_batch()
    one = plain(untied_folder, actor=optimizer, critic=optimizer)
    settings = replace(one, micro_batch_tokens=60, **layout)
    half = len(batch) // 2
    minis = [range(half), range(half, len(batch))]
    backend = Fsdp2()
    results: list[Any] = []
    for which in (one, settings):
        told = ranks.run(which.ranks, updated, which, batch, LOSS)
        work = cut(batch, minis, backend.placement(which), backend.rules(which))
        results.append(
            ([update_result([reports[n] for reports, _ in told], work, batch) for n in (0, 1)], [w for _, w in told])
        )
    (alone, [published]), (together, everywhere) = results
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.actor_steps == theirs.actor_steps == 2
        np.testing.assert_allclose(ours.first_log_probs, theirs.first_log_probs, atol=1e-4)
        for name, value in theirs.metrics.items():
            if name.startswith(("actor/", "critic/", "kl/")):
                assert ours.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
        assert ours.metrics["actor/grad_norm"] == pytest.approx(theirs.metrics["actor/grad_norm"], rel=1e-4)
    for weights in everywhere:
        for name, tensor in weights.items():
            # Adam divides by the gradient's own size: what is rounding there is a part of a step here.
            assert float((tensor - published[name]).abs().max()) < 2e-4, name


def test_what_is_kept_for_the_backward_pass_is_divided(
    ranks: Any, make_batch: Callable[..., SequenceBatch], untied_folder: Path
) -> None:
    """What long rows need ranks for: sharded parameters do nothing about it."""
    batch = make_batch(groups=2, samples=1, longest=900, seed=4)
    alone, together = (
        max(ranks.run(count, kept_bytes, plain(untied_folder, ranks=count, context=count), batch)) for count in (1, 2)
    )
    assert together < 0.6 * alone


def kept_bytes(rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch) -> int:
    """Of the actor's forward pass over one row, without parameters."""
    backend = Fsdp2()
    learner = backend.start(settings, rank, address, timeout_seconds=120)
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


def saved(rank: int, address: str, settings: LearnerSettings, folder: Path, action: str) -> dict[str, torch.Tensor]:
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    if action == "load":
        learner.load(folder)
    else:
        with torch.no_grad():
            for number, parameter in enumerate(learner.actor.module.parameters()):
                parameter.mul_(1 + 0.01 * number)
        learner.save(folder)
    return dict(learner.named_parameters_for_publish())


@pytest.mark.slow(stands_for="[{'ranks': 4, 'context': 2}-{'ranks': 1}]")
@pytest.mark.parametrize(
    ("writers", "readers"),
    [({"ranks": 4, "context": 2}, {"ranks": 1}), ({"ranks": 2}, {"ranks": 4, "context": 4})],
    ids=str,
)
def test_a_checkpoint_is_read_in_any_layout(
    writers: dict[str, Any], readers: dict[str, Any], ranks: Any, tied_folder: Path, tmp_path: Path
) -> None:
    written = ranks.run(writers["ranks"], saved, plain(tied_folder, **writers), tmp_path, "save")[0]
    for read in ranks.run(readers["ranks"], saved, plain(tied_folder, **readers), tmp_path, "load"):
        assert read.keys() == written.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in written.items())


def test_heads_that_cannot_be_divided_are_refused(ranks: Any, families: dict[str, Path]) -> None:
    with pytest.raises(AssertionError, match=r"JobFileError.*4 attention heads.*3 context ranks"):
        ranks.run(3, start, plain(families["llama"], ranks=3, context=3))


def start(rank: int, address: str, settings: LearnerSettings) -> None:
    Fsdp2().start(settings, rank, address, timeout_seconds=120)


def test_a_neighbour_that_stays_away_ends_the_wait_in_time(ranks: Any, untied_folder: Path, tmp_path: Path) -> None:
    """Groups of a mesh would wait half an hour, whatever the learner was told."""
    settings = plain(untied_folder, critic=None, reference=False, ranks=4, context=2, replicate=2)
    assert ranks.run(4, alone, settings, tmp_path) == [True] * 4


def alone(rank: int, address: str, settings: LearnerSettings, folder: Path) -> bool:
    """Ranks 0 and 2 wait in vain, for a neighbour and for the other copy of the weights. Says whether both gave up
    while everybody was still there."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=5)
    waits = {0: learner._place.context.group, 2: learner.actor.parameters()[0][1].device_mesh.get_group("replicate")}  # type: ignore[union-attr]
    if rank in waits:
        try:
            torch.distributed.all_reduce(torch.ones(1), group=waits[rank])
        except RuntimeError:
            (folder / f"{rank}").touch()
    for _ in range(200):
        if len(list(folder.iterdir())) == len(waits):
            return True
        time.sleep(0.1)
    return False
