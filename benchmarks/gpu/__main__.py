"""What a GPU is needed to know: one command, 8 minutes, no network, no hub; `make gpu-check`.

.venv/bin/python -m benchmarks.gpu                      # every part that this machine allows
python3 -m benchmarks.gpu --only attention learner      # with torch and transformers alone
.venv/bin/python -m benchmarks.gpu --device cpu         # tries the parts that a CPU can run with a small model

Each part is a process of its own with a time limit: one that hangs is killed and named, and the others go on. Results
are written after each. The exit code is 1 if a part that ran failed, was killed or missed a goal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.environments import DEFAULT_CACHE, ROOT, peer_environment
from benchmarks.gpu.figures import Figure, read
from benchmarks.gpu.parts import BY_NAME, PARTS, gpu_count, lacking
from benchmarks.machine import Hardware
from benchmarks.measuring import plain, table

HERE = Path(__file__).parent
IMPORTABLE = os.pathsep.join(str(ROOT / folder) for folder in (".", "trainer", "api"))
"""Our own processes find the packages of this checkout also where it is not installed."""
SECONDS = 480.0
ON_CPU_SLOWER = 10
"""Limits are those of a machine with a GPU that nobody else uses; a CPU may be anybody's."""
_GRACE_SECONDS = 5.0
"""For a part that is told to end: `rljob run` ends Ray then."""

State = Literal["measured", "failed", "killed", "not measured"]


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """What became of a part; ``reason`` says why it is not measured, or how it failed."""

    state: State
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    reason: str = ""

    @property
    def is_fine(self) -> bool:
        return self.state == "not measured" or (
            self.state == "measured" and all(figure.met is not False for figure in self.figures)
        )


def run(name: str, seconds: float, device: str, cache: Path, python: str = sys.executable) -> PartOutcome:
    """Runs one part and whatever it starts, for ``seconds`` at most."""
    with tempfile.TemporaryDirectory() as folder:
        written, printed = Path(folder, "figures"), Path(folder, "printed")
        command = [python, "-m", "benchmarks.gpu.part", name, "--write", str(written), "--device", device,
                   "--cache", str(cache)]  # fmt: skip
        environment = peer_environment(1 if device == "cpu" else 4, PYTHONPATH=IMPORTABLE)
        started = time.monotonic()
        with printed.open("w") as output:
            # A session of its own: what a part has started ends with it.
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        took = time.monotonic() - started
        end = "\n".join(printed.read_text(errors="replace").splitlines()[-25:])
        if code is None:
            return PartOutcome(
                "killed", took, read(written), f"did not end within {seconds:.0f} s; it printed last:\n{end}"
            )
        if code:
            return PartOutcome("failed", took, read(written), f"exit code {code}:\n{end}")
        return PartOutcome("measured", took, read(written))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a part's session, politely at first."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check(names: list[str], device: str, cache: Path, results: Path, seconds: float) -> dict[str, PartOutcome]:
    """Measures the parts one after the other, and writes everything down after each."""
    machine, outcomes = Hardware.here(), dict[str, PartOutcome]()
    cache.mkdir(parents=True, exist_ok=True)
    gpus = gpu_count(sys.executable) if device == "cuda" else 0
    slower = ON_CPU_SLOWER if device == "cpu" else 1
    seconds *= slower
    deadline = time.monotonic() + seconds
    for name in names:
        part = BY_NAME[name]
        limit, left = part.seconds * slower, deadline - time.monotonic()
        lack = lacking(part, device, gpus, cache)
        if lack is None and left < limit / 2:
            lack = f"no time was left of {seconds:.0f} s: `--only {name}`"
        if lack is not None:
            outcomes[name] = PartOutcome("not measured", reason=lack)
        else:
            print(f"{name}: {part.what}, {limit} s at most", flush=True)
            outcomes[name] = run(name, min(limit, left), device, cache)
            print(f"{name}: {outcomes[name].state} in {outcomes[name].seconds:.0f} s", flush=True)
        write(results, device, machine, outcomes)
    return outcomes


def write(results: Path, device: str, machine: Hardware, outcomes: Mapping[str, PartOutcome]) -> None:
    """``gpu.json`` with everything and ``gpu.md`` with the table; each whole or as it was."""
    results.mkdir(parents=True, exist_ok=True)
    name = "gpu" if device == "cuda" else "gpu_on_cpu"
    whole = {"machine": machine.to_json(), "results": plain(outcomes)}
    texts = {"json": json.dumps(whole, indent=1) + "\n", "md": f"{show(outcomes)}\n{machine.sentence()}.\n"}
    for suffix, text in texts.items():
        begun = results / f"{name}.{suffix}.begun"
        begun.write_text(text)
        begun.rename(results / f"{name}.{suffix}")


def show(outcomes: Mapping[str, PartOutcome]) -> str:
    """The table of figures, and below it every part without them and why."""
    words = {True: "yes", False: "**no**", None: ""}
    rows = [
        [figure.name, part, f"{figure.value:.4g} {figure.unit}".rstrip(), figure.goal, words[figure.met]]
        for part, outcome in outcomes.items()
        for figure in outcome.figures
    ]
    tables = table(["figure", "part", "value", "goal", "met"], rows)
    rest = [
        f"- {part}: {outcome.state}: {outcome.reason}"
        for part, outcome in outcomes.items()
        if outcome.state != "measured"
    ]
    return "\n".join([tables, *rest, ""])


def chosen(only: list[str] | None, device: str) -> list[str]:
    """The parts to look at: all on a GPU, those that a CPU can run on a CPU."""
    if only:
        return [part.name for part in PARTS if part.name in only]
    return [part.name for part in PARTS if device == "cuda" or part.on_cpu]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BY_NAME, nargs="+", help="default: all that the device allows")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a small model")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where environments and models are kept")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    asked = parser.parse_args()
    # Whoever ends the command ends the part that is running, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcomes = check(chosen(asked.only, asked.device), asked.device, asked.cache, asked.results, asked.seconds)
    print(f"\n{show(outcomes)}")
    # A part that was asked for by name and cannot be measured is a failure, too.
    missed = asked.only and any(outcome.state == "not measured" for outcome in outcomes.values())
    sys.exit(0 if all(outcome.is_fine for outcome in outcomes.values()) and not missed else 1)


if __name__ == "__main__":
    main()
