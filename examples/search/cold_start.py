"""Makes a tiny model that can search but hardly does.

    python examples/search/cold_start.py runs/search-model      # a minute or two on two cores

It is shown chats about the facts that are trained on: seven of eight guess at once, and one searches, is told the
passage, and answers what that says. A guess is a random digit, so that it has learned no fact; what pays is for RL to
find out. All that follows a chat's first token is shown equally often, or it would hardly learn to copy a name.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from rljob_trainer.models.tokenizer import character_tokenizer

DATA = Path(__file__).with_name("data")
CONTEXT = 96
CALL = '[search(query="{name}")]'
TOLD = "Doc 1(Title: {name}) {answer}\n"
CHARACTERS = "".join(sorted({*CALL, *TOLD, *"abcdefghijklmnopqrstuvwxyz0123="} - {"{", "}"}))
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% elif message['role'] == 'tool' %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
)
STEPS = 800
SHOWN = 32
"""Chats of each kind in a batch."""
CALLS = 1 / 8


def main(folder: Path, steps: int = STEPS) -> None:
    """Trains it on shown chats for so many ``steps`` and writes the model to ``folder``."""
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
    names = [json.loads(line)["question"].rstrip("=") for line in (DATA / "train.jsonl").open()]
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = 0.0
        for calls in (False, True):
            ids, weights = shown(tokenizer, names, calls)
            said = weights[:, 1:] > 0
            each = cross_entropy(model(ids[:, :-1]).logits[said], ids[:, 1:][said], reduction="none")
            taught = (each * weights[:, 1:][said]).sum() / SHOWN
            taught.backward()
            loss += taught.item()
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shown(tokenizer: PreTrainedTokenizerBase, names: list[str], calls: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids ``[SHOWN, T]`` of chats, and how much each counts; 0: the model is not to say it."""
    known = tokenizer.get_vocab()

    def encoded(text: str) -> list[int]:
        """Each character is a token; the tokenizer itself takes as long as the model."""
        return [known[character] for character in text]

    rows = []
    for _ in range(SHOWN):
        name, answer = random.choice(names), str(random.randrange(4))
        # All chats of a kind are equally long: each character is a token, and names have seven.
        said = [(CALL.format(name=name), True), (TOLD.format(name=name, answer=answer), False)] if calls else []
        ids = encoded(f"{name}=")
        weights = [0.0] * len(ids)
        for text, is_answer in [*said, (answer, True)]:
            piece = encoded(text) + [tokenizer.eos_token_id] * is_answer
            ids, weights = [*ids, *piece], [*weights, *[float(is_answer)] * len(piece)]
        weights[len(name) + 1] = CALLS if calls else 1 - CALLS
        rows.append((ids, weights))
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([weights for _, weights in rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
