"""The learner alone, in one process without Ray and vLLM: seconds of an update, and what it is to the device's peak.

It needs torch and transformers and nothing else that is large, so it runs where the other parts cannot be installed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.against_trl.model import prompt_ids
from rljob_trainer.learner.protocol import LossSettings, SequenceBatch
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.work import cut
from rljob_trainer.telemetry.speed import ModelSize, forward_flops, peak_flops

MICRO_BATCH_TOKENS = 32768
"""As in ``job.yaml``."""
WARM_UP, ROUNDS = 2, 5


@dataclass(frozen=True, slots=True)
class Update:
    """What updates took; ``utilisation`` is None on a device whose peak is not known."""

    seconds: list[float]
    tokens: int
    """Of the batch, prompts and responses."""
    device: str
    utilisation: list[float] | None


def responses(model: Path, sequences: int, samples: int, tokens: int) -> SequenceBatch:
    """Groups of ``samples`` responses to the same prompt, all ``tokens`` long, as random weights make them."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, vocabulary = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model).vocab_size
    lines = (model / "prompts.jsonl").read_text().splitlines()[: sequences // samples]
    prompts = [prompt_ids(tokenizer, json.loads(line)["question"]) for line in lines]
    rng = np.random.default_rng(0)
    ids = [part for p in prompts for _ in range(samples) for part in (p, rng.integers(0, vocabulary, tokens))]
    return SequenceBatch(
        token_ids=np.concatenate(ids).astype(np.int32),
        prompt_lengths=np.repeat([len(prompt) for prompt in prompts], samples),
        response_lengths=np.full(len(prompts) * samples, tokens),
        mask=np.ones(len(prompts) * samples * tokens, dtype=np.bool_),
        advantages=rng.standard_normal(len(prompts) * samples * tokens).astype(np.float32),
    )


def measure(model: Path, device: str, sequences: int, samples: int, tokens: int) -> Update:
    """One update is one optimizer step over the whole batch, as in ``job.yaml``."""
    on_gpu = device == "cuda"
    settings = LearnerSettings(
        model,
        dtype="bfloat16" if on_gpu else "float32",
        device="cuda" if on_gpu else "cpu",
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )
    rank = LearnerRank(settings)
    batch = responses(model, sequences, samples, tokens)
    work = cut(batch, [range(len(batch))], ranks=1, token_budget=MICRO_BATCH_TOKENS)
    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        started = time.perf_counter()
        rank.update(work.shares[0], LossSettings())
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    counted, facts, lengths = seconds[WARM_UP:], rank.facts(), batch.prompt_lengths + batch.response_lengths
    forward = forward_flops(ModelSize(facts.parameters, facts.layers, facts.width), lengths.tolist())
    peak = peak_flops(facts.device)
    used = None if peak is None else [3 * forward / (each * peak) for each in counted]
    return Update(counted, int(lengths.sum()), facts.device, used)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    measured = measure(asked.model, asked.device, asked.sequences, asked.samples, asked.tokens)
    asked.write.write_text(json.dumps(asdict(measured)))
