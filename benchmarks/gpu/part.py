"""The process of one part: `python -m benchmarks.gpu.part NAME --write FILE ...`, started by the command."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.environments import DEFAULT_CACHE
from benchmarks.gpu.figures import Writer
from benchmarks.gpu.parts import BY_NAME, RANKS
from benchmarks.gpu.processes import become_rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=BY_NAME)
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    asked = parser.parse_args()
    writer, name, device, cache = Writer(asked.write), asked.name, asked.device, asked.cache
    if name in RANKS:
        become_rank(device, deterministic=name == "deterministic")
    # A part imports what it needs and no more: vLLM and Ray may be missing.
    if name == "attention":
        from benchmarks.gpu import attention

        attention.measure(writer, device)
    elif name == "learner":
        from benchmarks.gpu import learner

        learner.measure(writer, device, cache)
    elif name == "compile":
        from benchmarks.gpu import compiled

        compiled.measure(writer, device, cache)
    elif name.startswith("publication"):
        from benchmarks.gpu import publication

        publication.measure(writer, device, name.removeprefix("publication").removeprefix("-") or "gloo")
    elif name.startswith("killed"):
        from benchmarks.gpu import publication

        publication.measure_death(writer, device, "nccl" if name.endswith("nccl") else "gloo")
    elif name == "memory":
        from benchmarks.gpu import memory

        memory.measure(writer, cache)
    elif name == "profile":
        from benchmarks.gpu import profile

        profile.measure(writer, device, cache)
    elif name == "deterministic":
        from benchmarks.gpu import bits

        bits.measure(writer, device, cache)
    elif name == "agreement":
        from benchmarks.gpu import agreement

        agreement.measure(writer, device, cache)
    elif name == "engine":
        from benchmarks.gpu import engine

        engine.measure(writer, cache)
    elif name == "engine-process":
        from benchmarks.gpu import engine

        engine.measure_own_process(writer, cache)
    elif name == "engine-process-weights":
        from benchmarks.gpu import own_process

        own_process.measure(writer, device, cache)
    else:
        from benchmarks.gpu import step

        step.MEASURES[name](writer, cache)


if __name__ == "__main__":
    main()
