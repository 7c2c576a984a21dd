"""What a ``config.json`` says, field by field: read strictly, so that a wrong value is named before anything starts.

Known fields are checked for every family; what a family has besides is left to transformers, which reads it at the
start of a run.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rljob_trainer.errors import JobFileError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_moe")
"""The families (``model_type``) that the learner computes, whose weights are known by name and shape."""

MIXTURES = ("qwen3_moe",)
"""Those with experts, which the torch engine does not compute."""

GEMMA = ("gemma2", "gemma3_text")
"""Those with scaled embeddings, norms on both sides, windows in some layers, and soft caps. Embedding and output matrix
are one unless the configuration says otherwise."""

TENSOR_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""Those whose layers the learner divides among ranks (``trainer.parallelism.tensor``)."""

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
LAYER_TYPES = ("full_attention", "sliding_attention")
_EXPERTS = ("num_experts", "num_local_experts")
"""The number of experts, as published files call it and as transformers writes it."""
_TOLD_EXPERTS = 256
_MIXTURE_NEEDS = ("num_experts_per_tok", "moe_intermediate_size")
_GEMMA_NEEDS = ("head_dim", "query_pre_attn_scalar", "sliding_window")
_LAYERS_TO_A_FULL_ONE = {"gemma2": 2, "gemma3_text": 6}
"""Layers of which the last sees everything, where a configuration does not name the type of each."""
_SCORE_CAP, _LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
_CAPS_UNLESS_SAID = {"gemma2": (50.0, 30.0)}
"""What transformers takes where a configuration says nothing."""


def read_json(file: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ``JobFileError`` naming it."""
    try:
        data = file.read_bytes()
        if data.startswith(codecs.BOM_UTF8):
            raise JobFileError(f"{file} begins with a byte order mark, which JSON does not allow; save it without one")
        content = json.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise JobFileError(f"{file.parent} has no {file.name}; use a Hugging Face model folder") from None
    except OSError as problem:
        raise JobFileError(f"{file} cannot be read ({problem.strerror}); check its permissions") from problem
    except UnicodeDecodeError as problem:
        raise JobFileError(f"{file} is not UTF-8 text (byte {problem.start}); copy the model again") from problem
    except RecursionError:
        raise JobFileError(f"{file} is nested too deeply; copy the model again") from None
    except ValueError as problem:
        raise JobFileError(f"{file} is not valid JSON ({problem}); copy the model again") from problem
    if not isinstance(content, dict):
        raise JobFileError(f"{file} must contain a JSON object; copy the model again")
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
            f"{file}: num_attention_heads = {heads} does not divide hidden_size = {hidden}, and head_dim is not set; "
            f"{COPY}"
        )
    kv_heads = text.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise JobFileError(
            f"{file}: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}; {COPY}"
        )
    if config.get("model_type") in FAMILIES:
        _check_known(config, file)
    for name in ("eos_token_id", "pad_token_id"):
        check_ids(config.get(name), name, file, text["vocab_size"])


def _check_known(config: Mapping[str, Any], file: Path) -> None:
    """What the known families need besides."""
    if config.get("intermediate_size") is None:
        raise wrong(file, "intermediate_size", "a whole number above 0", None)
    _size(config, "intermediate_size", file)
    for name in ("rms_norm_eps", *_SWITCHES, "hidden_act"):
        if name in config and config[name] is None and name != "use_sliding_window":
            raise wrong(file, name, "set or omitted", None)
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if width % 2:
        raise JobFileError(f"{file}: the head size {width} is odd, which rotary embeddings do not allow; {COPY}")
    kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds)
    ):
        raise wrong(file, "layer_types", f"a list of {layers} strings, one per layer (num_hidden_layers)", kinds)
    if config["model_type"] in GEMMA:
        _check_gemma(config, file)
    if config["model_type"] in MIXTURES:
        _check_mixture(config, file)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope is not None and not isinstance(rope, dict):
            raise wrong(file, name, "an object", rope)
        if rope is None:
            continue
        # Gemma 3 has two, by the type of a layer.
        parts = {f"{name}.{kind}": rope[kind] for kind in LAYER_TYPES if kind in rope} or {name: rope}
        for place, part in parts.items():
            if part is not None and not isinstance(part, dict):
                raise wrong(file, place, "an object", part)
            _check_rope(part or {}, place, file)
    if config.get("rope_theta") == 0:
        raise wrong(file, "rope_theta", "a number above 0", 0)


def _check_gemma(config: Mapping[str, Any], file: Path) -> None:
    """What the Gemma families need, in files that transformers would read otherwise than their vocabulary suggests."""
    for name in _GEMMA_NEEDS:
        if config.get(name) is None:
            raise wrong(file, name, "a number above 0", config.get(name))
    for name in ("query_pre_attn_scalar", _SCORE_CAP, _LOGIT_CAP, "rope_local_base_freq"):
        if config.get(name) is not None:
            _number(config, name, file, positive=True)
    if config.get("sliding_window_pattern") is not None:
        _size(config, "sliding_window_pattern", file)


def _check_mixture(config: Mapping[str, Any], file: Path) -> None:
    """What a mixture of experts needs."""
    counted = next((name for name in _EXPERTS if config.get(name) is not None), _EXPERTS[0])
    for name in (counted, *_MIXTURE_NEEDS):
        if config.get(name) is None:
            raise wrong(file, name, "a whole number above 0", config.get(name))
        _size(config, name, file)
    experts, chosen = config[counted], config["num_experts_per_tok"]
    if chosen > experts:
        raise JobFileError(f"{file}: num_experts_per_tok = {chosen} is more than {counted} = {experts}; {COPY}")
    if config.get("decoder_sparse_step") is not None:
        _size(config, "decoder_sparse_step", file)
    if config.get("norm_topk_prob") is not None and not isinstance(config["norm_topk_prob"], bool):
        raise wrong(file, "norm_topk_prob", "true or false", config["norm_topk_prob"])
    dense = config.get("mlp_only_layers")
    if dense is not None and (
        not isinstance(dense, list)
        or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in dense)
    ):
        raise wrong(file, "mlp_only_layers", "a list of layers' numbers", dense)


def experts_of(config: Mapping[str, Any]) -> int:
    """The experts of each layer that has any, of a checked configuration; 0: the model is dense."""
    if config["model_type"] not in MIXTURES:
        return 0
    return int(next(config[name] for name in _EXPERTS if config.get(name) is not None))


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a checked configuration has experts: of the mixtures all but those that are said to be
    dense."""
    if config["model_type"] not in MIXTURES:
        return False
    return layer not in (config.get("mlp_only_layers") or ()) and not (layer + 1) % (
        config.get("decoder_sparse_step") or 1
    )


def unreplayable(config: Mapping[str, Any]) -> str | None:
    """Why a model's routing cannot be replayed, in words; None: it can. The stream has a byte for each choice, and one
    expert k times in it stands for a token of which nothing was told."""
    experts = experts_of(config) if config.get("model_type") in MIXTURES else 0
    if not experts:
        return "is not a mixture of experts with known routers"
    if experts > _TOLD_EXPERTS:
        return f"has {experts} experts per layer, but routing is reported for at most {_TOLD_EXPERTS}"
    if config["num_experts_per_tok"] < 2:
        return "routes a token to one expert, but routing is reported only for two or more"
    return None


def _check_rope(rope: Mapping[str, Any], place: str, file: Path) -> None:
    """One set of rotary parameters; ``place``: its name in the file."""
    for key in ("rope_type", "type"):
        if rope.get(key) is not None and not isinstance(rope[key], str):
            raise wrong(file, f"{place}.{key}", "text", rope[key])
    numbers = {key: value for key, value in rope.items() if key not in ("rope_type", "type")}
    for key, value in numbers.items():
        if value is None:
            continue
        if key in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"):
            _number(numbers, key, file, positive=True, place=f"{place}.{key}")
        elif key == "original_max_position_embeddings":
            _size(numbers, key, file, place=f"{place}.{key}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    for key in _ROPE_NEEDS.get(str(kind), ()):
        if rope.get(key) is None:
            raise JobFileError(f"{file}: {place} has the type {kind} but no {key}; {COPY}")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise JobFileError(f"{file}: {place}.low_freq_factor is not below high_freq_factor; {COPY}")


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
                f"{file}: {name} = {value} is outside the embedding, which has vocab_size = {vocabulary} rows; {COPY}"
            )


class SoftCaps(NamedTuple):
    """The caps of a model, None where it has none: of its attention scores and of its output logits."""

    scores: float | None
    logits: float | None


def soft_caps(config: Mapping[str, Any]) -> SoftCaps:
    """The caps that a known family computes with."""
    family = config.get("model_type")
    if family not in GEMMA:
        return SoftCaps(None, None)
    scores, logits = _CAPS_UNLESS_SAID.get(str(family), (None, None))
    return SoftCaps(config.get(_SCORE_CAP, scores), config.get(_LOGIT_CAP, logits))


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Says of each layer of a Gemma model whether it sees everything (``full_attention``) or a window."""
    said: list[str] | None = config.get("layer_types")
    if said is not None:
        return said
    every = _LAYERS_TO_A_FULL_ONE[config["model_type"]]
    if config["model_type"] == "gemma3_text":  # Gemma 2 always has every second one
        every = config.get("sliding_window_pattern") or every
    return [LAYER_TYPES[bool((layer + 1) % every)] for layer in range(config["num_hidden_layers"])]


def ropes(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The rotary parameters by the type of a layer, with ``rope_type`` and ``rope_theta`` in each.

    transformers 5 writes one mapping ``rope_parameters``, earlier versions ``rope_theta`` and ``rope_scaling``. In a
    file that has both, somebody has added the latter by hand; transformers follows it, and so does this.
    """
    theta = config.get("rope_theta") or 10_000.0
    if config.get("model_type") == "gemma3_text":
        said = config.get("rope_parameters") or {}
        parts = {kind: dict(said.get(kind) or {"rope_type": "default"}) for kind in LAYER_TYPES}
        # A window has short distances, which are told apart by angles of their own; no scaling applies to them.
        parts["full_attention"].update(config.get("rope_scaling") or {})
        parts["sliding_attention"].setdefault("rope_theta", config.get("rope_local_base_freq") or 10_000.0)
        theta = config.get("rope_theta") or 1_000_000.0
    else:
        same = config.get("rope_scaling") or config.get("rope_parameters") or {}
        parts = {kind: dict(same) for kind in LAYER_TYPES}
    return {
        kind: {
            **part,
            "rope_type": part.get("rope_type") or part.get("type") or "default",
            "rope_theta": part.get("rope_theta") or theta,
        }
        for kind, part in parts.items()
    }


def unsupported_by_learner(config: Mapping[str, Any]) -> str | None:
    """What the learner does not compute of a checked configuration; None: it computes all of it."""
    family = config.get("model_type")
    if family not in FAMILIES:
        text = " (of Gemma 3 only the text models, gemma3_text)" if family == "gemma3" else ""
        return f"supports the model types {', '.join(FAMILIES)}, but this model is a {family!r}{text}"
    return next(_variants(config), None)


def _variants(config: Mapping[str, Any]) -> Iterator[str]:
    """What a known family may ask for, and nobody here computes."""
    family = config["model_type"]
    # transformers' Gemma 3 looks at a cap of the scores no more than Llama does, and an engine may.
    capped = {"gemma2": (), "gemma3_text": (_SCORE_CAP,)}.get(family, (_SCORE_CAP, _LOGIT_CAP))
    for name in (*capped, "logits_scaling", "logit_scale"):
        if config.get(name) not in (None, 1.0):
            yield f"does not support {name} in models of the type {family}"
    if config.get("use_bidirectional_attention"):
        yield "does not support attention to later tokens (use_bidirectional_attention)"
    if config.get("is_causal") is False:
        yield "does not support attention to later tokens (is_causal: false)"
    for kind in config.get("layer_types") or ():
        if kind not in LAYER_TYPES:
            yield f"does not support layers of the type {kind!r}, only {' and '.join(LAYER_TYPES)}"
    if family == "gemma2" and config.get("tie_word_embeddings") is False:
        # vLLM would go on using the embedding.
        yield "supports gemma2 only with tied embeddings (tie_word_embeddings: false)"


def unsupported_by_torch_engine(config: Mapping[str, Any]) -> str | None:
    """What the torch engine cannot compute of a checked configuration; None: it computes all of it."""
    if (problem := unsupported_by_learner(config)) is not None:
        return problem
    family = config["model_type"]
    if family in MIXTURES:
        return f"does not support mixtures of experts ({family})"
    window_is_used = config.get("use_sliding_window", family == "mistral")
    if window_is_used and config.get("sliding_window"):
        return f"does not support windows in models of the type {family} (sliding_window: {config['sliding_window']})"
    name, known = ("hidden_activation", "gelu_pytorch_tanh") if family in GEMMA else ("hidden_act", "silu")
    if (config.get(name) or known) != known:
        return f"does not support the activation {config[name]!r} in models of the type {family}, only {known}"
    for rope in ropes(config).values():
        if rope["rope_type"] not in ROPE_TYPES:
            return f"does not support the RoPE scaling {rope['rope_type']!r}, only linear and llama3"
        if float(config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
            return "rotates only whole heads (partial_rotary_factor must be 1)"
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
