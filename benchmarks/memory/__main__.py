"""Peak memory of a trainer rank for each example on GPUs, and whether it fits with 80 GB: no GPU and no network needed.

.venv/bin/python -m benchmarks.memory [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.measuring import table
from benchmarks.memory.examples import Example, fullest
from benchmarks.memory.jobs import JOBS, Measured, measure
from benchmarks.memory.owned import PASSING
from benchmarks.memory.pretend_gpu import Counted, PretendGpu
from rljob_api.memory import gib, parts
from rljob_api.memory.accelerators import product_memory
from rljob_api.memory.plan import CONTEXT_BYTES, NCCL_BYTES

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CARD = product_memory("H100-80GB-HBM3") or 0
ROOM = 0.9
"""Of a card, for what is counted and a process's own: gaps between tensors may take the rest."""
OWN = CONTEXT_BYTES + NCCL_BYTES


def fits(peak: int) -> bool:
    return peak + OWN <= ROOM * CARD


def verdict(plain: Measured, offloaded: Measured) -> str:
    """What the job needs on cards of 80 GB."""
    if fits(plain.counted.peak):
        return "fits"
    if fits(offloaded.counted.peak):
        return "needs trainer.offload: true"
    return "needs more ranks, trainer.activationCheckpointing, or a smaller trainer.microBatchTokens"


def measured(example: Example, *, offload: bool) -> Measured:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted, rank = measure(example.resolved(offload=offload), PretendGpu(patch), CARD)
    return Measured(counted, fullest(rank))


def show(both: Mapping[str, tuple[Measured, Measured]]) -> str:
    heads = ["job", "state", "passes", "peak, GiB", "plan", "with offload", "plan", "with 80 GB"]
    rows = []
    for name, (plain, offloaded) in both.items():
        sizes = [plain.counted.state, plain.counted.peak - plain.counted.state, plain.counted.peak, plain.planned]
        sizes += [offloaded.counted.peak, offloaded.planned]
        rows.append([name, *map(gib, sizes), verdict(plain, offloaded)])
    return table(heads, rows)


def show_parts(both: Mapping[str, tuple[Measured, Measured]]) -> str:
    """Of the fullest moment with nothing offloaded."""
    names = [*(name for name in parts.ORDER if any(name in plain.counted.parts for plain, _ in both.values())), PASSING]
    rows = [
        [job, *(gib(plain.counted.parts[name]) if name in plain.counted.parts else "" for name in names)]
        for job, (plain, _) in both.items()
    ]
    return table(["peak by part, GiB", *names], rows)


def page(both: Mapping[str, tuple[Measured, Measured]]) -> str:
    return f"{show(both)}\n{show_parts(both)}"


def read(text: str) -> dict[str, tuple[Measured, Measured]]:
    """What ``main`` wrote."""
    return {
        name: (
            Measured(Counted(**plain["counted"]), plain["planned"]),
            Measured(Counted(**offloaded["counted"]), offloaded["planned"]),
        )
        for name, (plain, offloaded) in json.loads(text).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--only", choices=[*JOBS], help="measure this job; of the others the record stays")
    only = parser.parse_args().only
    record = read((RESULTS / "memory.json").read_text()) if only else {}
    for name in [only] if only else JOBS:
        example = JOBS[name]
        plain = offloaded = measured(example, offload=False)
        if example.resolved().spec.algorithm.needs_reference:  # the only thing that rests during an update
            offloaded = measured(example, offload=True)
        record[name] = plain, offloaded
        print(f"{name}: {gib(plain.counted.peak)} GiB, {verdict(plain, offloaded)}", flush=True)
    both = {name: record[name] for name in JOBS if name in record}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.md").write_text(page(both))
    whole = {name: [asdict(each) for each in pair] for name, pair in both.items()}
    (RESULTS / "memory.json").write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
