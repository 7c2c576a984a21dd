"""Whether a model folder's weights are those that its configuration speaks of: names and shapes, then values.

Names and shapes come from the safetensors headers, which cost nothing to read. transformers fills a tensor that is
missing with random numbers and leaves out one that it does not expect, so that a folder put together wrongly would
train as if nothing were amiss. Values are read once, when a run starts.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.config import COPY, FAMILIES, GEMMA, experts_of, has_experts, read_json, text_part

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F32", "BF16", "F16", "F64")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_MATRIX = re.compile(r"(?:^|\.)(?:layers|h)\.\d+\.(.+)\.weight$")
_OWN = re.compile(r"^(model\.(layers|embed_tokens|norm)\.|lm_head\.)")
_DERIVED = "rotary_emb.inv_freq"
"""What old files of the Llama family store and everybody computes."""
_BITS = {
    "F64": ("<u8", 0x7FF << 52, (1 << 52) - 1),
    "F32": ("<u4", 0xFF << 23, (1 << 23) - 1),
    "F16": ("<u2", 0x1F << 10, (1 << 10) - 1),
    "BF16": ("<u2", 0xFF << 7, (1 << 7) - 1),
}
"""Of each kind of number: how its bits are read, and those of its exponent and of its mantissa (IEEE 754)."""
_PIECE = 1 << 20
"""Numbers looked at at once."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file, as its header says."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder's safetensors files. Raises ``JobFileError`` naming the file that is damaged or lacks."""
    from safetensors import SafetensorError, safe_open

    files = weight_files(folder)
    found: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    part = tensors.get_slice(name)
                    if name in found:
                        raise JobFileError(f"{file} and {found[name].file} both contain {name}; {COPY}")
                    found[name] = Stored(file, str(part.get_dtype()), tuple(part.get_shape()))
        except (SafetensorError, OSError, ValueError, OverflowError) as problem:
            raise JobFileError(f"{file} is damaged or truncated ({problem}); copy the model again") from problem
    if not (folder / WHOLE).exists():
        _check_index(folder / INDEX, found)
    return found


def layer_matrices(found: Mapping[str, Stored]) -> tuple[str, ...]:
    """Names within a layer (``self_attn.q_proj``) of the matrices that layers have, but for those of experts, which
    are stacks where they are computed, and their router, which is no linear layer there."""
    matched = (_MATRIX.search(name) for name, tensor in found.items() if len(tensor.shape) == 2)
    names = (match[1] for match in matched if match)
    return tuple(dict.fromkeys(name for name in names if ".experts." not in name and name != "mlp.gate"))


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers takes the weights from, whatever else lies beside them (variants, shards of former
    times, another format's copy): model.safetensors, else those that the index lists. Raises ``JobFileError``."""
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    if (folder / INDEX).exists():
        places = sorted(set(_weight_map(folder / INDEX).values()))
        for place in places:
            if not (folder / place).is_file() or Path(place).name != place:
                raise JobFileError(f"{folder / INDEX}: weight_map refers to {place}, which is missing; {COPY}")
        return [folder / place for place in places]
    some = sorted(folder.glob("*.safetensors"))
    if some:
        raise JobFileError(
            f"{folder} has {some[0].name}, but neither {WHOLE} nor {INDEX}, which list a model's files; {COPY}"
        )
    raise JobFileError(
        f"{folder} has no *.safetensors file; convert the model with transformers' save_pretrained first"
    )


def _weight_map(file: Path) -> dict[str, str]:
    listed = read_json(file).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(place, str) for place in listed.values()):
        raise JobFileError(f"{file}: weight_map must map each tensor to its file; {COPY}")
    return listed


def _check_index(file: Path, found: Mapping[str, Stored]) -> None:
    """The index says which file holds what: transformers goes by it where there are several files."""
    listed = _weight_map(file)
    for name, place in listed.items():
        if name not in found or found[name].file.name != place:
            raise JobFileError(f"{file}: weight_map says that {name} is in {place}, but it is not; {COPY}")


def check_weights(config: dict[str, Any], file: Path, found: Mapping[str, Stored], *, tied: bool) -> None:
    """Raises ``JobFileError`` for the first tensor that contradicts the configuration ``file``.

    Of the known families every tensor is known; of others the embedding and the number of layers are looked at.
    """
    text = text_part(config, file)
    if config.get("quantization_config"):
        raise JobFileError(
            f"{file}: the model is quantized (quantization_config), but only {', '.join(_FLOATS)} can be trained; use "
            "the model's unquantized weights"
        )
    if config.get("model_type") in FAMILIES:
        _check_known(config, file, found, tied)
        return
    for name, tensor in found.items():
        if name.endswith(_EMBEDDINGS) and len(tensor.shape) == 2 and "vision" not in name:
            expected = (text["vocab_size"], tensor.shape[1])
            if tensor.shape[0] < text["vocab_size"]:
                raise _contradiction(name, tensor, expected, file, "vocab_size")
    numbers = [int(match[1]) for name in found if (match := _LAYER.search(name))]
    if numbers and max(numbers) + 1 < text["num_hidden_layers"]:
        raise _layers(file, text["num_hidden_layers"], max(numbers) + 1, found)


def _check_known(config: dict[str, Any], file: Path, found: Mapping[str, Stored], tied: bool) -> None:
    numbers = {int(match[1]) for name in found if (match := _LAYER.search(name))}
    if numbers and numbers != set(range(config["num_hidden_layers"])) and numbers == set(range(len(numbers))):
        raise _layers(file, config["num_hidden_layers"], len(numbers), found)
    expected: dict[str, tuple[int, ...]] = {}
    # One after the other: a configuration may speak of any number of layers.
    for name, (shape, fields) in _expected(config, tied):
        expected[name] = shape
        if name not in found:
            some = next(iter(found.values())).file.parent if found else file.parent
            raise JobFileError(f"{some} lacks the tensor {name}, which {file.name} requires ({fields}); {COPY}")
        tensor = found[name]
        if tensor.shape != shape:
            raise _contradiction(name, tensor, shape, file, fields)
        if tensor.dtype not in _FLOATS:
            raise JobFileError(
                f"{tensor.file}: {name} is stored as {tensor.dtype}, but only {', '.join(_FLOATS)} can be trained; "
                "use the model's unquantized weights"
            )
    for name, tensor in found.items():
        if name not in expected and not name.endswith(_DERIVED) and _OWN.match(name):
            if tied and name == "lm_head.weight":
                # Files of tied models may hold the shared matrix a second time.
                shape = expected["model.embed_tokens.weight"]
                if tensor.shape != shape:
                    raise _contradiction(name, tensor, shape, file, "vocab_size, hidden_size")
                continue
            raise JobFileError(f"{tensor.file}: {file.name} defines no tensor {name}, so it would be ignored; {COPY}")


def _expected(config: Mapping[str, Any], tied: bool) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Names, shapes and the fields that fix them, of the known families."""
    hidden, vocabulary, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    family = config["model_type"]
    yield "model.embed_tokens.weight", ((vocabulary, hidden), "vocab_size, hidden_size")
    yield "model.norm.weight", ((hidden,), "hidden_size")
    if not tied:
        yield "lm_head.weight", ((vocabulary, hidden), "vocab_size, hidden_size")
    inner = config["intermediate_size"]
    queries, keys = heads * width, kv_heads * width
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    attention["o_proj"] = (hidden, queries)
    biased = bool(config.get("attention_bias")) and family not in ("mistral", "qwen2")
    with_bias = ("q_proj", "k_proj", "v_proj") if family == "qwen2" else tuple(attention) if biased else ()
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    if family in GEMMA:
        norms = (*norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in norms:
            yield f"{prefix}{norm}.weight", ((hidden,), "num_hidden_layers, hidden_size")
        for name, shape in attention.items():
            fields = "num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads, head_dim"
            yield f"{prefix}self_attn.{name}.weight", (shape, fields)
            if name in with_bias:
                yield f"{prefix}self_attn.{name}.bias", (shape[:1], fields)
        if family in ("qwen3", "gemma3_text", "qwen3_moe"):
            for norm in ("q_norm", "k_norm"):
                yield f"{prefix}self_attn.{norm}.weight", ((width,), "head_dim")
        if has_experts(config, layer):
            yield from _experts(config, f"{prefix}mlp.")
            continue
        feed_forward = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        for name, shape in feed_forward.items():
            yield f"{prefix}mlp.{name}.weight", (shape, "num_hidden_layers, hidden_size, intermediate_size")
            if family == "llama" and config.get("mlp_bias"):
                yield f"{prefix}mlp.{name}.bias", (shape[:1], "mlp_bias")


def _experts(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """A layer's router and its experts, each of which has matrices of its own in files."""
    experts, hidden, inner = experts_of(config), config["hidden_size"], config["moe_intermediate_size"]
    yield f"{prefix}gate.weight", ((experts, hidden), "num_experts, hidden_size")
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for expert in range(experts):
        for name, shape in shapes.items():
            yield f"{prefix}experts.{expert}.{name}.weight", (shape, "num_experts, hidden_size, moe_intermediate_size")


def _contradiction(name: str, tensor: Stored, expected: tuple[int, ...], file: Path, fields: str) -> JobFileError:
    return JobFileError(
        f"{tensor.file}: {name} has the shape {list(tensor.shape)}, but {file.name} requires {list(expected)} "
        f"({fields}); {COPY}"
    )


def _layers(file: Path, said: int, there: int, found: Mapping[str, Stored]) -> JobFileError:
    some = next(iter(found.values())).file
    return JobFileError(f"{file}: num_hidden_layers = {said}, but {some.parent} has the weights of {there}; {COPY}")


def check_values(folder: Path) -> None:
    """Raises ``JobFileError`` naming a tensor that holds NaN or an infinity: every loss would be NaN.

    Reads every weight once, several files side by side, a piece at a time.
    """
    files = weight_files(folder)
    with ThreadPoolExecutor(min(8, len(files) or 1, os.cpu_count() or 1)) as readers:
        for problem in readers.map(_not_finite, files):
            if problem is not None:
                raise problem


def _not_finite(file: Path) -> JobFileError | None:
    """By the bits of each number, whose exponent has none that is 0. The header is one that safetensors could read."""
    import numpy as np

    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)  # texts of whoever wrote it
        empty = file.stat().st_size <= 8 + length  # which cannot be mapped
        data = np.zeros(0, np.uint8) if empty else np.memmap(file, np.uint8, "r", offset=8 + length)
        for name, about in header.items():
            if about["dtype"] not in _BITS or not math.prod(about["shape"]):
                continue
            kind, exponent, mantissa = _BITS[about["dtype"]]
            begin, end = about["data_offsets"]
            numbers: Any = data[begin:end].view(kind)
            exponent, mantissa = numbers.dtype.type(exponent), numbers.dtype.type(mantissa)
            for start in range(0, len(numbers), _PIECE):
                piece = numbers[start : start + _PIECE]
                odd = piece[(piece & exponent) == exponent]
                if odd.size:
                    what = "NaN" if (odd & mantissa).any() else "an infinity"
                    return JobFileError(
                        f"{file}: {name} contains {what}, so every loss would be NaN; copy the model again, or use "
                        "another checkpoint of it"
                    )
    except (ValueError, OSError) as problem:
        return JobFileError(f"{file} is damaged or truncated ({problem}); copy the model again")
    return None
