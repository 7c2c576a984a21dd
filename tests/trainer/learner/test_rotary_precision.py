"""All models of a learner rotate by the same angles in half precision, and the engine by theirs: equal weights have
equal log-probs, at position 3,000 too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_for import cut_for
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import ScoreRequest, SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.rollout.torch_engine import TorchEngine

VOCABULARY, HEAD, THETA = 50, 32, 10_000.0
RESPONSES = (2600, 200, 41, 300)
"""Tokens of each; the first two and the last two have a prompt in common."""


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with one shared matrix in float32, or Llama with two in bfloat16; room for 4,096 tokens. The weights are
    large, as those of a trained model are: attention depends on where a token stands."""
    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 2 * HEAD,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }
    made = tmp_path_factory.mktemp(request.param)
    if request.param == "tied":
        Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **sizes)).save_pretrained(made)
    else:
        llama = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **sizes))
        llama.to(torch.bfloat16).save_pretrained(made)
    return made


def long_sequences() -> SequenceBatch:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, 9), rng.integers(0, VOCABULARY, 5)]
    ids = [part for i, count in enumerate(RESPONSES) for part in (prompts[i // 2], rng.integers(0, VOCABULARY, count))]
    return SequenceBatch(
        token_ids=np.concatenate(ids).astype(np.int32),
        prompt_lengths=np.array([9, 9, 5, 5]),
        response_lengths=np.array(RESPONSES),
        mask=np.ones(sum(RESPONSES), dtype=np.bool_),
    )


def settings_for(folder: Path, **options: Any) -> LearnerSettings:
    return LearnerSettings(folder, dtype="bfloat16", reference=True, **options)


def scored(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, wanted: dict[str, bool]
) -> dict[str, np.ndarray]:
    """What this rank scores of the batch; its share, in the share's order."""
    learner = Fsdp2().start(settings, rank, address)
    work = cut_for(
        batch,
        [range(len(batch))],
        ranks=settings.ranks,
        token_budget=settings.micro_batch_tokens,
        share_prefixes=settings.share_prefixes,
    )
    return learner.score(work.shares[rank], ScoreRequest(0.7, **wanted)).streams


@pytest.mark.slow(stands_for=["[tied-to host and back]", "[untied-two ranks]"])
@pytest.mark.parametrize(
    ("ranks_used", "options"),
    [
        (1, {"micro_batch_tokens": 16_384}),  # all in one row, prompts once
        (1, {"micro_batch_tokens": 2_700, "share_prefixes": False}),
        (1, {"activation_checkpointing": True, "offload": True}),
        (2, {"micro_batch_tokens": 4_000}),
    ],
    ids=["one row", "a row each", "to host and back", "two ranks"],
)
def test_actor_and_reference_with_equal_weights_are_no_distance_apart(
    ranks: Any, folder: Path, ranks_used: int, options: dict[str, Any]
) -> None:
    settings = settings_for(folder, ranks=ranks_used, **options)
    plain = {"log_probs": True, "reference": True}
    for streams in ranks.run(ranks_used, scored, settings, long_sequences(), plain):
        assert np.ptp(streams["log_probs"]) > 1.0
        np.testing.assert_array_equal(streams["ref_log_probs"], streams["log_probs"])


def test_their_exact_kl_over_the_vocabulary_is_zero(ranks: Any, folder: Path) -> None:
    wanted = {"log_probs": True, "vocabulary_kl": True}
    (streams,) = ranks.run(1, scored, settings_for(folder), long_sequences(), wanted)
    assert not streams["vocabulary_kl"].any()
    np.testing.assert_array_equal(streams["ref_log_probs"], streams["log_probs"])


def frequencies_of_all_models(rank: int, address: str, settings: LearnerSettings, kept: Path) -> dict[str, np.ndarray]:
    """Of the models after they came up, were told to make room, and read a state."""
    learner = Fsdp2().start(settings, rank, address)
    learner.save(kept)
    learner.rest()
    learner.wake()
    learner.load(kept)
    assert learner.critic is not None
    assert learner._reference is not None
    models = {"actor": learner.actor.module, "critic": learner.critic.module, "reference": learner._reference}
    return {
        f"{model} {name}": buffer.double().numpy()
        for model, module in models.items()
        for name, buffer in module.named_buffers()
        if name.endswith("inv_freq")
    }


def test_no_model_of_a_learner_rounds_its_rotary_frequencies(ranks: Any, folder: Path, tmp_path: Path) -> None:
    settings = settings_for(folder, critic=OptimizerSettings())
    (seen,) = ranks.run(1, frequencies_of_all_models, settings, tmp_path)
    # theta^(-2 i / d), i = 0 .. d / 2 - 1 (arXiv 2104.09864, equation 15)
    expected = THETA ** (-2.0 * np.arange(HEAD // 2) / HEAD)
    assert {name.split()[0] for name in seen} == {"actor", "critic", "reference"}
    for frequencies in seen.values():
        np.testing.assert_allclose(frequencies, expected, rtol=1e-6)


def test_the_engine_rotates_by_the_actors_angles(folder: Path) -> None:
    engine = TorchEngine.from_folder(folder, dtype=torch.bfloat16)
    model = LlamaForCausalLM if "untied" in folder.name else Qwen2ForCausalLM
    rotary: Any = model.from_pretrained(folder, dtype=torch.bfloat16).model.rotary_emb
    cos, sin = rotary(torch.zeros(1, dtype=torch.bfloat16), torch.arange(4096)[None])
    ours, signed = engine._decoder._rotation(4096)
    half = HEAD // 2
    assert torch.equal(ours[:4096], cos[0])
    assert torch.equal(torch.cat((-signed[:4096, :half], signed[:4096, half:]), -1), sin[0])
