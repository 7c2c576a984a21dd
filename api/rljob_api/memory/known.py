"""Shapes of well-known models by their hub id, for jobs whose ``config.json`` is not at hand.

Every row is what the ``config.json`` of the model on huggingface.co says; models that were trained further from one (a
suffix such as -Instruct) have its shape. The tests hold the number of parameters against the one that the hub shows.
"""

from __future__ import annotations

import re

from rljob_api.memory.shape import ModelShape

_Q2, _Q3, _LL, _MI, _G2, _G3 = "qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text"
_MOE = "qwen3_moe"
# Family, hidden, layers, heads, kv heads, width of a head, feed-forward, vocabulary, tied.
_Fields = tuple[str, int, int, int, int, int, int, int, bool]
_QWEN_7B: _Fields = (_Q2, 3584, 28, 28, 4, 128, 18944, 152064, False)
_QWEN_14B: _Fields = (_Q2, 5120, 48, 40, 8, 128, 13824, 152064, False)
_QWEN_32B: _Fields = (_Q2, 5120, 64, 40, 8, 128, 27648, 152064, False)
_LLAMA_8B: _Fields = (_LL, 4096, 32, 32, 8, 128, 14336, 128256, False)
_LLAMA_70B: _Fields = (_LL, 8192, 80, 64, 8, 128, 28672, 128256, False)
_SHAPES: dict[str, _Fields] = {
    "Qwen/Qwen2.5-0.5B": (_Q2, 896, 24, 14, 2, 64, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": (_Q2, 1536, 28, 12, 2, 128, 8960, 151936, True),
    "Qwen/Qwen2.5-3B": (_Q2, 2048, 36, 16, 2, 128, 11008, 151936, True),
    "Qwen/Qwen2.5-7B": _QWEN_7B,
    "Qwen/Qwen2.5-14B": _QWEN_14B,
    "Qwen/Qwen2.5-32B": _QWEN_32B,
    "Qwen/Qwen2.5-72B": (_Q2, 8192, 80, 64, 8, 128, 29568, 152064, False),
    "Qwen/Qwen2.5-Math-7B": _QWEN_7B,
    "Qwen/Qwen2.5-Coder-7B": _QWEN_7B,
    "Qwen/Qwen3-0.6B": (_Q3, 1024, 28, 16, 8, 128, 3072, 151936, True),
    "Qwen/Qwen3-1.7B": (_Q3, 2048, 28, 16, 8, 128, 6144, 151936, True),
    "Qwen/Qwen3-4B": (_Q3, 2560, 36, 32, 8, 128, 9728, 151936, True),
    "Qwen/Qwen3-8B": (_Q3, 4096, 36, 32, 8, 128, 12288, 151936, False),
    "Qwen/Qwen3-14B": (_Q3, 5120, 40, 40, 8, 128, 17408, 151936, False),
    "Qwen/Qwen3-32B": (_Q3, 5120, 64, 64, 8, 128, 25600, 151936, False),
    "Qwen/Qwen3-30B-A3B": (_MOE, 2048, 48, 32, 4, 128, 6144, 151936, False),
    "Qwen/Qwen3-235B-A22B": (_MOE, 4096, 94, 64, 4, 128, 12288, 151936, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN_7B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": _QWEN_14B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": _QWEN_32B,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _LLAMA_8B,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": _LLAMA_70B,
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.2-1B": (_LL, 2048, 16, 32, 8, 64, 8192, 128256, True),
    "meta-llama/Llama-3.2-3B": (_LL, 3072, 28, 24, 8, 128, 8192, 128256, True),
    "mistralai/Mistral-7B-v0.1": (_MI, 4096, 32, 32, 8, 128, 14336, 32000, False),
    "mistralai/Mistral-7B-v0.3": (_MI, 4096, 32, 32, 8, 128, 14336, 32768, False),
    "google/gemma-2-2b": (_G2, 2304, 26, 8, 4, 256, 9216, 256000, True),
    "google/gemma-2-9b": (_G2, 3584, 42, 16, 8, 256, 14336, 256000, True),
    "google/gemma-2-27b": (_G2, 4608, 46, 32, 16, 128, 36864, 256000, True),
    "google/gemma-3-1b": (_G3, 1152, 26, 4, 1, 256, 6912, 262144, True),
    "HuggingFaceTB/SmolLM2-135M": (_LL, 576, 30, 9, 3, 64, 1536, 49152, True),
    "HuggingFaceTB/SmolLM2-360M": (_LL, 960, 32, 15, 5, 64, 2560, 49152, True),
    "HuggingFaceTB/SmolLM2-1.7B": (_LL, 2048, 24, 32, 32, 64, 8192, 49152, True),
}
_EXPERTS = {"Qwen/Qwen3-30B-A3B": (128, 8, 768), "Qwen/Qwen3-235B-A22B": (128, 8, 1536)}
"""Experts of a layer, those that a token is sent to, and their width."""
_TRAINED_FURTHER = re.compile(r"-(Base|Instruct|it|pt|Instruct-v[0-9.]+)$")


def known_shape(source: str) -> ModelShape | None:
    """The shape of the model of a hub id, with or without ``hf://``, or of an address that ends like one
    (``s3://models/Qwen2.5-7B``); None: no model of that name is known here."""
    name = source.removeprefix("hf://").rstrip("/")
    # The version of Mistral's models stands behind the suffix.
    name = re.sub(r"-Instruct-(v[0-9.]+)$", r"-\1", name)
    name = _TRAINED_FURTHER.sub("", name)
    fields = _SHAPES.get(name)
    if fields is None and "://" in name:
        ends = [known for known in _SHAPES if known.rpartition("/")[2] == name.rpartition("/")[2]]
        name = ends[0] if len(ends) == 1 else name
        fields = _SHAPES.get(name)
    if fields is None:
        return None
    capped = fields[0] == _G2
    experts, chosen, width = _EXPERTS.get(name, (0, 0, 0))
    return ModelShape(
        *fields,
        query_bias=fields[0] == _Q2,
        caps_scores=capped,
        caps_logits=capped,
        experts=experts,
        experts_per_token=chosen,
        expert_width=width,
    )


def known_models() -> list[str]:
    """The hub ids, without suffixes."""
    return list(_SHAPES)
