"""vLLM tells which experts its routers chose for each token, and a learner that sends tokens there has vLLM's log-probs
even where its own routers would have decided otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from cut_for import cut_for
from safetensors.torch import load_file, save_file
from tiny_mixture import mixture
from transformers import AutoModelForCausalLM, PreTrainedModel

from rljob_trainer.episodes.episode import Group, Prompt, RewardResult, single_turn
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings, continued
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import ScoreRequest
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.training.batch import layout
from rljob_trainer.weights.manifest import manifest_of

if TYPE_CHECKING:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

pytestmark = pytest.mark.vllm

VOCABULARY, TEMPERATURE = 97, 0.7
LAYERS = 2
PROMPTS = [tuple(range(3, 3 + length)) for length in (2, 40, 70)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixture")
    mixture(VOCABULARY, seed=3).save_pretrained(made)
    return made


@pytest.fixture
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[VLLMEngine]:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    made = VLLMEngine(
        folder,
        max_concurrent=8,
        max_context=160,
        tells_experts=True,
        keep_cache=getattr(request, "param", False),
        engine_args={"kv_cache_memory_bytes": 32 << 20, "block_size": 32},
    )
    yield made
    made.close()


Results = dict[EpisodeId, GenerationResult]


def requests_of(name: str, tokens: int = 20) -> list[GenerationRequest]:
    """Two samples of each prompt. The longer prompts begin with the shorter ones."""
    return [
        GenerationRequest(EpisodeId(name, p, i), prompt, SamplingSettings(TEMPERATURE, 1.0, 0, tokens, ()), 10 * p + i)
        for p, prompt in enumerate(PROMPTS)
        for i in range(2)
    ]


def run(engine: VLLMEngine, requests: Sequence[GenerationRequest], steps: int | None = None) -> Results:
    results: Results = {}
    for request in requests:
        engine.add(request)
    while engine.has_work and steps != 0:
        results.update((result.id, result) for result in engine.step())
        steps = None if steps is None else steps - 1
    return results


def choices_of(model: PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    """``[tokens, layers, k]`` of transformers' routers, each token's experts in ascending order."""
    seen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda _, inputs, outputs: seen.append(outputs[2])) for gate in gates]
    with torch.no_grad():
        model(torch.tensor([list(ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(seen, 1).numpy(), -1)


def check(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], results: Mapping[EpisodeId, GenerationResult]
) -> None:
    """What was told of every token is what transformers chooses."""
    for request in requests:
        tokens, prompt = results[request.id].tokens, len(request.prompt_ids)
        theirs = choices_of(model, (*request.prompt_ids, *tokens.ids.tolist()))
        assert tokens.routed_experts is not None
        assert tokens.prompt_experts is not None
        assert tokens.routed_experts.shape == (len(tokens), LAYERS, 2)
        np.testing.assert_array_equal(np.sort(tokens.routed_experts, -1), theirs[prompt - 1 : -1])
        np.testing.assert_array_equal(np.sort(tokens.prompt_experts, -1), theirs[: prompt - 1])


def test_every_token_has_the_experts_that_transformers_chooses(engine: VLLMEngine, folder: Path) -> None:
    """Whether its keys and values were computed for it or cached; and of a request that was interrupted and goes on."""
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    for name in ("fresh", "cached"):
        results = run(engine, requests_of(name))
        check(model, requests_of(name), results)
    assert sum(result.prefilled < len(PROMPTS[id.ordinal]) for id, result in results.items()) == 4
    engine.score([((*PROMPTS[2], 5), (6, 7, 8))], 1.0)  # what was cached for the one is told to the other
    check(model, requests_of("scored"), run(engine, requests_of("scored")))
    begun = requests_of("begun", tokens=30)
    assert not run(engine, begun, steps=9)
    partial = {result.id: result for result in engine.abort()}
    assert all(0 < len(result.tokens) < 30 for result in partial.values())
    check(model, begun, partial)
    again = [continued(request, partial[request.id]) for request in begun]
    check(model, begun, run(engine, again))
    # One that was begun where nothing was told is told of all the same.
    bare = [replace(q, begun=replace(q.begun, routed_experts=None, prompt_experts=None)) for q in again]
    check(model, begun, run(engine, bare))


@pytest.mark.slow(stands_for="[keepCache]")
@pytest.mark.parametrize("engine", [False, True], indirect=True, ids=["recompute", "keepCache"])
def test_a_token_keeps_the_experts_of_the_pass_that_it_was_sampled_in(engine: VLLMEngine, folder: Path) -> None:
    """Across an update, after which its keys and values may have been computed anew with other experts."""
    old = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    tensors = load_file(folder / "model.safetensors")
    moved = {
        name: tensor * (1 + 0.5 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
        if "gate.weight" in name
        else tensor
        for name, tensor in tensors.items()
    }
    requests = requests_of("a", tokens=30)
    assert not run(engine, requests, steps=12)
    engine.begin_update()
    engine.load(moved.items())
    engine.finish_update(1, manifest_of(moved.items()))
    results = run(engine, [])
    new = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    new.load_state_dict({name: t for name, t in moved.items() if "gate.weight" in name}, strict=False)
    differ = 0
    for request in requests:
        tokens, prompt = results[request.id].tokens, len(request.prompt_ids)
        ids = (*request.prompt_ids, *tokens.ids.tolist())
        first = int((tokens.versions == 0).sum())
        assert 5 < first < 25
        before, after = choices_of(old, ids)[prompt - 1 : -1], choices_of(new, ids)[prompt - 1 : -1]
        told = np.sort(tokens.routed_experts, -1)
        np.testing.assert_array_equal(told[:first], before[:first])
        # In the first layer choices know nothing of keys and values.
        np.testing.assert_array_equal(told[first:, 0], after[first:, 0])
        differ += int((before != after).any(-1).sum())
    assert differ > 20


@pytest.mark.slow(stands_for="test_every_token_has_the_experts_that_transformers_chooses")
def test_log_probs_are_the_engines_where_routers_are_not(engine: VLLMEngine, folder: Path, tmp_path: Path) -> None:
    """A learner whose routers are a little off: the mismatch to the engine with replay and without it."""
    requests = requests_of("a", tokens=40)
    results = run(engine, requests)
    groups = []
    for p in range(len(PROMPTS)):
        prompt = Prompt(p, 0, p, "train", "", PROMPTS[p], None)
        own = [request for request in requests if request.prompt_ids == PROMPTS[p]]
        episodes = [
            single_turn(q.id, q.prompt_ids, results[q.id].tokens, "length", reward=RewardResult(0.0)) for q in own
        ]
        groups.append(Group(prompt, episodes))
    batch = layout(groups).sequences
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "gate.weight" in name:
            tensor += 0.01 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def mismatch(place: Path, *, replayed: bool) -> np.ndarray:
        rank = Fsdp2().start(LearnerSettings(place, micro_batch_tokens=200), 0)
        given = batch if replayed else replace(batch, routed_experts=None)
        work = cut_for(given, [range(len(given))], ranks=1, token_budget=200)
        streams = rank.score(work.shares[0], ScoreRequest(TEMPERATURE, log_probs=True)).streams
        assert batch.rollout_log_probs is not None
        return np.abs(work.merge(given, [streams["log_probs"]]) - batch.rollout_log_probs)

    assert mismatch(folder, replayed=True).max() < 1e-5
    assert mismatch(folder, replayed=False).max() < 1e-5
    off, replayed = mismatch(tmp_path, replayed=False), mismatch(tmp_path, replayed=True)
    print(f"mismatch {off.mean():.2e} (max {off.max():.2e}), replayed {replayed.mean():.2e} ({replayed.max():.2e})")
    assert off.max() > 0.1, "somebody went to another expert"
    assert replayed.max() < off.max() / 5, "what is left is the weights of the experts"
