"""The common model and prompts: a Qwen2 of 0.22 million parameters with random weights, a byte-level BPE tokenizer of
2,048 tokens trained on the GSM8K questions, and 256 of these questions."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.environments import ROOT

GSM8K = ROOT / "examples" / "data" / "gsm8k" / "train.jsonl"
VOCABULARY = 2048
CONTEXT = 512
PROMPTS = 256
LONGEST_PROMPT = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def common_model(cache: Path) -> Path:
    """The folder with the model and, beside its files, ``prompts.jsonl`` (column ``question``); made once."""
    folder = cache / "models" / "tiny-qwen2"
    if not (folder / "complete").exists():
        print(f"writing {folder}", flush=True)
        _write_model(folder)
        _write_prompts(folder)
        (folder / "complete").touch()
    return folder


def _questions() -> list[str]:
    return [json.loads(line)["question"] for line in GSM8K.read_text().splitlines()]


def _write_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    trained.train_from_iterator(_questions(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, pad_token=special[0], eos_token=special[2], model_max_length=CONTEXT
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=176,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


def _write_prompts(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chosen: list[str] = []
    for question in _questions():
        ids = prompt_ids(tokenizer, question)
        if len(ids) <= LONGEST_PROMPT:
            chosen.append(question)
        if len(chosen) == PROMPTS:
            break
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"question": question}) + "\n" for question in chosen))


def prompt_ids(tokenizer: object, question: str) -> list[int]:
    """The token ids of a question as every side sees it, with the chat template."""
    message = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)  # type: ignore[attr-defined]
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator,no-any-return]
