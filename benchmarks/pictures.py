"""Draws README's learning curves, docs/images/*.svg, from the records of the benchmarks.

.venv/bin/python -m benchmarks.pictures
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.environments import ROOT
from rljob_trainer.telemetry.svg import Axes, Series, line_chart

FOLDER = ROOT / "docs" / "images"
_AXES = Axes(from_zero=True, percent=True)


def pictures() -> dict[str, str]:
    """Each picture by the name of its file."""
    quick, real = _results("quickstart/results/curve.json"), _results("real_model/results/real_model.json")
    exact = Series("exact answers", quick["steps"], quick["accuracy"], markers=True)
    steps = range(1, real["steps"] + 1)
    learned = [Series("answers in the form", steps, real["reward"]), Series("right answers", steps, real["right"])]
    return {
        "quickstart.svg": line_chart([exact], _AXES, title="Held-out additions answered exactly", standalone=True),
        "real-model.svg": line_chart(learned, _AXES, title="GSM8K, reward for the form “#### number”", standalone=True),
    }


def _results(record: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((ROOT / "benchmarks" / record).read_text())["results"]
    return results


if __name__ == "__main__":
    for name, picture in pictures().items():
        (FOLDER / name).write_text(f"{picture}\n")
