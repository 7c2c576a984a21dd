"""What it costs to add up a manifest, on one thread, beside one bare pass over the same bytes and a former checksum.

    .venv/bin/python -m benchmarks.publication.manifests
    .venv/bin/python -m benchmarks.publication.manifests --former ../before/trainer/rljob_trainer/weights/checksum.py

``--former``: a file with a function ``checksum(tensor) -> int`` to measure in the same process, in turn: that of the
commit before manifests, say, which took one of each bucket. The *bare pass* is ``torch.sum`` of the bytes as 64-bit
words: nothing that looks at every byte takes less. *Small* are the norms and biases of a model of many layers.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.environments import DEFAULT_CACHE
from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, interleaved, ratios, table, write_results
from benchmarks.real_model.model import smollm2
from rljob_trainer.weights.blocks import lay_out
from rljob_trainer.weights.manifest import Addition
from rljob_trainer.weights.plan import Bucket, WeightPlan, describe

HERE = Path(__file__).parent
PASS, MANIFEST, FORMER = "one bare pass", "manifest", "former checksum"
Checksum = Callable[[Tensor], int]


@dataclass(frozen=True, slots=True)
class ManifestCosts:
    """Seconds for all bytes of one set of tensors, spread over the repetitions."""

    tensors: str
    count: int
    nbytes: int
    seconds: Mapping[str, MeasuredSpread]
    over_pass: MeasuredSpread
    over_former: MeasuredSpread | None
    """Ratios, repetition by repetition."""


def measure(name: str, tensors: Mapping[str, Tensor], repetitions: int, former: Checksum | None) -> ManifestCosts:
    """Of what is sent in buckets, as a publication does; the former checksum was taken of each bucket."""
    plan = WeightPlan(describe(tensors.items()), 256 << 20)
    buckets: list[tuple[Bucket, Tensor]] = []
    for bucket in plan.buckets:
        members = [tensors[meta.name] for meta in bucket.tensors]
        whole = lay_out(members, bucket) if len(members) > 1 else members[0].view(-1).view(torch.uint8)
        buckets.append((bucket, whole))

    def bare() -> None:
        for _, data in buckets:
            data[: len(data) // 8 * 8].view(torch.int64).sum()

    def manifest() -> None:
        addition = Addition()
        for bucket, data in buckets:
            addition.add(bucket.views(data))
        addition.manifest()

    def checksums() -> None:
        assert former is not None
        for _, data in buckets:
            former(data)

    sides = {PASS: _seconds(bare), MANIFEST: _seconds(manifest)}
    if former is not None:
        sides[FORMER] = _seconds(checksums)
    for side in sides.values():
        side(0)
    seconds = interleaved(sides, repetitions)
    return ManifestCosts(
        name,
        len(tensors),
        plan.nbytes,
        {side: MeasuredSpread.of(values) for side, values in seconds.items()},
        MeasuredSpread.of(ratios(seconds[MANIFEST], seconds[PASS])),
        MeasuredSpread.of(ratios(seconds[MANIFEST], seconds[FORMER])) if former is not None else None,
    )


def _seconds(work: Callable[[], None]) -> Callable[[int], float]:
    def timed(_: int) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return timed


def small_tensors() -> dict[str, Tensor]:
    """Norms and biases of 64 layers with hidden size 1,024: 512 tensors of 4 KiB, 2 MiB in all."""
    return {f"layers.{number // 8}.small.{number % 8}": torch.randn(1024) for number in range(512)}


def show(costs: Sequence[ManifestCosts]) -> str:
    sides = list(costs[0].seconds)
    rows = []
    for cost in costs:
        last = [cost.over_former.show()] if cost.over_former is not None else []
        milliseconds = [cost.seconds[side].multiplied(1000).show(".1f") for side in sides]
        rows.append([cost.tensors, f"{cost.nbytes / 1e6:.1f}", *milliseconds, cost.over_pass.show(), *last])
    header = ["tensors", "MB", *(f"{side} ms" for side in sides), "manifest / pass"]
    header += ["manifest / former"] if costs[0].over_former is not None else []
    return f"Median (smallest – largest), one thread.\n\n{table(header, rows)}"


def load_checksum(file: Path) -> Checksum:
    spec = importlib.util.spec_from_file_location("former_checksum", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    checksum: Checksum = module.checksum
    return checksum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where the model is kept")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--former", type=Path, help="a file with another checksum")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = Hardware.here()
    former = None if arguments.former is None else load_checksum(arguments.former)
    model = load_file(smollm2(arguments.cache) / "model.safetensors")
    sets = {"SmolLM2-135M, float32": model, "512 of 4 KiB": small_tensors()}
    costs = [measure(name, tensors, arguments.repetitions, former) for name, tensors in sets.items()]
    write_results(arguments.results, "manifests", machine, costs, show(costs))


if __name__ == "__main__":
    main()
