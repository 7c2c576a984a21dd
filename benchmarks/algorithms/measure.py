"""What is measured in a process of its own, with verl on the path: times in turn, or one call's memory.

python -m benchmarks.algorithms.measure time --shape ragged --repetitions 7 --threads 2 --write FILE
python -m benchmarks.algorithms.measure memory --shape ragged --side ours --case gae --threads 2 --write FILE
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.algorithms.agreement import deviations
from benchmarks.algorithms.ours import Ours
from benchmarks.algorithms.workload import SHAPES, Workload, make
from benchmarks.resident import PeakMemory

CASES: dict[str, tuple[str, str]] = {
    "gae": ("gae", "gae"),
    "grpo": ("grpo", "grpo"),
    "grpo against grpo_vectorized": ("grpo", "grpo_vectorized"),
    "grpo_of_token_rewards": ("grpo_of_token_rewards", "grpo_of_token_rewards"),
    "correction_of_tokens": ("correction_of_tokens", "correction_of_tokens"),
    "correction_of_sequences": ("correction_of_sequences", "correction_of_sequences"),
    "policy_loss": ("policy_loss", "policy_loss"),
}
"""Name, our method, theirs."""


def times(workload: Workload, repetitions: int) -> dict[str, Any]:
    """Seconds of both sides, call by call in turn, after one call each that only compares the results."""
    from benchmarks.algorithms.theirs import Theirs

    ours, theirs = Ours(workload), Theirs(workload)
    agreement = {
        name: deviations(mine, ours[mine](), theirs[other](), workload) for name, (mine, other) in CASES.items()
    }
    seconds: dict[str, dict[str, list[float]]] = {name: {"ours": [], "theirs": []} for name in CASES}
    for _ in range(repetitions):
        for name, (mine, other) in CASES.items():
            for side, call in (("ours", ours[mine]), ("theirs", theirs[other])):
                start = time.perf_counter()
                call()
                seconds[name][side].append(time.perf_counter() - start)
    bandwidth = bytes_per_second()
    return {"tokens": workload.tokens, "seconds": seconds, "agreement": agreement, "bandwidth": bandwidth}


def bytes_per_second(megabytes: int = 256) -> float:
    """Of the best of seven sums of two large vectors into a third that is already there."""
    one, two, three = (torch.ones(megabytes << 18) for _ in range(3))
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        torch.add(one, two, out=three)
        best = min(best, time.perf_counter() - start)
    return 3 * (megabytes << 20) / best


def memory(workload: Workload, side: str, method: str) -> int:
    """Bytes that one call takes at its peak beyond its inputs; a small batch before it loads what is loaded once."""
    kind: Any = Ours
    if side == "theirs":
        from benchmarks.algorithms.theirs import Theirs

        kind = Theirs
    kind(make("ragged", rows=8, longest=64))[method]()
    call = kind(workload)[method]
    # What making the batch has freed would be used again unseen.
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with PeakMemory() as peak:
        call()
    return peak.extra_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "memory"])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--side", choices=["ours", "theirs"])
    parser.add_argument("--case")
    parser.add_argument("--write", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    workload = make(arguments.shape, arguments.rows, arguments.longest)
    found: Any
    if arguments.what == "time":
        found = times(workload, arguments.repetitions)
    else:
        found = memory(workload, arguments.side, arguments.case)
    arguments.write.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
