"""Short programs a second in each mode of the sandbox, beside a fresh ``python -I -c`` for each.

    .venv/bin/python -m benchmarks.sandbox

As many programs as there are cores are under way at once, in as many workers. All sides run in turn, several times.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, interleaved, table, write_results
from rljob_trainer.world.sandbox import LocalSandbox, Mode, mode_available

HERE = Path(__file__).parent
GOAL_RATE, GOAL_SECONDS = 100.0, 0.050
MODES: tuple[Mode, ...] = ("namespaces", "landlock", "none")
FRESH = "python -I -c"
PROGRAM = """
import math
numbers = [int(word) for word in input().split()]
print(sum(math.gcd(a, b) for a in numbers for b in numbers))
"""
STDIN = " ".join(map(str, range(1, 61)))
ANSWER = str(sum(__import__("math").gcd(a, b) for a in range(1, 61) for b in range(1, 61)))


@dataclass(frozen=True, slots=True)
class MeasuredPrograms:
    """One repetition of one side."""

    rate: float
    """Programs a second."""
    median: float
    """Seconds from the call until its result."""
    ninety_fifth: float
    driver: float
    """Processor seconds of the driver for each program."""


@dataclass(frozen=True, slots=True)
class SandboxSide:
    """All repetitions of one side."""

    name: str
    rate: MeasuredSpread
    median: MeasuredSpread
    ninety_fifth: MeasuredSpread
    driver: MeasuredSpread

    @classmethod
    def of(cls, name: str, runs: list[MeasuredPrograms]) -> SandboxSide:
        columns = zip(*((run.rate, run.median, run.ninety_fifth, run.driver) for run in runs), strict=True)
        return cls(name, *(MeasuredSpread.of(column) for column in columns))


async def measured(run: Callable[[], Awaitable[str]], programs: int, at_once: int) -> MeasuredPrograms:
    """Runs ``programs`` programs, ``at_once`` at any time. Raises ``ValueError`` for a wrong answer."""
    seconds: list[float] = []

    async def in_turn(count: int) -> None:
        for _ in range(count):
            begun = time.perf_counter()
            answer = await run()
            seconds.append(time.perf_counter() - begun)
            if answer.strip() != ANSWER:
                raise ValueError(f"the answer is {ANSWER}, not {answer!r}")

    for _ in range(5):
        await run()
    begun, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(in_turn(programs // at_once) for _ in range(at_once)))
    whole, used = time.perf_counter() - begun, time.process_time() - processor
    seconds.sort()
    count = len(seconds)
    return MeasuredPrograms(count / whole, seconds[count // 2], seconds[int(0.95 * count)], used / count)


async def in_sandbox(mode: Mode, programs: int, at_once: int) -> MeasuredPrograms:
    async with LocalSandbox(mode, workers=at_once) as sandbox:

        async def run() -> str:
            return (await sandbox.run(PROGRAM, STDIN)).stdout

        return await measured(run, programs, at_once)


async def fresh(programs: int, at_once: int) -> MeasuredPrograms:
    pipe = asyncio.subprocess.PIPE

    async def run() -> str:
        process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", PROGRAM, stdin=pipe, stdout=pipe)
        stdout, _ = await process.communicate(STDIN.encode())
        return stdout.decode()

    return await measured(run, programs, at_once)


def show(sides: list[SandboxSide], missing: list[str]) -> str:
    rows = []
    for side in sides:
        milliseconds = (side.median, side.ninety_fifth, side.driver)
        rows.append(
            [side.name, side.rate.show(".0f"), *(spread.multiplied(1000).show(".1f") for spread in milliseconds)]
        )
    header = ["", "programs/s", "median, ms", "95th percentile, ms", "driver's processor time for each, ms"]
    goal = f"The goal: at least {GOAL_RATE:.0f} a second, 95 % of them within {1000 * GOAL_SECONDS:.0f} ms."
    return "\n".join(
        [f"Median (smallest – largest) over repetitions in turn. {goal}", "", table(header, rows), *missing]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500, help="in each repetition (default 500)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="as many workers (default: cores)")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    machine = Hardware.here(packages=())
    programs, at_once = arguments.programs, arguments.at_once
    missing = [f"{mode} does not work here: {reason}" for mode in MODES if (reason := mode_available(mode))]
    sides: dict[str, Callable[[int], MeasuredPrograms]] = {}
    for mode in MODES:
        if mode_available(mode) is None:
            sides[f"`{mode}`"] = lambda _, mode=mode: asyncio.run(in_sandbox(mode, programs, at_once))
    sides[f"`{FRESH}`"] = lambda _: asyncio.run(fresh(programs, at_once))
    results = [SandboxSide.of(name, runs) for name, runs in interleaved(sides, arguments.repetitions).items()]
    write_results(arguments.results, "sandbox", machine, results, show(results, missing))


if __name__ == "__main__":
    main()
