"""The learner alone, in one process without Ray and vLLM: is what it computes right, and how near is it to the peak?

It needs torch, transformers, accelerate and nothing else that is large, so it runs where the other parts cannot be
installed.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.gpu.figures import Writer
from benchmarks.gpu.model import Size, prompts, shaped_model
from rljob_trainer.learner.backend import Placement, RowRules
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import Dtype, LearnerSettings
from rljob_trainer.learner.work import Cut, Share, cut
from rljob_trainer.stores import serve_store
from rljob_trainer.telemetry.speed import ModelSize, forward_flops, peak_flops

WARM_UP, ROUNDS = 1, 3
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
PASSES = {"old_log_probs": 1, "reference": 1, "update_actor": 3}
"""Forward passes that a stage is worth."""


def measure(writer: Writer, device: str, cache: Path) -> None:
    if device == "cpu":
        # In both precisions: half precision is FSDP2's, as on a GPU.
        for dtype in DTYPES:
            _measure(writer, cache, "small", device, dtype, sequences=16, tokens=8, micro_batch_tokens=1024)
        return
    # Activations that are kept take about 70 and 110 KB a token and layer.
    _measure(writer, cache, "0.5b", device, "bfloat16", sequences=256, tokens=512, micro_batch_tokens=16384)
    _measure(writer, cache, "1.5b", device, "bfloat16", sequences=64, tokens=512, micro_batch_tokens=8192)


def responses(model: Path, sequences: int, samples: int, tokens: int) -> SequenceBatch:
    """Groups of ``samples`` responses to the same prompt, all ``tokens`` long, as random weights make them."""
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    asked = prompts(model, sequences // samples)
    rng = np.random.default_rng(0)
    ids = [part for p in asked for _ in range(samples) for part in (p, rng.integers(0, vocabulary, tokens))]
    return SequenceBatch(
        token_ids=np.concatenate(ids).astype(np.int32),
        prompt_lengths=np.repeat([len(prompt) for prompt in asked], samples),
        response_lengths=np.full(len(asked) * samples, tokens),
        mask=np.ones(len(asked) * samples * tokens, dtype=np.bool_),
        advantages=rng.standard_normal(len(asked) * samples * tokens).astype(np.float32),
    )


def filled(cache: Path, device: str, sequences: int = 256) -> tuple[Path, Share, int]:
    """For parts that measure one model: that of 0.5B (a small one on a CPU) in bfloat16, a batch of one mini-batch for
    a learner of one rank, and the most tokens of its micro-batches. ``sequences``: on a GPU."""
    size: Size = "0.5b" if device == "cuda" else "small"
    count, tokens, micro_batch_tokens = (sequences, 512, 16384) if device == "cuda" else (16, 8, 1024)
    model = shaped_model(cache, size)
    batch = responses(model, count, samples=8, tokens=tokens)
    shares = cut(batch, [range(len(batch))], [Placement(0)], RowRules(micro_batch_tokens)).shares
    return model, shares[0], micro_batch_tokens


def new_rank(
    model: Path,
    device: str,
    dtype: Dtype,
    micro_batch_tokens: int,
    *,
    reference: bool,
    compiled: bool = False,
    deterministic: bool = False,
) -> LearnerRank:
    """A learner of one rank, in this process; in bfloat16 it opens a process group with itself."""
    settings = LearnerSettings(
        model,
        dtype=dtype,
        device="cuda" if device == "cuda" else "cpu",
        reference=reference,
        micro_batch_tokens=micro_batch_tokens,
        compile=compiled,
        deterministic=deterministic,
    )
    return Fsdp2().start(settings, address=f"127.0.0.1:{free_port()}")


def free_port() -> int:
    store, address = serve_store("127.0.0.1")
    del store
    return int(address.rpartition(":")[2])


def _measure(
    writer: Writer,
    cache: Path,
    size: Size,
    device: str,
    dtype: Dtype,
    *,
    sequences: int,
    tokens: int,
    micro_batch_tokens: int,
) -> None:
    model = shaped_model(cache, size)
    rank = new_rank(model, device, dtype, micro_batch_tokens, reference=True)
    batch = responses(model, sequences, samples=8, tokens=tokens)
    work = cut(batch, [range(len(batch))], [Placement(0)], RowRules(micro_batch_tokens))
    name = f"{size}, {dtype}"
    _compare(writer, rank, model, batch, name, device)

    seconds: dict[str, list[float]] = {stage: [] for stage in PASSES}
    memory = 0
    for _ in range(WARM_UP + ROUNDS):
        scores = rank.score(work.shares[0], ScoreRequest(log_probs=True, reference=True))
        report = rank.update(work.shares[0], LossSettings())
        for stage, spent in (scores.usage.seconds | report.usage.seconds).items():
            if stage in seconds:
                seconds[stage].append(spent)
        memory = max(memory, report.usage.device_allocated)
    facts, lengths = rank.facts(), batch.prompt_lengths + batch.response_lengths
    forward = forward_flops(ModelSize(facts.actor.parameters, facts.actor.layers, facts.actor.width), lengths.tolist())
    peak = peak_flops(facts.device)
    for stage, passes in PASSES.items():
        each = median(seconds[stage][WARM_UP:])
        writer.plain(f"{name}: {stage}", float(lengths.sum()) / each, "tokens/s")
        if peak is None:
            continue
        used = passes * forward / (each * peak)
        if stage == "update_actor":
            writer.at_least(f"{name}: {stage}, model FLOPs utilisation", used, 0.45)
        else:
            writer.plain(f"{name}: {stage}, model FLOPs utilisation", used)
    if memory:
        writer.plain(f"{name}: device memory at its peak", memory / 1e9, "GB")
        _turns(writer, rank, name)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _turns(writer: Writer, rank: LearnerRank, name: str) -> None:
    """What a colocated engine waits for: everything to host memory, and back. Host memory is made in the first turn."""
    for turn in (1, 2):
        used = torch.cuda.memory_allocated()
        started = time.perf_counter()
        rank.rest()
        torch.cuda.synchronize()
        rested = time.perf_counter()
        moved = (used - torch.cuda.memory_allocated()) / 1e9
        rank.wake()
        torch.cuda.synchronize()
        woken = time.perf_counter()
        if turn == 2:
            writer.plain(f"{name}: rest", moved / (rested - started), "GB/s")
            writer.plain(f"{name}: wake", moved / (woken - rested), "GB/s")


def _compare(writer: Writer, rank: LearnerRank, model: Path, batch: SequenceBatch, name: str, device: str) -> None:
    """Before any update: the reference is the actor, bit for bit, and both are near transformers in float32."""
    whole = cut(batch, [range(8)], [Placement(0)], RowRules(rank.settings.micro_batch_tokens))
    streams = rank.score(whole.shares[0], ScoreRequest(log_probs=True, reference=True)).streams
    difference = np.abs(streams["log_probs"] - streams["ref_log_probs"]).max()
    writer.at_most(f"{name}: reference against actor before an update, largest difference", float(difference), 0.0)
    exact = float32_log_probs(model, batch, 8, device)
    ours = _in_order(whole, batch, streams["log_probs"])[: len(exact)]
    bound = 1e-4 if rank.settings.dtype == "float32" else 0.03
    error = float(np.abs(ours - exact).mean())
    writer.at_most(f"{name}: log-probs against float32, mean difference", error, bound, "nats")


def _in_order(whole: Cut, batch: SequenceBatch, stream: np.ndarray) -> np.ndarray:
    """A stream of the micro-batches in the order of the batch."""
    return whole.merge(batch, [stream], only=0)


@torch.no_grad()
def float32_log_probs(model: Path, batch: SequenceBatch, sequences: int, device: str) -> np.ndarray:
    """Of the first sequences, each alone, by transformers and a log-softmax over all logits."""
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").to(device)
    parts, start = [], 0
    for prompt, response in zip(batch.prompt_lengths[:sequences], batch.response_lengths[:sequences], strict=True):
        ids = torch.from_numpy(batch.token_ids[start : start + prompt + response].astype(np.int64)).to(device)
        start += prompt + response
        logits = exact(ids[None], use_cache=False).logits[0, prompt - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]
        parts.append(chosen.cpu().numpy())
    return np.concatenate(parts)
