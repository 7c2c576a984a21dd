"""How fast a step was: seconds by stage, tokens per second, and the share of the devices' peak that was used.

FLOPs are counted the usual way for a decoder: 2 per parameter and token in the matrix products of a forward pass plus
4 x layers x width per token and position it attends to (half of that under the causal mask), three times as much for
forward and backward (arXiv:2204.02311, appendix B). Recomputed activations do not count: they are no progress.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rljob_trainer.telemetry.catalogue import STAGES
from rljob_trainer.telemetry.names import METRICS

_PER_TOKEN_STAGES = frozenset(
    entry.name.removeprefix("timing_per_token/").removesuffix("_milliseconds")
    for entry in METRICS
    if entry.family == "timing_per_token"
)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What FLOPs depend on. ``parameters`` counts those used for every token (without the input embedding)."""

    parameters: int
    layers: int
    width: int
    """Heads times head dimension."""


def timing_metrics(seconds: Mapping[str, float], *, all_tokens: int, response_tokens: int) -> dict[str, float]:
    """``StageTimes.lap()`` as metrics, also per token. Raises ``KeyError`` for a stage that is not in the catalogue."""
    result: dict[str, float] = {}
    for stage, value in seconds.items():
        if stage not in STAGES:
            raise KeyError(f"{stage!r} is not a stage; telemetry/catalogue.py lists them")
        result[f"timing/{stage}_seconds"] = value
        tokens = response_tokens if stage == "generate" else all_tokens
        if stage in _PER_TOKEN_STAGES and tokens:
            result[f"timing_per_token/{stage}_milliseconds"] = 1000 * value / tokens
    return result


def throughput_metrics(
    *, step_seconds: float, prompt_tokens: int, response_tokens: int, samples: int, devices: int
) -> dict[str, float]:
    """Tokens and samples per second of a step; ``devices`` counts those of all pools."""
    tokens = prompt_tokens + response_tokens
    result = {"throughput/tokens": float(tokens)}
    if step_seconds > 0:
        result["throughput/tokens_per_second"] = tokens / step_seconds
        result["throughput/tokens_per_second_per_device"] = tokens / step_seconds / max(1, devices)
        result["throughput/generated_tokens_per_second"] = response_tokens / step_seconds
        result["throughput/samples_per_second"] = samples / step_seconds
    return result


def forward_flops(model: ModelSize, lengths: Iterable[int]) -> float:
    """Floating-point operations of one forward pass over sequences of ``lengths`` tokens (prompt and response)."""
    total = 0.0
    for length in lengths:
        attention = 4 * model.layers * model.width * length * (length + 1) / 2
        total += 2 * model.parameters * length + attention
    return total


def utilisation_metrics(
    *,
    forward: float,
    peak_flops: float | None,
    devices: int,
    critic_forward: float = 0.0,
    epochs: int = 1,
    actor_update_seconds: float = 0.0,
    critic_update_seconds: float = 0.0,
    inference_seconds: float = 0.0,
    inference_passes: int = 1,
) -> dict[str, float]:
    """Model FLOPs utilisation of the trainer's stages, given the FLOPs of one ``forward`` pass of the actor over the
    step's batch, and of its critic's.

    ``peak_flops`` is that of one device (None on CPUs: nothing is reported). Stages that took no time are left out.
    """
    if peak_flops is None:
        return {}
    stages = (
        ("actor", 3 * epochs * forward, actor_update_seconds),
        ("critic", 3 * epochs * critic_forward, critic_update_seconds),
        ("actor_inference", inference_passes * forward, inference_seconds),
    )
    return {
        f"throughput/model_flops_utilisation/{name}": flops / (seconds * peak_flops * devices)
        for name, flops, seconds in stages
        if seconds > 0 and flops > 0
    }


_PEAK_BFLOAT16_FLOPS = {
    # Dense bfloat16, from the makers' data sheets; the first entry whose words the device's name has counts.
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}


def peak_flops(device_name: str) -> float | None:
    """Peak bfloat16 FLOPs per second of a GPU by the name its driver reports; None for one we do not know, as is one
    whose name only begins or ends like a known one's."""
    known = _PEAK_BFLOAT16_FLOPS.items()
    return next((flops for name, flops in known if re.search(rf"\b{name}\b", device_name)), None)
