"""Makes the reward model of tiny.yaml: a head that is trained, for some seconds, to like responses with many nines.

    python examples/reward-model/make_model.py [FOLDER]

Nothing here is special to rljob: it is a Hugging Face sequence classification with one label, trained on pairs (the
better response scores higher, Bradley-Terry), as reward models are.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rljob_trainer.models.tokenizer import character_tokenizer

STEPS, PAIRS = 150, 64


def made(folder: Path) -> float:
    """Trains and saves it; returns the share of pairs that it gets right in the last steps."""
    torch.manual_seed(1)
    chance = random.Random(1)
    tokenizer = character_tokenizer("0123456789=", 16)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    right = []
    for _ in range(STEPS):
        prompts = ["".join(chance.choices("0123456789", k=2)) + "=" for _ in range(PAIRS)]
        texts = [p + "".join(chance.choices("0123456789", k=chance.randint(1, 3))) for p in prompts * 2]
        nines = torch.tensor([text.partition("=")[2].count("9") for text in texts])
        encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        scores = model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits[:, 0]
        first, second = scores[:PAIRS], scores[PAIRS:]
        better = torch.sign(nines[:PAIRS] - nines[PAIRS:])
        told = better != 0
        margin = (better * (first - second))[told]
        loss = -logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append(float((margin > 0).float().mean()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(right[-10:]) / 10


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "model")
    print(f"{where}: {made(where):.0%} of the pairs in the right order")
