"""The same requests through bare vLLM and through our engine; each in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.baseline import KeptBaseline
from benchmarks.gpu.figures import Writer
from benchmarks.gpu.model import CONTEXT, prompts, shaped_model

REQUESTS, TOKENS = 256, 512

ENGINE_ARGUMENTS: dict[str, Any] = {"gpu_memory_utilization": 0.8}
OURS = KeptBaseline("engine")
"""Our tokens a second, for the ratio."""
ROUNDS = 3
"""One that is not counted (CUDA graphs, caches) and two that are."""


def measure(writer: Writer, cache: Path) -> None:
    """Both sides, each in a process of its own: vLLM gives back all that it took only when its process ends."""
    model = shaped_model(cache)
    rates: dict[str, float] = {}
    for name, side in (("ours", ours), ("bare", bare)):
        rates[name] = _rate(side, model)
        writer.plain(f"engine, {'bare vLLM' if name == 'bare' else 'ours'}", rates[name], "tokens/s")
    writer.at_least("engine, ours over bare vLLM", rates["ours"] / rates["bare"], 0.95)
    OURS.keep(cache, rates["ours"])


def measure_own_process(writer: Writer, cache: Path) -> None:
    """Ours with ``rollout.multiprocessing``, beside what ``measure`` has found without."""
    rate = _rate(partial(ours, own_process=True), shaped_model(cache))
    writer.plain("engine, ours, core in its own process", rate, "tokens/s")
    before = OURS.read(cache)
    if isinstance(before, str):
        writer.note(before)
    else:
        writer.plain("engine, own process over core here", rate / before)


def _rate(side: Callable[[Path, int, int, str], list[tuple[int, float]]], model: Path) -> float:
    """Tokens a second of the best round but the first."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        rounds = pool.submit(side, model, REQUESTS, TOKENS, "cuda").result()[1:]
    return max(made / seconds for made, seconds in rounds)


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


def ours(model: Path, count: int, tokens: int, device: str, *, own_process: bool = False) -> list[tuple[int, float]]:
    """Our vLLM engine on its thread, as its actor drives it. ``own_process``: ``rollout.multiprocessing``."""
    from rljob_trainer.episodes.identity import TRAINING, EpisodeId
    from rljob_trainer.episodes.requests import GenerationRequest, SamplingSettings
    from rljob_trainer.rollout.actor import EngineSpec, build_engine
    from rljob_trainer.rollout.engine_loop import EngineLoop

    arguments = {} if device == "cpu" else ENGINE_ARGUMENTS
    spec = EngineSpec(
        "vllm",
        str(model),
        dtype=_dtype(device),
        device=device,
        max_context=CONTEXT,
        max_concurrent=count,
        own_process=own_process,
        engine_args=arguments,
    )
    loop = EngineLoop(lambda: build_engine(spec), "0")
    sampling = SamplingSettings(temperature=1.0, max_tokens=tokens)
    rounds = []
    for number in range(ROUNDS):
        requests = [
            GenerationRequest(EpisodeId(TRAINING, number, index), tuple(ids), sampling, seed=index)
            for index, ids in enumerate(prompts(model, count))
        ]
        started = time.perf_counter()
        loop.submit(requests)
        made, done = 0, 0
        while done < len(requests):
            results = loop.collect(60.0)
            done += len(results)
            made += sum(len(result.tokens) for result in results)
        rounds.append((made, time.perf_counter() - started))
    loop.close()
    return rounds


def _dtype(device: str) -> Literal["float32", "bfloat16"]:
    return "float32" if device == "cpu" else "bfloat16"


def _cpu_environment() -> None:
    import os

    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
