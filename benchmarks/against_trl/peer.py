"""What both TRL trainers share: a stopwatch, the prompts, the command line. Runs in the peers' environments."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from benchmarks.against_trl.setting import Setting, write_steps
from benchmarks.measuring import Step


class StepStopwatch(TrainerCallback):
    """Seconds from the end of one step to the end of the next: nothing of the loop is left out."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *arguments: Any, **named: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        self.ends.append(time.perf_counter())

    def steps(self, tokens: Sequence[int], epochs: int) -> list[Step]:
        """One ``Step`` for each entry of ``tokens``, the response tokens of that step."""
        return [
            Step(seconds=end - start, generated=count, trained=count * epochs)
            for start, end, count in zip(self.ends[:-1], self.ends[1:], tokens, strict=True)
        ]


def questions(model_folder: Path) -> list[str]:
    return [json.loads(line)["question"] for line in (model_folder / "prompts.jsonl").read_text().splitlines()]


def main(train: Callable[[Setting, Path], list[Step]]) -> None:
    """``--setting JSON --model FOLDER --write FILE``: trains and writes what the steps took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", type=Setting.from_json, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--write", type=Path, required=True)
    arguments = parser.parse_args()
    write_steps(arguments.write, train(arguments.setting, arguments.model))
