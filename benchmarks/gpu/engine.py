"""The same requests through bare vLLM and through our engine; each in a process of its own."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Literal

from benchmarks.against_trl.model import prompt_ids
from benchmarks.gpu.model import CONTEXT

ENGINE_ARGUMENTS: dict[str, Any] = {"gpu_memory_utilization": 0.8}
ROUNDS = 3
"""One that is not counted (CUDA graphs, caches) and two that are."""


def prompts(model: Path, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (model / "prompts.jsonl").read_text().splitlines()[:count]
    return [prompt_ids(tokenizer, json.loads(line)["question"]) for line in lines]


def bare(model: Path, count: int, tokens: int, device: str) -> list[tuple[int, float]]:
    """vLLM's own offline interface: ``[(tokens, seconds), ...]`` by round."""
    if device == "cpu":
        _cpu_environment()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    on_device = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20} if device == "cpu" else ENGINE_ARGUMENTS
    llm = LLM(model=str(model), dtype=_dtype(device), max_model_len=CONTEXT, max_num_seqs=count, **on_device)
    asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts(model, count)]
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        rounds.append((sum(len(output.outputs[0].token_ids) for output in outputs), seconds))
    return rounds


def ours(model: Path, count: int, tokens: int, device: str) -> list[tuple[int, float]]:
    """Our vLLM engine on its thread, as its actor drives it."""
    from rljob_trainer.rollout.actor import EngineSpec, build_engine
    from rljob_trainer.rollout.engine_loop import EngineLoop
    from rljob_trainer.rollout.protocol import GenerationRequest, SamplingSettings

    arguments = {} if device == "cpu" else ENGINE_ARGUMENTS
    spec = EngineSpec(
        "vllm",
        str(model),
        dtype=_dtype(device),
        device=device,
        max_context=CONTEXT,
        max_concurrent=count,
        engine_args=arguments,
    )
    loop = EngineLoop(lambda: build_engine(spec), "0")
    sampling = SamplingSettings(temperature=1.0, max_tokens=tokens)
    rounds = []
    for number in range(ROUNDS):
        requests = [
            GenerationRequest(f"{number}/{index}", tuple(ids), sampling, seed=index)
            for index, ids in enumerate(prompts(model, count))
        ]
        started = time.perf_counter()
        loop.submit(requests)
        made, done = 0, 0
        while done < len(requests):
            results = loop.collect(60.0)
            done += len(results)
            made += sum(len(result.token_ids) for result in results)
        rounds.append((made, time.perf_counter() - started))
    loop.close()
    return rounds


def _dtype(device: str) -> Literal["float32", "bfloat16"]:
    return "float32" if device == "cpu" else "bfloat16"


def _cpu_environment() -> None:
    import os

    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["bare", "ours"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    side = bare if arguments.side == "bare" else ours
    measured = side(arguments.model, arguments.requests, arguments.tokens, arguments.device)
    arguments.write.write_text(json.dumps(measured[1:]))
