"""What a GPU is needed to know: one command, eight minutes at most, no network, no hub; `make gpu-check`.

.venv/bin/python -m benchmarks.gpu                      # every part that this machine allows
python3 -m benchmarks.gpu --only attention learner      # with torch, transformers and accelerate alone
.venv/bin/python -m benchmarks.gpu --device cpu         # tries the parts that a CPU can run with a small model

Each part is a process of its own with a time limit: one that hangs is killed and named, and the others go on. Results
are written after each, beside those that other parts had before on the same card. The exit code is 1 if a part that ran
failed, was killed or missed a goal, or none was measured, 130 if a signal (Ctrl-C, a connection that is lost) ended the
check.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from uuid import uuid4

from benchmarks.environments import DEFAULT_CACHE, ROOT, peer_environment
from benchmarks.gpu.baseline import CHECK_NAME
from benchmarks.gpu.ending import ENDED_BY, INTERRUPTED, end, guarded
from benchmarks.gpu.figures import read, read_notes
from benchmarks.gpu.outcomes import PartOutcome, ResultsFile, show
from benchmarks.gpu.parts import BY_NAME, PARTS, NothingToMeasureError, capability_of, gpu_count, lacking, no_gpu
from benchmarks.machine import Hardware

HERE = Path(__file__).parent
IMPORTABLE = os.pathsep.join(str(ROOT / folder) for folder in (".", "trainer", "api"))
"""Our own processes find the packages of this checkout also where it is not installed."""
SECONDS = 480.0
"""Where a machine is shared, a command is often ended at ten minutes."""
ON_CPU_SLOWER = 10
"""Limits are those of a machine with a GPU that nobody else uses; a CPU may be anybody's."""
_GRACE_SECONDS = 5.0
"""For a part that is told to end: `rljob run` ends Ray then."""
_LOOKS_SECONDS = 0.2
_QUIET = "ignore:resource_tracker:UserWarning"
"""What it removes after a part that was ended is no news."""
_THIS = uuid4().hex
"""Names this check to its parts."""
_received: list[int] = []
"""The signals that came; each of them ends the check."""


def run(name: str, seconds: float, device: str, cache: Path, python: str = sys.executable) -> PartOutcome:
    """Runs one part and whatever it starts, for ``seconds`` at most."""
    with tempfile.TemporaryDirectory() as folder:
        written, printed = Path(folder, "figures"), Path(folder, "printed")
        command = [python, "-m", "benchmarks.gpu.part", name, "--write", str(written), "--device", device,
                   "--cache", str(cache)]  # fmt: skip
        variables = {"PYTHONPATH": IMPORTABLE, "PYTHONWARNINGS": _QUIET, CHECK_NAME: _THIS}
        environment = peer_environment(1 if device == "cpu" else 4, **variables)
        started = time.monotonic()
        with printed.open("w") as output:
            # A session of its own: what a part has started ends with it.
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        with guarded(process):
            try:
                code = _wait(process, seconds)
            finally:
                end(process, _GRACE_SECONDS)
        took = time.monotonic() - started
        tail = "\n".join(printed.read_text(errors="replace").splitlines()[-25:])
        if code is None and _received:
            return PartOutcome(
                "interrupted", took, read(written), f"a signal ended it after {took:.0f} s; it printed last:\n{tail}"
            )
        if code is None:
            return PartOutcome(
                "killed", took, read(written), f"did not end within {seconds:.0f} s; it printed last:\n{tail}"
            )
        if code:
            return PartOutcome("failed", took, read(written), f"exit code {code}:\n{tail}")
        return PartOutcome("measured", took, read(written), "; ".join(read_notes(written)))


def _receive(number: int, frame: FrameType | None) -> None:
    """Notes the signal and no more: an exception could come between a part's start and what ends it."""
    _received.append(number)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; None if it has none after ``seconds``, or when a signal comes."""
    until = time.monotonic() + seconds
    while not _received and (left := until - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, _LOOKS_SECONDS))
    return process.poll()


def _say(text: str) -> None:
    """Prints where somebody still reads: a terminal that was closed is no reason to lose what is measured."""
    with suppress(OSError):
        print(text, flush=True)


def check(names: list[str], device: str, cache: Path, results: Path, seconds: float) -> dict[str, PartOutcome]:
    """Measures the parts one after the other, and writes everything down after each; a signal ends it in between.

    Raises ``NothingToMeasureError`` before anything is measured or written: without a GPU where one is asked for, or if
    ``results`` cannot be written into.
    """
    gpus = gpu_count(sys.executable) if device == "cuda" else 0
    if device == "cuda" and gpus == 0:
        raise NothingToMeasureError(no_gpu())
    try:
        cache.mkdir(parents=True, exist_ok=True)
        kept = ResultsFile(results, device, Hardware.here())
    except OSError as error:
        raise NothingToMeasureError(f"nothing can be kept: {error}; choose another --results or --cache") from error
    capability = capability_of(sys.executable) if gpus else (0, 0)
    outcomes = dict[str, PartOutcome]()
    slower = ON_CPU_SLOWER if device == "cpu" else 1
    seconds *= slower
    times = f" ({ON_CPU_SLOWER} times what --seconds says, since this is a CPU)" if slower > 1 else ""
    _say(f"{seconds:g} s at most for all parts together{times}")
    deadline = time.monotonic() + seconds
    for name in names:
        part = BY_NAME[name]
        limit, left = part.seconds * slower, deadline - time.monotonic()
        lack = lacking(part, device, gpus, cache, capability)
        if lack is None and seconds < limit / 2:
            lack = f"{seconds:g} s are too little for it, which may take {limit} s: `--seconds {part.seconds}`"
        elif lack is None and left < limit / 2:
            lack = f"no time was left of {seconds:g} s: `--only {name}`"
        if lack is not None:
            outcomes[name] = PartOutcome("not measured", reason=lack)
        else:
            _say(f"{name}: {part.what}, {limit} s at most")
            outcomes[name] = run(name, min(limit, left), device, cache)
        kept.keep({name: outcomes[name]})
        if lack is None:
            _say(f"{name}: {outcomes[name].state} in {outcomes[name].seconds:.0f} s")
        if _received:
            break
    return outcomes


def chosen(only: list[str] | None, device: str) -> list[str]:
    """The parts to look at: all on a GPU, those that a CPU can run on a CPU."""
    if only:
        return [part.name for part in PARTS if part.name in only]
    return [part.name for part in PARTS if device == "cuda" or part.on_cpu]


def _seconds(text: str) -> float:
    """Raises ``ArgumentTypeError`` for what is no time that something can be measured in."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0: {SECONDS:g}, say")
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BY_NAME, nargs="+", help="default: all that the device allows")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a small model")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where environments and models are kept")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=SECONDS,
        help=f"for all parts together (default: %(default)g); --device cpu has {ON_CPU_SLOWER} times as many",
    )
    asked = parser.parse_args(arguments)
    for each in ENDED_BY:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup asks for
            signal.signal(each, _receive)
    try:
        outcomes = check(chosen(asked.only, asked.device), asked.device, asked.cache, asked.results, asked.seconds)
    except NothingToMeasureError as error:
        sys.exit(INTERRUPTED if _received else str(error))
    _say(f"\n{show(outcomes)}")
    if _received:
        sys.exit(INTERRUPTED)
    if all(outcome.state == "not measured" for outcome in outcomes.values()):
        sys.exit("no part was measured, for the reasons above")
    # A part that was asked for by name and cannot be measured is a failure, too.
    missed = asked.only and any(outcome.state == "not measured" for outcome in outcomes.values())
    sys.exit(0 if all(outcome.is_fine for outcome in outcomes.values()) and not missed else 1)


if __name__ == "__main__":
    main()
