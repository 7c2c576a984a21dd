"""A model of the shape of Qwen2.5-0.5B with random weights (speed does not care), and the GSM8K prompts."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from benchmarks.against_trl.model import GSM8K, common_model, prompt_ids
from benchmarks.environments import DEFAULT_CACHE

CONTEXT = 1024
LONGEST_PROMPT = 256


def shaped_model(cache: Path = DEFAULT_CACHE, *, small: bool = False) -> Path:
    """The folder with the model (bfloat16, 1 GB) and ``prompts.jsonl``; made once. ``small``: for tries on a CPU."""
    folder = cache / "models" / ("shaped-small" if small else "qwen2-0.5b-shaped")
    if not (folder / "complete").exists():
        print(f"writing {folder}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        _copy_tokenizer(common_model(cache), folder)
        _write_model(folder, small)
        _write_prompts(folder)
        (folder / "complete").touch()
    return folder


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def _write_model(folder: Path, small: bool) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096 if small else 151936,
        hidden_size=128 if small else 896,
        num_hidden_layers=2 if small else 24,
        num_attention_heads=4 if small else 14,
        num_key_value_heads=2,
        intermediate_size=512 if small else 4864,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)


def _write_prompts(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    short = [row for row in rows if len(prompt_ids(tokenizer, row["question"])) <= LONGEST_PROMPT]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    print(shaped_model(parser.parse_args().cache))
