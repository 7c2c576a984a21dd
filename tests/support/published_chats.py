"""Chats of published models: their templates, from PyPI's ``trl``, which carries those of the well-known ones, over a
small tokenizer that has their special tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rljob_trainer.data.chat import ChatTemplate

_VERSION = "1.16.0"
_FOLDER = "trl/chat_templates"


def template(name: str) -> str:
    """The text of a template by its name there (``qwen3``). Its wheel is downloaded once, and nothing of it is run."""
    with zipfile.ZipFile(_wheel()) as wheel:
        return wheel.read(f"{_FOLDER}/{name}.jinja").decode()


def _wheel() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob" / "wheels"
    found = folder / f"trl-{_VERSION}-py3-none-any.whl"
    if not found.exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, f"trl=={_VERSION}"],
            check=True,
        )
    return found


class Family(NamedTuple):
    """A model's template and its special tokens."""

    name: str
    end: str
    """With which the model ends an answer."""
    special: tuple[str, ...]
    tool_role: str = "tool"


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>")
FAMILIES = [
    Family("qwen2_5", "<|im_end|>", CHATML),
    Family("qwen3", "<|im_end|>", CHATML),
    Family("llama3", "<|eot_id|>", LLAMA),
    Family("llama3_1", "<|eot_id|>", LLAMA),
    Family("deepseekv3", "<｜end▁of▁sentence｜>", DEEPSEEK),
    Family("gemma3", "<end_of_turn>", GEMMA, tool_role="user"),
]
MERGES = [("a", "n"), ("s", "w"), ("e", "r"), ("sw", "er"), ("an", "swer")]
"""Of the tokenizer: "answer" is one token, of which the model says others."""


def chat_of(family: Family, text: str | None = None) -> ChatTemplate:
    """A tokenizer of bytes and a few merges, with the family's special tokens and template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*letters, *(a + b for a, b in MERGES)])}
    backend = Tokenizer(models.BPE(vocabulary, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.end, bos_token=family.special[0])
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    tokenizer.chat_template = template(family.name) if text is None else text
    return ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids(family.end)])


def letters_of(chat: ChatTemplate, text: str) -> list[int]:
    """A model that says every letter by itself."""
    return [token for letter in text for token in chat.encode(letter)]
