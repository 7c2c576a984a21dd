"""Makes a tiny model that can call the interpreter but hardly does, as ReTool's cold start does with examples of calls.

    python examples/retool/cold_start.py runs/retool-model      # half a minute on two cores

It is shown how many ones 16 bits have modulo 2: seven times of eight the bare answer, which it cannot tell and guesses,
and once a program that counts them, what the program prints, and the answer. What pays is for RL to find out.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from rljob_trainer.data.tasks import is_held_out
from rljob_trainer.models.tokenizer import character_tokenizer

BITS = 16
CONTEXT = 96
PROGRAM = "```python\nprint('{bits}'.count('1')%2)\n```"
CHARACTERS = "".join(sorted(set(PROGRAM.format(bits="01") + "=")))
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
STEPS = 800
ANSWERS, CALLS = 56, 8
"""Shown chats of each kind in a batch."""


def main(folder: Path, steps: int = STEPS) -> None:
    """Trains it on shown answers for so many ``steps`` and writes the model to ``folder``."""
    random.seed(0)
    torch.manual_seed(0)
    tokenizer = character_tokenizer(CHARACTERS, CONTEXT)
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": CONTEXT / 3},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = 0.0
        for count, calls in ((ANSWERS, False), (CALLS, True)):
            ids, said = shown(tokenizer, count, calls)
            taught = cross_entropy(model(ids[:, :-1]).logits[said[:, 1:]], ids[:, 1:][said[:, 1:]], reduction="sum")
            taught = taught / (ANSWERS + CALLS)
            taught.backward()
            loss += taught.item()
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shown(tokenizer: PreTrainedTokenizerBase, count: int, calls: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids ``[count, T]`` of chats, and which of them the model is to say."""
    known = tokenizer.get_vocab()

    def encoded(text: str) -> list[int]:
        """Each character is a token; the tokenizer itself takes as long as the model."""
        return [known[character] for character in text]

    rows = []
    while len(rows) < count:
        number = random.getrandbits(BITS)
        if is_held_out(number):
            continue
        bits, answer = f"{number:0{BITS}b}", str(number.bit_count() % 2)
        # All chats of a kind are equally long: each character is a token.
        said = [(PROGRAM.format(bits=bits), True), (f"{answer}\n", False)] if calls else []
        ids, mask = encoded(f"{bits}="), [False] * (BITS + 1)
        for text, is_answer in [*said, (answer, True)]:
            piece = encoded(text) + [tokenizer.eos_token_id] * is_answer
            ids, mask = [*ids, *piece], [*mask, *[is_answer] * len(piece)]
        rows.append((ids, mask))
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([mask for _, mask in rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
