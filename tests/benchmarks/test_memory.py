"""Peak memory without a GPU: in closed form where there is one, and what the record says of the examples."""

from __future__ import annotations

import json

from benchmarks.memory.__main__ import DAPO, HERE, JOBS, PPO_7B, config_of, show, spec_of, verdict
from benchmarks.memory.activations import peak_bytes
from benchmarks.memory.rank import Peak, Sizes
from transformers import Qwen2Config

WIDTH, PROMPT, RESPONSE, SEQUENCES = 64, 20, 30, 4


def activations(layers: int, *, checkpointing: bool) -> int:
    config = Qwen2Config(
        vocab_size=53,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lengths = {"prompt": PROMPT, "response": RESPONSE, "budget": SEQUENCES * (PROMPT + RESPONSE)}
    return peak_bytes(config, "actor", **lengths, memory=1 << 36, checkpointing=checkpointing)


def test_with_checkpointing_a_layer_keeps_its_input_and_nothing_else() -> None:
    # The last token of a response predicts nothing and is not in the row.
    row = SEQUENCES * (PROMPT + RESPONSE - 1)
    with_three = activations(3, checkpointing=True)
    assert with_three - activations(2, checkpointing=True) == row * WIDTH * 2  # bfloat16
    assert activations(3, checkpointing=False) > 2 * with_three


def test_a_qwen_of_7b_has_the_published_number_of_parameters() -> None:
    assert Sizes.of(config_of("7B")).all == 7_615_616_512


def test_the_record_is_of_these_jobs_and_says_that_ppo_at_7b_on_four_ranks_needs_offload() -> None:
    record = json.loads((HERE / "results" / "memory.json").read_text())
    assert list(record) == list(JOBS)
    peaks = {name: (Peak(**plain), Peak(**offloaded)) for name, (plain, offloaded) in record.items()}
    assert (HERE / "results" / "memory.md").read_text() == show(peaks) + "\n"
    verdicts = {name: verdict(*both) for name, both in peaks.items()}
    assert verdicts.pop(PPO_7B) == "needs trainer.offload: true"
    assert set(verdicts.values()) == {"fits"}
    for name, (plain, _) in peaks.items():
        spec = spec_of(name)
        # Float32 masters, gradients and two moments, and of a critic that waits all but its gradients.
        bytes_each = 28 if spec.algorithm.critic else 16
        ways = spec.trainer.parallelism
        assert plain.state == bytes_each * Sizes.of(config_of(JOBS[name][0])).all // (ways.shard * ways.context)
    assert peaks[f"{DAPO} 16-16"] == peaks[f"{DAPO} 64-64"]
