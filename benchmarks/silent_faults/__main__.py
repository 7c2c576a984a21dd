"""``python -m benchmarks.silent_faults [--only NAME] [--fast]``: puts each fault into a run and reads what that says.

A fault counts as named when the first sentence that the run says after it, in the same step or the next, matches the
pattern that stands with the fault. A run without a fault must say nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.silent_faults.faults import FAULTS, Fault, prepare
from benchmarks.silent_faults.here import Watched, attempt, job

HERE = Path(__file__).parent
_USUAL = re.compile(r"^(resuming from the checkpoint|succeeded:|interrupted:|moved the files of an earlier run)")


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What became of one fault."""

    fault: str
    what: str
    named: bool
    sentence: str
    """The first that the run said after it; empty: none."""
    steps: int | None
    """From the fault to the sentence."""
    ended: str
    seconds: float
    would_take: str = ""


def sentences(watched: Watched) -> list[tuple[int, str]]:
    """What is no part of every run."""
    return [(step, text) for step, text in watched.said if not _USUAL.search(text)]


def put_in(fault: Fault) -> FaultOutcome:
    """Runs a job with the fault in it. Raises ``AssertionError`` when the fault did not come about."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="silent-faults-") as name:
        folder = Path(name)
        prepare(folder)
        watched = Watched()
        if fault.between is not None:
            attempt(job(stop={"steps": 2}, **fault.spec), folder, watched)
            assert watched.ended.startswith("succeeded"), watched.ended
            fault.between(folder)
            watched = Watched(step=2)
            watched.strike()
        attempt(job(stop={"steps": 3}, **fault.spec), folder, watched, fault.inject)
    assert watched.struck is not None, f"{fault.name} was not put in: {watched.ended}"
    heard = sentences(watched)
    step, sentence = heard[0] if heard else (None, "")
    steps = None if step is None else step - watched.struck
    named = steps is not None and steps <= 1 and re.search(fault.named, sentence, re.DOTALL) is not None
    return FaultOutcome(
        fault.name, fault.what, named, sentence, steps, watched.ended, round(time.monotonic() - began, 2),
        "" if named else fault.would_take,
    )  # fmt: skip


_ASYNC = {"mode": "fullyAsync", "syncEvery": 2, "staleness": {"maxAge": 2}}
SOUND: dict[str, dict[str, Any]] = {
    "sync": {},
    "oneStepOff": {"pipeline": {"mode": "oneStepOff"}},
    "fullyAsync, recompute": {
        "pipeline": {**_ASYNC, "partialRollout": "recompute"},
        "batch": {"samplesPerPrompt": 4, "miniBatchGroups": 4},
    },
    "fullyAsync, keepCache": {
        "pipeline": {**_ASYNC, "partialRollout": "keepCache"},
        "batch": {"samplesPerPrompt": 4, "miniBatchGroups": 4},
    },
    "ppo, a worker process": {
        "algorithm": {"preset": "ppo"},
        "reward": {"functions": [{"type": "custom", "function": "graded:graded"}], "workers": 1},
    },
    "muon, two epochs of few rows": {
        "trainer": {"optimizer": {"learningRate": 1e-3, "type": "muon"}},
        "data": {
            "train": {"task": {"type": "copy", "digits": 2, "size": 11}},
            "prompt": "question",
            "answer": "answer",
            "maxPromptTokens": 6,
        },
    },
}
"""Jobs that nothing is done to, each over an end and a resume."""


def false_alarms(sound: str) -> list[str]:
    """What a run says that nothing was done to, over its end and a resume."""
    with tempfile.TemporaryDirectory(prefix="silent-faults-") as name:
        folder = Path(name)
        prepare(folder)
        heard = []
        for steps in (2, 4):
            watched = Watched()
            attempt(job(**{**SOUND[sound], "stop": {"steps": steps}}), folder, watched)
            heard += [text for _, text in sentences(watched)]
    return heard


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.silent_faults", description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", default=[], choices=list(FAULTS))
    parser.add_argument("--fast", action="store_true", help="the faults of the shortened form only; writes no record")
    args = parser.parse_args()
    chosen = [f for f in FAULTS.values() if (not args.only or f.name in args.only) and (f.fast or not args.fast)]
    machine = Hardware.here()
    alarms = {name: told for name in SOUND if (told := false_alarms(name))} if not args.only else {}
    outcomes = []
    for fault in chosen:
        outcomes.append(put_in(fault))
        print(f"{'named ' if outcomes[-1].named else 'UNSEEN'} {fault.name}: {outcomes[-1].sentence}", flush=True)
    rows = [
        [o.fault, "yes" if o.named else "no", "-" if o.steps is None else str(o.steps), o.sentence[:160]]
        for o in outcomes
    ]
    text = table(["fault", "named", "steps", "sentence"], rows)
    named = sum(o.named for o in outcomes)
    print(f"\n{named} of {len(outcomes)} named; false alarms of {len(SOUND)} runs without a fault: {alarms or 'none'}")
    if not args.only and not args.fast:
        write_results(HERE / "results", "silent_faults", machine, {"outcomes": outcomes, "false_alarms": alarms}, text)
    return 1 if alarms or (named < len(outcomes) - sum(bool(f.would_take) for f in chosen)) else 0


if __name__ == "__main__":
    sys.exit(main())
