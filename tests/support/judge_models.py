"""A small judge with weights made by hand, what transformers says that it answers, and questions for it.

It answers any question with one digit, which depends on all of the question, and then ends: component 0 of what passes
through its layers is kept for "a digit was the last token", and only that makes the end likely.
"""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rljob_trainer.models.tokenizer import character_tokenizer

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CONTEXT = 640
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_MARK, _END = 3.0, 1e5
"""Of a digit in component 0, and the weight of that for the end."""


def made(folder: Path, *, seed: int = 0, template: str | None = TEMPLATE) -> Path:
    """Writes the model's folder."""
    tokenizer = character_tokenizer(CHARACTERS, CONTEXT)
    tokenizer.chat_template = template
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        initializer_range=1.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    digits = tokenizer.convert_tokens_to_ids(list(string.digits))
    with torch.no_grad():
        embedded, out = model.model.embed_tokens.weight, model.lm_head.weight
        embedded[:, 0] = 0
        embedded[digits, 0] = _MARK
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        scores = torch.randn(len(digits), config.hidden_size)
        scores[:, 0] = 0
        out.zero_()
        out[digits] = scores
        out[tokenizer.eos_token_id, 0] = _END
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@cache
def transformers_own(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(CHARACTERS, CONTEXT)


def answer_alone(folder: Path, text: str) -> str:
    """What transformers says that the model answers to a rendered question, greedily, within eight tokens."""
    model, tokenizer = transformers_own(folder), _tokenizer()
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    said: list[int] = []
    cached = None
    with torch.no_grad():
        while len(said) < 8 and (not said or said[-1] != tokenizer.eos_token_id):
            told = model(input_ids=ids, past_key_values=cached, use_cache=True)
            cached, ids = told.past_key_values, told.logits[:, -1:].argmax(-1)
            said.append(int(ids))
    return str(tokenizer.decode(said, skip_special_tokens=True))
