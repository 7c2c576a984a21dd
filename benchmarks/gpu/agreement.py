"""Log-probs of vLLM at sampling and of the learner for the same tokens; sleep and wake, with memory read back."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.figures import Writer
from benchmarks.gpu.model import CONTEXT, prompts, shaped_model


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the engine's process tells."""

    prompts: list[list[int]]
    responses: list[np.ndarray]
    log_probs: list[np.ndarray]
    used_awake: int
    """Bytes of the device, by whomever."""
    used_asleep: int
    used_woken: int
    difference_after_sleep: float
    """Largest, of the log-probs of the same sequences before and after."""


def measure(writer: Writer, device: str, cache: Path) -> None:
    model = shaped_model(cache, "0.5b" if device == "cuda" else "small")
    requests, tokens = (64, 128) if device == "cuda" else (8, 8)
    # In a process of its own: engine and learner each want the process's groups, and the learner all of the memory.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        sampled = pool.submit(sample, model, device, requests, tokens).result()
    writer.at_most(
        "scores before sleep and after wake, largest difference", sampled.difference_after_sleep, 0.02, "nats"
    )
    if device == "cuda":
        writer.plain("device memory in use, engine awake", sampled.used_awake / 1e9, "GB")
        share = sampled.used_asleep / sampled.used_awake
        writer.at_most("device memory in use, asleep, share of that", share, 0.25)
        writer.plain("device memory in use, woken", sampled.used_woken / 1e9, "GB")
    scored = _scores(model, device, sampled)
    sampled_log_probs = np.concatenate(sampled.log_probs)
    difference = np.abs(scored - sampled_log_probs)
    mean_bound, largest_bound = (0.02, 0.5) if device == "cuda" else (1e-5, 1e-4)
    writer.at_most("log-probs, engine against learner, mean difference", float(difference.mean()), mean_bound, "nats")
    writer.at_most("log-probs, engine against learner, largest", float(difference.max()), largest_bound, "nats")


def sample(model: Path, device: str, requests: int, tokens: int) -> Sampled:
    """In the engine's process: samples, scores, sleeps, wakes, scores again."""
    from rljob_trainer.episodes.identity import TRAINING, EpisodeId
    from rljob_trainer.episodes.requests import GenerationRequest, SamplingSettings
    from rljob_trainer.rollout.actor import EngineSpec, build_engine
    from rljob_trainer.rollout.engine_loop import EngineLoop

    on_gpu = device == "cuda"
    spec = EngineSpec(
        "vllm",
        str(model),
        dtype="bfloat16" if on_gpu else "float32",
        device=device,
        max_context=CONTEXT,
        max_concurrent=requests,
        engine_args={"gpu_memory_utilization": 0.4} if on_gpu else {},
    )
    loop = EngineLoop(lambda: build_engine(spec), "0")
    asked = prompts(model, requests)
    sampling = SamplingSettings(temperature=1.0, max_tokens=tokens)
    loop.submit(
        [GenerationRequest(EpisodeId(TRAINING, i, 0), tuple(ids), sampling, seed=i) for i, ids in enumerate(asked)]
    )
    results: dict[int, Any] = {}
    while len(results) < len(asked):
        results |= {result.id.ordinal: result for result in loop.collect(60.0)}
    ordered = [results[index] for index in range(len(asked))]
    scored = [(ids, result.tokens.ids.tolist()) for ids, result in zip(asked[:8], ordered[:8], strict=True)]
    before = np.concatenate(loop.score(scored, 1.0))
    awake = _used(device)
    loop.sleep()
    asleep = _used(device)
    loop.wake()
    woken = _used(device)
    after = np.concatenate(loop.score(scored, 1.0))
    loop.close()
    return Sampled(
        asked,
        [result.tokens.ids for result in ordered],
        [result.tokens.log_probs for result in ordered],
        awake,
        asleep,
        woken,
        float(np.abs(after - before).max()),
    )


def _used(device: str) -> int:
    import torch

    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _scores(model: Path, device: str, sampled: Sampled) -> np.ndarray:
    """The learner's log-probs of the responses, ``[tokens]``."""
    from benchmarks.gpu.learner import new_rank
    from rljob_trainer.learner.backend import Placement, RowRules
    from rljob_trainer.learner.protocol import ScoreRequest, SequenceBatch
    from rljob_trainer.learner.work import cut

    lengths = np.array([len(response) for response in sampled.responses])
    pairs = zip(sampled.prompts, sampled.responses, strict=True)
    batch = SequenceBatch(
        token_ids=np.concatenate([part for pair in pairs for part in pair]).astype(np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in sampled.prompts]),
        response_lengths=lengths,
        mask=np.ones(int(lengths.sum()), dtype=np.bool_),
    )
    rank = new_rank(model, device, "bfloat16" if device == "cuda" else "float32", 16384, reference=False)
    work = cut(batch, [range(len(batch))], [Placement(0)], RowRules(16384))
    return work.merge(batch, [rank.score(work.shares[0], ScoreRequest(log_probs=True)).streams["log_probs"]])
