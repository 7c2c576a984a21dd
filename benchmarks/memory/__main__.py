"""Peak memory of a trainer rank for each example on GPUs, and whether it fits with 80 GB: no GPU and no network needed.

.venv/bin/python -m benchmarks.memory
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, Qwen2Config

from benchmarks.environments import ROOT
from benchmarks.measuring import table
from benchmarks.memory.rank import GIGABYTE, Peak, peak_of
from rljob_api import load_jobs, resolve
from rljob_api.resolved import ResolvedSpec

HERE = Path(__file__).parent
EXAMPLES = ROOT / "examples"
CARD = 80 * GIGABYTE
ROOM = 0.92
"""Of a card, for tensors: the rest is the driver's, NCCL's and lost between blocks."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.5B": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7B": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Of Qwen2.5, by size."""
DAPO = "fully-async-dapo-7b"
PPO_7B = "gsm8k, but 7B on 4 ranks with activation checkpointing"
JOBS: Mapping[str, tuple[str, Sequence[str], Mapping[str, Any]]] = {
    "gsm8k": ("0.5B", ["gsm8k.yaml"], {}),
    PPO_7B: ("7B", ["gsm8k.yaml"], {"trainer.gpusPerReplica": 4, "trainer.activationCheckpointing": "true"}),
    "one-step-off": ("7B", ["one-step-off.yaml"], {}),
    **{
        f"{DAPO} {split}": ("7B", [f"{DAPO}/base.yaml", f"{DAPO}/{split}.yaml"], {})
        for split in ("4-4", "4-12", "8-8", "16-16", "32-32", "64-64")
    },
}
"""Size of the model, files, settings."""


def config_of(size: str) -> PretrainedConfig:
    return Qwen2Config(**SHAPES[size], max_position_embeddings=32768)


def spec_of(name: str) -> ResolvedSpec:
    _, files, settings = JOBS[name]
    first, *overlays = (EXAMPLES / file for file in files)
    [job] = load_jobs(first, [f"{path}={value}" for path, value in settings.items()], overlays)
    return resolve(job).spec


def fits(peak: Peak) -> bool:
    return peak.total <= ROOM * CARD


def verdict(plain: Peak, offloaded: Peak) -> str:
    """What the job needs on cards of 80 GB."""
    if fits(plain):
        return "fits"
    if fits(offloaded):
        return "needs trainer.offload: true"
    return "needs more ranks, trainer.activationCheckpointing, or a smaller trainer.microBatchTokens"


def show(peaks: Mapping[str, tuple[Peak, Peak]]) -> str:
    heads = ["job", "state", "reference", "gathered", "activations", "peak, GB", "with offload", "on 80 GB"]
    rows = []
    for name, (plain, offloaded) in peaks.items():
        sizes = [*asdict(plain).values(), plain.total, offloaded.total]
        rows.append([name, *(f"{value / GIGABYTE:.1f}" for value in sizes), verdict(plain, offloaded)])
    return table(heads, rows)


def main() -> None:
    peaks = {}
    for name, (size, *_) in JOBS.items():
        spec, config = spec_of(name), config_of(size)
        plain, offloaded = (peak_of(spec, config, offload=offload, memory=CARD) for offload in (False, True))
        peaks[name] = plain, offloaded
        print(f"{name}: {plain.total / GIGABYTE:.1f} GB, {verdict(plain, offloaded)}", flush=True)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "memory.md").write_text(show(peaks) + "\n")
    whole = {name: [asdict(peak) for peak in both] for name, both in peaks.items()}
    (results / "memory.json").write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
