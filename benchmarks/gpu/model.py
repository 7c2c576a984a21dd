"""Models of the shapes of Qwen2.5-0.5B and -1.5B with random weights (speed does not care), and the GSM8K prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from benchmarks.against_trl.model import GSM8K, common_model, prompt_ids
from benchmarks.environments import DEFAULT_CACHE

CONTEXT = 1024
LONGEST_PROMPT = 256

Size = Literal["small", "0.5b", "1.5b"]
"""small: for tries on a CPU."""
SHAPES: Mapping[Size, Mapping[str, int]] = {
    "small": {
        "vocab_size": 4096,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
    },
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "intermediate_size": 4864,
    },
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "intermediate_size": 8960,
    },
}


def shaped_model(cache: Path = DEFAULT_CACHE, size: Size = "0.5b") -> Path:
    """The folder with the model (bfloat16, 1 or 3 GB) and ``prompts.jsonl``; made once, and renamed when complete."""
    folder = cache / "models" / f"qwen2-{size}-shaped"
    if not folder.exists():
        begun = folder.with_suffix(".begun")
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True)
        _copy_tokenizer(common_model(cache), begun)
        _write_model(begun, size)
        _write_prompts(begun)
        begun.rename(folder)
    return folder


def prompts(model: Path, count: int) -> list[list[int]]:
    """Token ids of the first ``count`` prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (model / "prompts.jsonl").read_text().splitlines()[:count]
    return [prompt_ids(tokenizer, json.loads(line)["question"]) for line in lines]


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def _write_model(folder: Path, size: Size) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Qwen2Config(
        **SHAPES[size],
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    # A GPU draws a billion numbers at once, a CPU takes half a minute.
    with torch.device("cuda" if torch.cuda.is_available() and size != "small" else "cpu"):
        model = Qwen2ForCausalLM(config)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)


def _write_prompts(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Twice as many as any part asks for.
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()[:600]]
    short = [row for row in rows if len(prompt_ids(tokenizer, row["question"])) <= LONGEST_PROMPT]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
