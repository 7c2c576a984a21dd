"""How fast the same step could be: the model's own work with nothing around it.

Two limits. *Bare*: eager transformers does only what a step cannot do without: decode the batch with a KV cache, the
forward passes without gradient, forward, backward and AdamW on the same tokens. No trainer, no rewards, no
log-probs of its own making, no padding but that of the batch. *Arithmetic*: the floating-point operations of all that
over the speed of a large matrix product on the same thread; nothing that computes in float32 gets below it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.against_trl.model import prompt_ids
from benchmarks.against_trl.setting import Setting


@dataclass(frozen=True, slots=True)
class Limit:
    """Seconds of one step at the limit, by part, and the arithmetic bound."""

    decode: float
    score: float
    """Forward passes before the update: policy, reference and value model for PPO, none for GRPO."""
    update: float
    arithmetic: float

    @property
    def bare(self) -> float:
        return self.decode + self.score + self.update


class PaddedBatch:
    """Prompts padded on the left, and the responses that the model makes of them."""

    def __init__(self, setting: Setting, model_folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        lines = (model_folder / "prompts.jsonl").read_text().splitlines()
        by_length = sorted((prompt_ids(tokenizer, json.loads(line)["question"]) for line in lines), key=len)
        count = setting.sequences // setting.samples_per_prompt
        # Evenly over all lengths, so that this one batch stands for the average of a run's.
        prompts = [by_length[(2 * i + 1) * len(by_length) // (2 * count)] for i in range(count)]
        rows = [ids for ids in prompts for _ in range(setting.samples_per_prompt)]
        longest = max(map(len, rows))
        self.response = setting.response_tokens
        self.prompt_lengths = [len(ids) for ids in rows]
        self.ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(ids)) + ids for ids in rows])  # [B, P]
        self.attention = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in rows])

    def extended(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, attention mask and positions ``[B, P + R]`` with random responses (which tokens is all the same)."""
        responses = torch.randint(3, 2048, (len(self.ids), self.response))
        ids = torch.cat([self.ids, responses], dim=1)
        attention = torch.cat([self.attention, torch.ones_like(responses)], dim=1)
        return ids, attention, (attention.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def decode(model: PreTrainedModel, batch: PaddedBatch) -> None:
    """Samples the responses at temperature 1 with transformers' growing cache."""
    attention = batch.attention
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    ids, position = batch.ids, positions
    for _ in range(batch.response):
        out = model(ids, attention_mask=attention, position_ids=position, past_key_values=cache, logits_to_keep=1)
        ids = torch.multinomial(out.logits[:, -1].softmax(-1), 1)
        attention = torch.cat([attention, attention.new_ones(len(ids), 1)], dim=1)
        position = position[:, -1:] + 1


def response_log_probs(model: PreTrainedModel, batch: PaddedBatch) -> torch.Tensor:
    """Log-probs ``[B, R]`` of responses: the forward pass of every policy-gradient step."""
    ids, attention, positions = batch.extended()
    logits = model(
        ids, attention_mask=attention, position_ids=positions, logits_to_keep=batch.response + 1, use_cache=False
    ).logits[:, :-1]
    chosen = ids[:, -batch.response :]
    return -torch.nn.functional.cross_entropy(logits.flatten(0, 1), chosen.flatten(), reduction="none")


def train_once(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: PaddedBatch) -> None:
    (-response_log_probs(model, batch).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def seconds(work: Callable[[], None], repetitions: int = 7) -> float:
    """Median of several runs after one that is not counted."""
    work()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def arithmetic_seconds(model: PreTrainedModel, batch: PaddedBatch, passes: int) -> float:
    """Floating-point operations of ``passes`` forward passes over the batch, over the speed of a matrix product.

    A forward pass takes 2 operations a parameter and token (the output matrix at response positions only) and
    4 x hidden x layers a token and attended position; backward is twice a forward.
    """
    config = model.config
    embedding = config.vocab_size * config.hidden_size
    body = sum(p.numel() for p in model.parameters()) - embedding
    work = 0
    for prompt in batch.prompt_lengths:
        tokens = prompt + batch.response
        attended = tokens * (tokens + 1) // 2
        work += 2 * body * tokens + 2 * embedding * batch.response
        work += 4 * config.hidden_size * config.num_hidden_layers * attended
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    product = a.new_empty(1024, 1024)
    speed = 2 * 1024**3 / seconds(lambda: _multiply(a, b, product))
    return work * passes / speed


def _multiply(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> None:
    torch.mm(a, b, out=product)


def measure(setting: Setting, model_folder: Path) -> Limit:
    """The limit of one setting on this machine, now."""
    torch.manual_seed(setting.seed)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate)
    batch = PaddedBatch(setting, model_folder)
    models = 1 if setting.algorithm == "grpo" else 2  # the critic is as big as the actor
    scored = 0 if setting.algorithm == "grpo" else 3  # policy, reference, critic

    def score_once() -> None:
        with torch.no_grad():
            response_log_probs(model, batch)

    return Limit(
        decode=seconds(lambda: decode(model, batch)),
        score=scored * seconds(score_once) if scored else 0.0,
        update=models * setting.epochs * seconds(lambda: train_once(model, optimizer, batch)),
        # Decoding with a cache is one forward pass over the same tokens.
        arithmetic=arithmetic_seconds(model, batch, passes=1 + scored + 3 * models * setting.epochs),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", type=Setting.from_json, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--write", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.write.write_text(json.dumps(asdict(measure(arguments.setting, arguments.model))))
