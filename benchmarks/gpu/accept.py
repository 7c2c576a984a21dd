"""Does a known result come out on one GPU of 80 GB? An hour; models from a folder, no network: `make gpu-accept`.

.venv/bin/python -m benchmarks.gpu.accept --models FOLDER

FOLDER holds `Qwen2.5-0.5B-Instruct` and `Qwen3-0.6B` as Hugging Face folders. PPO with examples/gsm8k.yaml, the setting
of verl's published example, has to end at 56.7 +- 1.5 % of GSM8K's test set. GRPO at Qwen3-0.6B gives tokens/s.

What the two runs print is shown and kept (`RUN.log`) beside their folders, in ~/.cache/rljob/gpu-accept or where --runs
says. Ctrl-C, SIGTERM or a lost connection ends the run, which saves first, and gives exit code 130. The same command
goes on: a run from its last checkpoint, and one that has ended on this card and commit is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from benchmarks.environments import DEFAULT_CACHE, ROOT, peer_environment
from benchmarks.gpu.baseline import KeptBaseline
from benchmarks.gpu.ending import ENDED_BY, INTERRUPTED, end, guarded
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.parts import gpu_count, no_gpu
from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.rljob_run import RLJOB, Run, RunFailedError, read_run

HERE = Path(__file__).parent
EXAMPLE = ROOT / "examples" / "gsm8k.yaml"
PUBLISHED, SPREAD = 0.567, 0.015
PPO: Mapping[str, Any] = {
    "placement": "colocated",
    "rollout.gpusPerReplica": "null",
    "rollout.engineArgs.gpu_memory_utilization": 0.4,
}
"""The example has a GPU for the engine and one for the learner; on one the result is the same."""
GRPO: Mapping[str, Any] = {
    "data.train.source": ROOT / "examples" / "data" / "gsm8k" / "train.jsonl",
    "data.maxPromptTokens": 512,
}
WARM_UP, STEPS = 2, 12
_GRACE_SECONDS = 60.0
"""For a run that is told to end: it saves a checkpoint, within ten seconds where its storage is quick."""
_LOOKS_SECONDS = 0.2
_LAST_LINES_SECONDS = 10.0
"""For what is still in the pipe, which somebody that has left the run's session may hold open for ever."""
_received: list[int] = []
"""The signals that came."""
_TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"))
"""The files of a tokenizer, either of which are enough."""
QWEN25, QWEN3 = "Qwen2.5-0.5B-Instruct", "Qwen3-0.6B"


class AcceptInterruptedError(Exception):
    """A signal has ended a run."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One run and what is read from it."""

    name: str
    job: Path
    model: str
    settings: Mapping[str, Any]
    read: Callable[[Run], float]
    figure: Callable[[float], Figure]
    steps: int | None = None

    def measure(self, models: Path, runs: Path, commit: str) -> Figure:
        """Raises ``AcceptInterruptedError``, and ``RunFailedError`` if the run fails."""
        kept = KeptBaseline(f"accept-{self.name}")
        value = kept.read(runs)
        if isinstance(value, str):
            value = self.read(self._run(models, runs / f"{self.name}-{commit}"))
            kept.keep(runs, value)
        else:
            print(f"{self.name} has been run on this card and commit", flush=True)
        return self.figure(value)

    def _run(self, models: Path, folder: Path) -> Run:
        command = [str(RLJOB), "run", str(self.job), "--output", str(folder), "--resume", "auto"]
        if self.steps is not None:
            command.append(f"--steps={self.steps}")
        settings = {"model.source": models / self.model, **self.settings}
        command += [f"--set={path}={value}" for path, value in settings.items()]
        log = folder.with_name(f"{folder.name}.log")
        print(f"{self.name}: {folder}, and what it prints in {log}", flush=True)
        code = _watched(command, log)
        if code:
            raise RunFailedError(f"{self.name} ended with exit code {code}: see {log}")
        return read_run(folder)


def _watched(command: list[str], log: Path) -> int:
    """The exit code of a run whose lines are shown and appended to ``log``. It ends with this process, and when that is
    told to. Raises ``AcceptInterruptedError``."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=peer_environment(4),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )

    def copy() -> None:
        assert process.stdout is not None
        with log.open("ab") as kept:
            for line in process.stdout:
                kept.write(line)
                kept.flush()
                with suppress(OSError):  # a terminal that was closed
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()

    copying = threading.Thread(target=copy, daemon=True)
    with guarded(process):
        copying.start()
        try:
            while not _received and process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOKS_SECONDS)
        finally:
            end(process, _GRACE_SECONDS)
    copying.join(_LAST_LINES_SECONDS)
    if _received:
        raise AcceptInterruptedError
    return process.returncode


def _score(run: Run) -> float:
    """The last validation on GSM8K's test set."""
    return run.column("validation/gsm8k-test/mean@1")[-1]


def _rate(run: Run) -> float:
    """Tokens (prompts and responses) a second of the whole step."""
    return median(run.column("throughput/tokens_per_second")[WARM_UP:])


def _compared(score: float) -> Figure:
    met = abs(score - PUBLISHED) <= SPREAD
    return Figure("PPO on GSM8K, share of the test set", score, "", f"{PUBLISHED} +- {SPREAD}", met)


def _told(rate: float) -> Figure:
    return Figure("GRPO at Qwen3-0.6B", rate, "tokens/s")


ACCEPTANCES = (
    Acceptance("grpo", HERE / "job.yaml", QWEN3, GRPO, _rate, _told, STEPS),
    Acceptance("ppo", EXAMPLE, QWEN25, PPO, _score, _compared),
)


def lacking(models: Path) -> list[str]:
    """What of the models is missing, in words."""
    return [f"{models / name} has no {what}" for name in (QWEN25, QWEN3) for what in _absent(models / name)]


def _absent(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield "config.json"
    index = folder / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            yield f"{index.name} that can be read"
    yield from sorted(name for name in shards if not (folder / name).is_file())
    # The second is what the first is made from.
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        yield " and no ".join(" + ".join(names) for names in _TOKENIZERS)


def _problem(models: Path, runs: Path, results: Path) -> str | None:
    """Why there is nothing to begin with, and what to do; None: all is there. What was named comes first: it can be
    looked at before one is at the machine with the GPU."""
    if lacks := lacking(models):
        return f"{'; '.join(lacks)}: download both models from their hub into this folder, each under its name"
    if gpu_count(sys.executable) == 0:
        return no_gpu()
    if not os.access(RLJOB, os.X_OK):
        return f"there is no {RLJOB}: `make install ACCELERATOR=gpu` makes .venv with it"
    for option, folder in (("--runs", runs), ("--results", results)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            return f"nothing can be written into {folder}: {error.strerror or error}; choose another {option}"
    return None


def _forget(runs: Path, commit: str) -> None:
    for each in ACCEPTANCES:
        shutil.rmtree(runs / f"{each.name}-{commit}", ignore_errors=True)
        (runs / f"accept-{each.name}.json").unlink(missing_ok=True)


def _receive(number: int, frame: FrameType | None) -> None:
    _received.append(number)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="the folder with both models")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--runs", type=Path, default=DEFAULT_CACHE / "gpu-accept", help="where runs are kept")
    parser.add_argument("--anew", action="store_true", help="forget what has been run at this commit")
    asked = parser.parse_args(arguments)
    models, runs = asked.models.resolve(), asked.runs.resolve()
    if (problem := _problem(models, runs, asked.results)) is not None:
        sys.exit(problem)
    machine, figures = Hardware.here(), list[Figure]()
    onwards = "the same command goes on"
    if not machine.is_committed:
        print(f"the code is not known by its commit ({machine.commit}): nothing of earlier runs is used", flush=True)
        onwards = "the same command begins anew, until the code is committed"
    if asked.anew or not machine.is_committed:
        _forget(runs, machine.commit)
    for each in ENDED_BY:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup asks for
            signal.signal(each, _receive)
    for acceptance in ACCEPTANCES:
        try:
            figures.append(acceptance.measure(models, runs, machine.commit))
        except RunFailedError as error:
            sys.exit(str(error))
        except AcceptInterruptedError:
            with suppress(OSError):
                print(f"{acceptance.name} was interrupted; {onwards}", flush=True)
            sys.exit(INTERRUPTED)
        rows = [[f.name, f"{f.value:.4g} {f.unit}".rstrip(), f.goal, {True: "yes", False: "**no**"}.get(f.met, "")]  # type: ignore[arg-type]
                for f in figures]  # fmt: skip
        write_results(asked.results, "accept", machine, figures, table(["figure", "value", "goal", "met"], rows))
    sys.exit(0 if all(figure.met is not False for figure in figures) else 1)


if __name__ == "__main__":
    main()
