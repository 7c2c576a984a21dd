"""One command: verl beside our environment, both sides in turn on three shapes of batch, memory, tables.

.venv/bin/python -m benchmarks.algorithms                             # everything, about 10 minutes
.venv/bin/python -m benchmarks.algorithms --only times --shapes ragged
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.algorithms.measure import CASES
from benchmarks.algorithms.workload import SHAPES
from benchmarks.environments import DEFAULT_CACHE, ROOT, overlay, peer_environment
from benchmarks.machine import PACKAGES, Hardware
from benchmarks.measuring import MeasuredSpread, ratios, table, write_results

HERE = Path(__file__).parent
VERL = (
    "verl==0.9.1",
    "antlr4-python3-runtime==4.9.3",
    "codetiming",
    "hydra-core",
    "omegaconf",
    "orjson",
    "pylatexenc",
    "pyvers",
    "tensordict",
)
TOUCHED = {  # bytes a real token that each case must read and write once
    "gae": 4 + 4 + 1 + 4 + 4,
    "grpo": 1 + 4,
    "grpo against grpo_vectorized": 1 + 4,
    "grpo_of_token_rewards": 4 + 1 + 4,
    "correction_of_tokens": 4 + 4 + 1 + 1 + 4,
    "correction_of_sequences": 4 + 4 + 1 + 1 + 4,
    "policy_loss": 4 + 4 + 4 + 1 + 4,
}


@dataclass(frozen=True, slots=True)
class CaseRow:
    """One case on one shape of batch: seconds."""

    shape: str
    case: str
    ours: MeasuredSpread
    theirs: MeasuredSpread
    ratio: MeasuredSpread
    limit_seconds: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Peak:
    """The same: bytes beyond the inputs."""

    shape: str
    case: str
    ours: int
    theirs: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where verl is kept")
    parser.add_argument("--only", choices=["times", "memory"], help="one of the two tables")
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=SHAPES)
    parser.add_argument("--rows", type=int, default=1024, help="sequences (default 1024)")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest (default 8192)")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch (default: all cores)")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    machine = Hardware.here((*PACKAGES, "numpy"))
    path = f"{ROOT}{os.pathsep}{overlay('verl', VERL, arguments.cache)}"
    environment = peer_environment(arguments.threads, PYTHONPATH=path)
    size = ["--rows", str(arguments.rows), "--longest", str(arguments.longest), "--threads", str(arguments.threads)]

    def measured(*words: str) -> Any:
        """What a process of its own found."""
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "found.json"
            command = [sys.executable, "-m", "benchmarks.algorithms.measure", *words, *size, "--write", str(written)]
            ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            if ended.returncode != 0:
                sys.exit(f"{' '.join(words)} failed:\n{ended.stderr}")
            return json.loads(written.read_text())

    rectangle = arguments.rows * arguments.longest
    if arguments.only != "memory":
        found: dict[str, Any] = {}
        for shape in arguments.shapes:
            print(f"{shape}: times", flush=True)
            found[shape] = measured("time", "--shape", shape, "--repetitions", str(arguments.repetitions))
        rows = [row(shape, case, found[shape]) for shape in found for case in CASES]
        results = {"threads": arguments.threads, "rows": rows}
        write_results(arguments.results, "times", machine, results, show(rows, found, rectangle, arguments.threads))
    if arguments.only != "times":
        peaks = []
        for shape in arguments.shapes:
            for case, methods in CASES.items():
                print(f"{shape}: memory of {case}", flush=True)
                sides = zip(("ours", "theirs"), methods, strict=True)
                ours, theirs = (
                    measured("memory", "--shape", shape, "--side", side, "--case", method) for side, method in sides
                )
                peaks.append(Peak(shape, case, ours, theirs))
        results = {"threads": arguments.threads, "peaks": peaks}
        write_results(arguments.results, "memory", machine, results, show_memory(peaks))


def row(shape: str, case: str, found: dict[str, Any]) -> CaseRow:
    ours, theirs = found["seconds"][case]["ours"], found["seconds"][case]["theirs"]
    limit = TOUCHED[case] * found["tokens"] / found["bandwidth"]
    spreads = MeasuredSpread.of(ours), MeasuredSpread.of(theirs), MeasuredSpread.of(ratios(theirs, ours))
    return CaseRow(shape, case, *spreads, limit, max(found["agreement"][case].values()))


def show(rows: list[CaseRow], found: dict[str, Any], rectangle: int, threads: int) -> str:
    lines = [f"Median (smallest – largest), {threads} threads, float32, verl 0.9.1.", ""]
    for shape, measured in found.items():
        body = [
            [row.case, row.ours.multiplied(1e3).show(".1f"), row.theirs.multiplied(1e3).show(".0f"),
             f"**{row.ratio.show('.1f')}**", f"{row.limit_seconds / row.ours.median:.0%}", f"{row.deviation:.0e}"]
            for row in rows if row.shape == shape
        ]  # fmt: skip
        tokens, bandwidth = measured["tokens"], measured["bandwidth"] / 1e9
        lines += [
            f"### {shape}: {tokens:,} tokens, {tokens / rectangle:.0%} of the rectangle; limit at {bandwidth:.1f} GB/s",
            "",
            table(["case", "ours ms", "verl ms", "times faster", "of the limit", "deviation"], body),
        ]
    return "\n".join(lines)


def show_memory(peaks: list[Peak]) -> str:
    body = [
        [f"{peak.shape}: {peak.case}", f"{peak.ours / 1e6:.0f}", f"{peak.theirs / 1e6:.0f}",
         f"**{peak.ours / peak.theirs:.0%}**"]
        for peak in peaks
    ]  # fmt: skip
    header = ["case", "ours MB", "verl MB", "share"]
    return f"The peak beyond the inputs, one process for each call.\n\n{table(header, body)}"


if __name__ == "__main__":
    main()
