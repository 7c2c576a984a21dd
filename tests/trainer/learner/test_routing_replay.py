"""Tokens of a mixture of experts go to the experts that are given with them: transformers' own numbers for those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_mixture import CHOSEN, EXPERTS, LAYOUTS, log_probs_of, mixture_folder, share_of
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rljob_trainer.errors import LearnerError
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.prefixes import offsets_of
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.work import RankReport, cut

VOCABULARY, TEMPERATURE, LAYERS = 50, 0.8, 2
LOSS = LossSettings(policy_loss="reinforce", aggregation="tokenSum", temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tied_folder: Path) -> Path:
    return mixture_folder(tmp_path_factory.mktemp("mixture"), VOCABULARY, tied_folder)


def choices(batch: SequenceBatch, known: float = 1.0) -> np.ndarray:
    """Any, ``[all, layers, k]``; siblings have the same for their prompt. Of some tokens nothing is known."""
    rng = np.random.default_rng(1)
    chosen = rng.random((len(batch.token_ids), LAYERS, EXPERTS)).argsort(-1)[..., :CHOSEN].astype(np.uint8)
    chosen[rng.random(len(chosen)) >= known] = 3
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths)[:-1].tolist()
    first: dict[bytes, int] = {}
    for start, length in zip(starts, batch.prompt_lengths.tolist(), strict=True):
        sibling = first.setdefault(batch.token_ids[start : start + length].tobytes(), start)
        chosen[start : start + length] = chosen[sibling : sibling + length]
    return chosen


@contextmanager
def routed(model: PreTrainedModel, given: torch.Tensor) -> Iterator[None]:
    """Inside, the routers of transformers' model send the tokens of one sequence ``[length, layers, k]`` where it is
    said, and where one expert is said twice to those that they like best."""

    def forward(gate: Any, chosen: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
        odds, best = logits.exp(), logits.sort(-1, descending=True).indices[:, :CHOSEN]
        used, weights = [], []
        for token, own in enumerate(best):
            used.append(own if len(set(chosen[token].tolist())) == 1 else chosen[token])
            mine = odds[token, used[-1]]
            weights.append(mine / mine.sum())
        return logits, torch.stack(weights), torch.stack(used)

    gates: list[nn.Module] = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    kept = [gate.forward for gate in gates]
    for number, gate in enumerate(gates):
        gate.forward = lambda hidden, gate=gate, number=number: forward(gate, given[:, number].long(), hidden)
    try:
        yield
    finally:
        for gate, forwarded in zip(gates, kept, strict=True):
            gate.forward = forwarded


def theirs_of(model: PreTrainedModel, batch: SequenceBatch, chosen: np.ndarray) -> torch.Tensor:
    """Log-probs of the response tokens, each sequence by itself."""
    starts, tokens = offsets_of(batch.prompt_lengths + batch.response_lengths), offsets_of(batch.response_lengths)
    parts = []
    for s in range(len(batch)):
        rows = slice(starts[s], starts[s + 1])
        one = SequenceBatch(
            batch.token_ids[rows],
            batch.prompt_lengths[s : s + 1],
            batch.response_lengths[s : s + 1],
            batch.mask[tokens[s] : tokens[s + 1]],
        )
        with routed(model, torch.from_numpy(chosen[rows])):
            parts.append(log_probs_of(model, one, TEMPERATURE))
    return torch.cat(parts)


def gradient(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    share = share_of(rank, settings, batch)
    streams = learner.score(share, ScoreRequest(TEMPERATURE, log_probs=True)).streams
    learner.gradient([learner.actor], share, 0, LOSS)
    named = learner.actor.module.named_parameters()
    return {name: full(p.grad).clone() for name, p in named if p.grad is not None}, streams["log_probs"]


@pytest.mark.slow(
    stands_for=["[{}-0.7]", "[{'ranks': 4, 'context': 2, 'replicate': 2, 'activation_checkpointing': True}-1.0]"]
)
@pytest.mark.parametrize("known", [1.0, 0.7])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_log_probs_and_gradients_are_transformers_with_the_same_experts(
    layout: dict[str, Any], known: float, ranks: Any, make_batch: Callable[..., SequenceBatch], folder: Path
) -> None:
    """Routers get their gradient through the weights of the given experts."""
    batch = make_batch(groups=4)
    chosen = choices(batch, known)
    batch = replace(batch, routed_experts=chosen)
    theirs: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    live = log_probs_of(theirs, batch, TEMPERATURE)
    log_probs = theirs_of(theirs, batch, chosen)
    assert float((live - log_probs).detach().abs().max()) > 0.5, "the given experts are others"
    assert batch.advantages is not None
    (-(log_probs * torch.from_numpy(np.where(batch.mask, batch.advantages * batch.weights, 0))).sum()).backward()
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
            assert "gate.weight" not in name or float(right.norm()) > 1e-3
            assert float((grad - right).norm()) < 2e-5 * max(float(right.norm()), 1e-2), name


def updated(rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch) -> RankReport:
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    return learner.update(share_of(rank, settings, batch), LOSS)


@pytest.mark.parametrize("count", [1, 2])
def test_an_update_tells_what_was_replayed_and_what_routers_would_have_done(
    count: int, ranks: Any, make_batch: Callable[..., SequenceBatch], folder: Path
) -> None:
    batch = make_batch(groups=4)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    gates = [layer.mlp.gate for layer in theirs.model.layers if hasattr(layer.mlp, "gate")]
    seen: list[list[torch.Tensor]] = [[], []]
    for number, gate in enumerate(gates):
        gate.register_forward_hook(lambda _, inputs, outputs, number=number: seen[number].append(outputs[2]))
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths).tolist()
    for s in range(len(batch)):
        theirs(torch.from_numpy(batch.token_ids[starts[s] : starts[s + 1]].astype(np.int64))[None], use_cache=False)
    own = torch.stack([torch.cat(layer) for layer in seen], 1).numpy().astype(np.uint8)
    # Of every tenth token nothing is told; of every fourth of the others one of two choices in one layer is changed.
    changed = own.copy()
    places = np.flatnonzero(np.arange(len(own)) % 4 == 1)
    for place in places:
        others = set(range(EXPERTS)) - set(own[place, 0].tolist())
        changed[place, 0, 1] = min(others)
    changed[::10] = 5
    settings = LearnerSettings(folder, ranks=count, share_prefixes=False, micro_batch_tokens=60)
    reports = ranks.run(count, updated, settings, replace(batch, routed_experts=changed))
    # The last token of each response is left out of the rows.
    there = np.ones(len(own), np.bool_)
    there[np.array(starts[1:])[batch.response_lengths > 0] - 1] = False
    known = there & (changed[:, 0, 0] != changed[:, 0, 1])
    for report in reports:
        assert report.loads["moe/replayed"] == pytest.approx(known.sum() / there.sum())
    exact = replace(batch, routed_experts=own)
    for report in ranks.run(count, updated, settings, exact):
        assert report.loads["moe/replayed"] == 1
        assert report.loads["moe/rerouted"] == 0
    # A choice that is changed in the first layer moves what comes after it, where others may differ as well.
    at_least = (known & (np.arange(len(own)) % 4 == 1)).sum() / (known.sum() * LAYERS * CHOSEN)
    assert all(at_least <= report.loads["moe/rerouted"] < 6 * at_least for report in reports)
    without = ranks.run(count, updated, settings, batch)
    assert not any("moe/replayed" in report.loads for report in without)


@pytest.mark.parametrize(
    "wrong",
    [
        np.full((1, LAYERS + 1, CHOSEN), 1, np.uint8),
        np.full((1, LAYERS, CHOSEN + 1), 1, np.uint8),
        np.full((1, LAYERS, CHOSEN), EXPERTS, np.uint8),
    ],
    ids=["layers", "choices", "number"],
)
def test_the_choices_of_another_model_are_refused(
    wrong: np.ndarray, make_batch: Callable[..., SequenceBatch], folder: Path
) -> None:
    batch = make_batch(groups=2)
    settings = LearnerSettings(folder)
    learner = Fsdp2().start(settings)
    share = share_of(0, settings, replace(batch, routed_experts=wrong.repeat(len(batch.token_ids), 0)))
    with pytest.raises(LearnerError, match="engine and learner have different models"):
        learner.update(share, LOSS)
    with pytest.raises(LearnerError, match="engine and learner have different models"):
        learner.score(share, ScoreRequest(TEMPERATURE, log_probs=True))
    with pytest.raises(ValueError, match="routed_experts has 3 entries"):
        share_of(0, settings, replace(batch, routed_experts=wrong.repeat(3, 0)))
