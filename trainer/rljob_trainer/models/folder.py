"""What a Hugging Face model folder says about its model, read without torch.

Configuration, generation settings and the safetensors headers are enough: no weight is loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.config import (
    FAMILIES,
    GEMMA,
    check_config,
    check_ids,
    read_json,
    text_part,
    unreplayable,
    unsupported_by_learner,
    unsupported_by_torch_engine,
)
from rljob_trainer.models.tokenizer_files import check_size, read_tokenizer
from rljob_trainer.models.weights import check_weights, stored_tensors


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
    untrainable: str | None
    """What the learner cannot compute of it; None: it computes all of it."""
    unsupported: str | None
    """The same of the torch engine."""
    unreplayable: str | None
    """Why its routing cannot be replayed; None: it can."""


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
    return _shape(read_json(file), file)


def _shape(config: dict[str, Any], file: Path) -> Shape:
    check_config(config, file)
    text = text_part(config, file)
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    return Shape(
        family=str(config.get("model_type", "unknown")),
        context_length=text["max_position_embeddings"],
        vocabulary_size=text["vocab_size"],
        hidden_size=hidden,
        layers=text["num_hidden_layers"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        untrainable=unsupported_by_learner(config),
        unsupported=unsupported_by_torch_engine(config),
        unreplayable=unreplayable(config),
    )


def read_folder(path: Path, *, tokenizer: bool = True, field: str = "spec.model.source") -> ModelFolder:
    """Reads a model folder. Raises ``JobFileError`` naming the file that is missing or malformed, and the field in it.

    ``tokenizer`` False: the folder's own, if it has one, is not used and not looked at. ``field``: of the job file, for
    messages.
    """
    path = Path(path)
    file = path / "config.json"
    config = read_json(file)
    shape = _shape(config, file)
    text = text_part(config, file)
    stored = stored_tensors(path)
    # Where nothing is said, the known families but Gemma have matrices of their own at both ends.
    unsaid = shape.family in GEMMA or (shape.family not in FAMILIES and "lm_head.weight" not in stored)
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", unsaid)))
    check_weights(config, file, stored, tied=tied)
    sizes = {name: tensor.size for name, tensor in stored.items()}
    if tied:
        # Checkpoints of tied models may store the shared matrix a second time.
        sizes.pop("lm_head.weight", None)
    of_tokenizer: dict[str, int] = {}
    if tokenizer:
        files = read_tokenizer(path)
        check_size(files, shape.vocabulary_size, field)
        of_tokenizer = files.ids
    eos = _eos_token_ids(path, config, of_tokenizer.get("eos_token"), shape.vocabulary_size)
    pad = of_tokenizer.get("pad_token", config.get("pad_token_id"))
    return ModelFolder(
        **asdict(shape),
        path=path,
        tied=tied,
        parameters=sum(sizes.values()),
        eos_token_ids=eos,
        # A padding token that was added without a row is never read: what is padded is masked.
        pad_token_id=eos[0] if pad in (None, -1) or int(pad) >= shape.vocabulary_size else int(pad),
    )


def _eos_token_ids(path: Path, config: dict[str, Any], of_tokenizer: int | None, vocabulary: int) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    in_generation = read_json(generation).get("eos_token_id") if generation.exists() else None
    check_ids(in_generation, "eos_token_id", generation, vocabulary)
    said: list[Any] = [in_generation, config.get("eos_token_id"), of_tokenizer]
    ids = [i for entry in said for i in (entry if isinstance(entry, list) else [entry]) if i not in (None, -1)]
    if not ids:
        raise JobFileError(
            f"{path} defines no end-of-text token (generation_config.json, config.json, tokenizer_config.json); "
            "responses would never end: add eos_token_id to config.json"
        )
    return tuple(dict.fromkeys(ids))
