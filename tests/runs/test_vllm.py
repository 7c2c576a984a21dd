"""`rljob run` with vLLM engines whose requests run on through publications, and its model in the hands of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from real_runs import Runner, metrics_of
from safetensors.torch import load_file
from tiny_job import copy_job
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rljob_trainer.cli import main
from rljob_trainer.driver.finished import find_trained, load_actor

pytestmark = pytest.mark.vllm

PROMPTS = ["12=", "9=", "4071="]
GREEDY = """
import json, os, sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"
}
from vllm import LLM, SamplingParams

folder, prompts, out = sys.argv[1:]
model = LLM(folder, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=32 << 20)
sampling = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
made = [(each.prompt_token_ids, each.outputs[0]) for each in model.generate(json.loads(prompts), sampling)]
tokens = [(list(ids), [(t, at[t].logprob) for t, at in zip(o.token_ids, o.logprobs)]) for ids, o in made]
with open(out, "w") as file:
    json.dump(tokens, file)
"""
"""vLLM as its users call it, with the folder's own tokenizer."""


def test_requests_run_on_through_publications_and_the_engine_agrees_with_the_trainer(runner: Runner) -> None:
    job = copy_job(
        batch={"samplesPerPrompt": 4, "miniBatchGroups": 2},
        # As many batches ahead as there are steps, and few requests at once: the engine never waits for the trainer,
        # however slow that is on a busy machine, so that publications meet requests.
        pipeline={"mode": "fullyAsync", "staleness": {"maxAge": 6}, "partialRollout": "keepCache"},
        rollout={"engine": "vllm", "maxResponseTokens": 48, "maxConcurrent": 2},
        validation={"atStart": False},
        stop={"steps": 6},
    )
    job["spec"]["model"]["random"]["contextLength"] = 64
    output = runner.folder / "output"
    runner.run("run", runner.write(job), "--output", output)
    records = metrics_of(output)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    # Samples of two versions, and after every publication the same log-probs in engine and trainer.
    assert max(record["age/mixed_ratio"] for record in records) > 0
    distances = [record["mismatch/canary/max"] for record in records]
    assert len(distances) == 6
    assert max(distances) < 1e-4
    check_export(runner, output)


@pytest.mark.slow(
    stands_for=[
        "test_requests_run_on_through_publications_and_the_engine_agrees_with_the_trainer",
        "tests/trainer/rollout/test_vllm_core_process.py::test_with_a_kept_cache_each_token_has_the_version_that_made_it",
    ]
)
def test_a_core_in_its_own_process_takes_weights_while_requests_run_on(runner: Runner) -> None:
    """Inside Ray's actor, two batches deep."""
    job = copy_job(
        batch={"samplesPerPrompt": 4, "miniBatchGroups": 2},
        pipeline={"mode": "fullyAsync", "staleness": {"maxAge": 2}, "partialRollout": "keepCache"},
        rollout={"engine": "vllm", "multiprocessing": True, "maxResponseTokens": 48, "maxConcurrent": 2},
        validation={"atStart": False},
        stop={"steps": 3},
    )
    job["spec"]["model"]["random"]["contextLength"] = 64
    output = runner.folder / "output"
    runner.run("run", runner.write(job), "--output", output)
    records = metrics_of(output)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert max(record["age/max"] for record in records) > 0
    # After every publication the same log-probs in engine and trainer.
    assert max(record["mismatch/canary/max"] for record in records) < 1e-4


def check_export(runner: Runner, output: Path) -> None:
    """vLLM and transformers load what `rljob export` writes, and both answer as the learner itself would."""
    exported, made = runner.folder / "exported", runner.folder / "made.json"
    assert main(["export", str(output), "--to", str(exported)]) == 0
    first, last = (load_file(folder / "model.safetensors") for folder in (output / "start", exported))
    assert max(float((last[name] - first[name]).abs().max()) for name in first) > 1e-3
    runner.run(exported, json.dumps(PROMPTS), made, program=("-c", GREEDY), cold=True)
    learner = load_actor(find_trained(output, None, runner.folder / "scratch", report=print)).live_model
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for text, (prompt, answer) in zip(PROMPTS, json.loads(made.read_text()), strict=True):
        assert tokenizer(text)["input_ids"] == prompt
        tokens = torch.tensor([token for token, _ in answer])
        of_vllm = torch.tensor([log_prob for _, log_prob in answer])
        for model in (learner, loaded):
            log_probs = next_log_probs(model, prompt, tokens)
            torch.testing.assert_close(log_probs.gather(1, tokens[:, None])[:, 0], of_vllm, rtol=0, atol=1e-4)
            # The likeliest token each time; two that are as likely may change places.
            torch.testing.assert_close(log_probs.max(-1).values, of_vllm, rtol=0, atol=1e-4)


def next_log_probs(model: PreTrainedModel, prompt: list[int], response: torch.Tensor) -> torch.Tensor:
    """``[T, vocabulary]`` at the places of the response."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response.tolist()]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)
