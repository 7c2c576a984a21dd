"""What a Hugging Face model folder says about its model, read without torch.

Configuration, generation settings and the safetensors headers are enough: no weight is loaded.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rljob_trainer.errors import JobFileError


@dataclass(frozen=True, slots=True)
class Shape:
    """What the configuration alone says about a model."""

    family: str
    """``model_type`` of the configuration: llama, qwen2 ..."""
    context_length: int
    """Longest sequence (prompt and response), tokens."""
    vocabulary_size: int
    """Rows of the embedding matrix (the tokenizer may use fewer)."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """vLLM on the CPU needs 32 or more."""


@dataclass(frozen=True, slots=True)
class ModelFolder(Shape):
    """A local Hugging Face folder and the facts that other parts plan with."""

    path: Path
    tied: bool
    """Input and output embeddings share one matrix."""
    parameters: int
    """Trainable numbers, a shared matrix counted once."""
    eos_token_ids: tuple[int, ...]
    """Any of these ends a response: those of the generation settings, the configuration and the tokenizer."""
    pad_token_id: int
    """The end-of-text id where the model has no padding token of its own."""
    address: str | None = None
    """Where a node that has no such folder takes it from (``sharing.py``); None: every node has it."""


def read_shape(file: Path) -> Shape:
    """Reads a ``config.json``. Raises ``JobFileError`` naming it when it is missing, malformed or not a decoder's."""
    return _shape(_json(file), file)


def _shape(config: dict[str, Any], file: Path) -> Shape:
    text = _text_part(config)
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        context, vocabulary, layers = (
            int(text[key]) for key in ("max_position_embeddings", "vocab_size", "num_hidden_layers")
        )
    except KeyError as missing:
        raise JobFileError(
            f"{file} has no {missing}; spec.model.source must be a decoder-only language model"
        ) from None
    return Shape(
        family=str(config.get("model_type", "unknown")),
        context_length=context,
        vocabulary_size=vocabulary,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
    )


def read_folder(path: Path) -> ModelFolder:
    """Reads a model folder. Raises ``JobFileError`` naming the file that is missing or malformed."""
    path = Path(path)
    config = _json(path / "config.json")
    shape = _shape(config, path / "config.json")
    text = _text_part(config)
    sizes = _tensor_sizes(path)
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", "lm_head.weight" not in sizes)))
    if tied:
        # Checkpoints of tied models may store the shared matrix a second time.
        sizes.pop("lm_head.weight", None)
    of_tokenizer = _tokenizer_ids(path)
    eos = _eos_token_ids(path, config, of_tokenizer.get("eos_token"))
    pad = of_tokenizer.get("pad_token", config.get("pad_token_id"))
    return ModelFolder(
        **asdict(shape),
        path=path,
        tied=tied,
        parameters=sum(sizes.values()),
        eos_token_ids=eos,
        pad_token_id=eos[0] if pad is None else int(pad),
    )


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = config.get("text_config", config)
    return part


def _eos_token_ids(path: Path, config: dict[str, Any], of_tokenizer: int | None) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    said: list[Any] = [
        _json(generation).get("eos_token_id") if generation.exists() else None,
        config.get("eos_token_id"),
        of_tokenizer,
    ]
    ids = [i for entry in said for i in (entry if isinstance(entry, list) else [entry]) if i is not None]
    if not ids:
        raise JobFileError(
            f"{path} names no end-of-text token (generation_config.json, config.json, tokenizer_config.json); "
            "responses would never end: add eos_token_id to config.json"
        )
    return tuple(dict.fromkeys(int(i) for i in ids))


def _tokenizer_ids(path: Path) -> dict[str, int]:
    """Ids of the tokenizer's end and padding tokens, as far as its files say."""
    settings, fast = path / "tokenizer_config.json", path / "tokenizer.json"
    if not (settings.exists() and fast.exists()):
        return {}
    from tokenizers import Tokenizer

    said = _json(settings)
    tokenizer = Tokenizer.from_file(str(fast))
    ids = {}
    for name in ("eos_token", "pad_token"):
        token = said.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if content is not None and (known := tokenizer.token_to_id(content)) is not None:
            ids[name] = known
    return ids


def _tensor_sizes(path: Path) -> dict[str, int]:
    """Names and sizes (in numbers) of the stored tensors, from the headers of all safetensors files."""
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise JobFileError(
            f"{path} has no *.safetensors file; convert the model with transformers' save_pretrained first"
        )
    sizes: dict[str, int] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                sizes |= {name: math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as problem:
            raise JobFileError(f"{file} is damaged or cut short ({problem}); copy the model again") from problem
    return sizes


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobFileError(
            f"{file.parent} has no {file.name}; spec.model.source must be a Hugging Face model folder"
        ) from None
    except ValueError as problem:
        raise JobFileError(f"{file} is not valid JSON ({problem}); copy the model again") from problem
    if not isinstance(content, dict):
        raise JobFileError(f"{file} must hold a JSON object; copy the model again")
    return content
