"""Small reward models with random weights, what transformers says of a text, and a pool of rewards with one of them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from rljob_api.spec.reward import Reward
from rljob_trainer.models.tokenizer import character_tokenizer
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.rewards.terms import Response

CHARACTERS = "abcdefghijklmnopqrstuvwxyz =:\n<|>"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


def made(
    folder: Path,
    *,
    labels: int = 1,
    template: str | None = None,
    padding: bool = True,
    seed: int = 0,
    characters: str = CHARACTERS,
) -> Path:
    """A small reward model with random weights, large enough that scores differ."""
    tokenizer = character_tokenizer(characters, 64)
    tokenizer.chat_template = template
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=labels,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if padding else None,
    )
    torch.manual_seed(seed)
    kind = LlamaForSequenceClassification if labels else LlamaForCausalLM
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@cache
def transformers_own(folder: Path) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


def alone(folder: Path, text: str, *, begins: bool = True, characters: str = CHARACTERS) -> float:
    """What transformers says of one text, unpadded; ``begins`` with the tokenizer's own first token."""
    ids = torch.tensor([character_tokenizer(characters, 64)(text, add_special_tokens=begins)["input_ids"]])
    with torch.no_grad():
        return float(transformers_own(folder)(input_ids=ids).logits[0, 0])


def reward(folder: Path, more: dict[str, Any] | None = None, **settings: Any) -> Reward:
    function = {"type": "rewardModel", "rewardModel": {"source": str(folder), **settings}}
    return Reward.model_validate({"functions": [function], **(more or {})})


@asynccontextmanager
async def pool(given: Reward, output: Path | None = None) -> AsyncIterator[RewardPool]:
    before = set(psutil.Process().children())
    async with RewardPool(given, longest_response=100, records=output) as opened:
        yield opened
    assert not {child for child in psutil.Process().children() if child.is_running()} - before


def responses(*texts: str, **more: Any) -> list[Response]:
    return [
        Response("what=", text, None, "s", len(text), "stop", label=f"sample {i}", **more)
        for i, text in enumerate(texts)
    ]


def texts(count: int, longest: int = 50) -> list[str]:
    chance = random.Random(count)
    return ["".join(chance.choices("abcdefghij", k=chance.randint(1, longest))) for _ in range(count)]
