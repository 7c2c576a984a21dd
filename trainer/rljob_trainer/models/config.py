"""What a ``config.json`` says, field by field: read strictly, so that a wrong value is named before anything starts.

Known fields are checked for every family; what a family has besides is left to transformers, which reads it at the
start of a run.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_trainer.errors import JobFileError

PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The families whose weights are known by name and shape, and which the torch engine computes."""

COPY = "copy the model again, or correct the file"

_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "max_position_embeddings",
    "vocab_size",
)
_LARGEST = 1 << 31
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "use_sliding_window")
_TEXTS = ("model_type", "hidden_act", "dtype", "torch_dtype", "transformers_version")
_POSITIVE = ("rms_norm_eps",)
_NOT_NEGATIVE = ("attention_dropout", "initializer_range", "rope_theta")
_DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")
_ROPE_NEEDS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
ROPE_TYPES = ("default", "linear", "llama3")


def read_json(file: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ``JobFileError`` naming it."""
    try:
        data = file.read_bytes()
        if data.startswith(codecs.BOM_UTF8):
            raise JobFileError(f"{file} begins with a byte order mark, which JSON has not; save it without")
        content = json.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise JobFileError(
            f"{file.parent} has no {file.name}; spec.model.source must be a Hugging Face model folder"
        ) from None
    except OSError as problem:
        raise JobFileError(f"{file} cannot be read ({problem.strerror}); check its permissions") from problem
    except UnicodeDecodeError as problem:
        raise JobFileError(f"{file} is not UTF-8 text (byte {problem.start}); copy the model again") from problem
    except RecursionError:
        raise JobFileError(f"{file} is nested too deep to be read; copy the model again") from None
    except ValueError as problem:
        raise JobFileError(f"{file} is not valid JSON ({problem}); copy the model again") from problem
    if not isinstance(content, dict):
        raise JobFileError(f"{file} must hold a JSON object; copy the model again")
    return content


def text_part(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The language model's part of a configuration. Raises ``JobFileError``."""
    part = config.get("text_config", config)
    if not isinstance(part, dict):
        raise wrong(file, "text_config", "an object", part)
    return part


def check_config(config: dict[str, Any], file: Path) -> None:
    """Raises ``JobFileError`` naming the file and the first field whose value a decoder cannot have."""
    text = text_part(config, file)
    if any(name not in text for name in _SIZES):
        missing = next(name for name in _SIZES if name not in text)
        raise JobFileError(f"{file} has no {missing!r}; spec.model.source must be a decoder-only language model")
    for name in _SIZES:
        _size(text, name, file)
    for name in _OPTIONAL_SIZES:
        if text.get(name) is not None:
            _size(text, name, file)
    if text.get("sliding_window"):  # 0 is another way to say that there is none
        _size(text, "sliding_window", file)
    for part in (config, text):
        for name in _SWITCHES:
            if part.get(name) is not None and not isinstance(part[name], bool):
                raise wrong(file, name, "true or false", part[name])
        for name in _TEXTS:
            if part.get(name) is not None and not isinstance(part[name], str):
                raise wrong(file, name, "text", part[name])
    for name in ("dtype", "torch_dtype"):
        if text.get(name) is not None and text[name].removeprefix("torch.") not in _DTYPES:
            raise wrong(file, name, f"one of {', '.join(_DTYPES)}", text[name])
    for name in (*_POSITIVE, *_NOT_NEGATIVE):
        if text.get(name) is not None:
            _number(text, name, file, positive=name in _POSITIVE)
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    if text.get("head_dim") is None and hidden % heads:
        raise JobFileError(
            f"{file}: num_attention_heads = {heads} does not divide hidden_size = {hidden}, and there is no head_dim; "
            f"{COPY}"
        )
    kv_heads = text.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise JobFileError(
            f"{file}: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}; {COPY}"
        )
    if config.get("model_type") in PLAIN_FAMILIES:
        _check_plain(config, file)
    for name in ("eos_token_id", "pad_token_id"):
        check_ids(config.get(name), name, file, text["vocab_size"])


def _check_plain(config: Mapping[str, Any], file: Path) -> None:
    """What the plain families need besides."""
    if config.get("intermediate_size") is None:
        raise wrong(file, "intermediate_size", "a whole number above 0", None)
    _size(config, "intermediate_size", file)
    for name in ("rms_norm_eps", *_SWITCHES, "hidden_act"):
        if name in config and config[name] is None and name != "use_sliding_window":
            raise wrong(file, name, "set, or left out", None)
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if width % 2:
        raise JobFileError(f"{file}: heads are {width} wide, an odd number that cannot be rotated in pairs; {COPY}")
    kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds)
    ):
        raise wrong(file, "layer_types", f"a list of {layers} texts, one for each of num_hidden_layers", kinds)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise wrong(file, name, "an object", rope)
        for key in ("rope_type", "type"):
            if rope.get(key) is not None and not isinstance(rope[key], str):
                raise wrong(file, f"{name}.{key}", "text", rope[key])
        numbers = {key: value for key, value in rope.items() if key not in ("rope_type", "type")}
        for key, value in numbers.items():
            if value is None:
                continue
            if key in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"):
                _number(numbers, key, file, positive=True, place=f"{name}.{key}")
            elif key == "original_max_position_embeddings":
                _size(numbers, key, file, place=f"{name}.{key}")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        for key in _ROPE_NEEDS.get(str(kind), ()):
            if rope.get(key) is None:
                raise JobFileError(f"{file}: {name} is of the type {kind} and has no {key}; {COPY}")
        if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
            raise JobFileError(f"{file}: {name}.low_freq_factor is not below high_freq_factor; {COPY}")
    if config.get("rope_theta") == 0:
        raise wrong(file, "rope_theta", "a number above 0", 0)


def check_ids(said: Any, name: str, file: Path, vocabulary: int) -> None:
    """Raises ``JobFileError`` for a token id that is none. An id of -1 is an old way to say that there is no such
    token."""
    for value in said if isinstance(said, list) else [said]:
        if value is None or (value == -1 and not isinstance(value, bool)):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(file, name, "a token's number", value)
        if not 0 <= value < vocabulary:
            raise JobFileError(
                f"{file}: {name} = {value} is no row of the embedding, which has vocab_size = {vocabulary}; {COPY}"
            )


def unsupported_by_torch_engine(config: Mapping[str, Any]) -> str | None:
    """What the torch engine cannot compute of a checked configuration; None: it computes all of it."""
    family = config.get("model_type")
    if family not in PLAIN_FAMILIES:
        return f"knows the model types {', '.join(PLAIN_FAMILIES)}, but this model is a {family!r}"
    window_is_used = config.get("use_sliding_window", family == "mistral")
    if window_is_used and config.get("sliding_window"):
        return f"has no sliding-window attention (sliding_window: {config['sliding_window']})"
    if config.get("hidden_act", "silu") != "silu":
        return f"has no activation {config['hidden_act']!r}, only silu"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        return f"has no RoPE scaling {rope_type!r}, only linear and llama3"
    if float(config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        return "rotates whole heads only (partial_rotary_factor must be 1)"
    return None


def wrong(file: Path, name: str, expected: str, value: Any) -> JobFileError:
    """What is said of a field with a value that it cannot have."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a number of thousands of digits"
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return JobFileError(f"{file}: {name} must be {expected}, not {shown}; {COPY}")


def _size(values: Mapping[str, Any], name: str, file: Path, place: str = "") -> None:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LARGEST:
        raise wrong(file, place or name, "a whole number above 0", value)


def _number(values: Mapping[str, Any], name: str, file: Path, *, positive: bool, place: str = "") -> None:
    value = values[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise wrong(file, place or name, f"a number {'above 0' if positive else 'that is not negative'}", value)
