"""The last steps of a timeline as a figure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rljob_trainer.errors import DataError
from rljob_trainer.telemetry.gantt import Bar, gantt_chart, last_steps
from rljob_trainer.telemetry.timing import Trace


def timeline(folder: Path, steps: int) -> Path:
    """Steps of 2 s: 1 s of waiting, an update, 0.2 s of publication, 1.5 s of sampling under each version."""
    trace = Trace()
    for step in range(steps):
        begin = 1000.0 + 2 * step
        trace.span("trainer", "generate", begin, begin + 1)
        trace.span("learner update", "update", begin + 1, begin + 1.8)
        trace.span("publication", "publish", begin + 1.8, begin + 2)
        trace.span("trainer", "step", begin, begin + 2)
        trace.span("engine 0", f"version {step}", begin, begin + 1.5)
    path = folder / "timeline.json"
    trace.write(path)
    return path


def test_the_last_steps_begin_at_nought(tmp_path: Path) -> None:
    bars = last_steps(timeline(tmp_path, 9), steps=3)
    assert {bar.row for bar in bars} == {"trainer", "learner update", "publication", "engine 0"}
    assert sorted(bar.name for bar in bars if bar.row == "engine 0") == ["version 6", "version 7", "version 8"]
    assert (min(bar.start for bar in bars), max(bar.end for bar in bars)) == (0.0, 6.0)


def test_a_figure_has_a_row_for_each_engine_and_bars_of_the_right_length(tmp_path: Path) -> None:
    chart = ElementTree.fromstring(gantt_chart(last_steps(timeline(tmp_path, 6))))
    bars = {bar.findtext("title"): bar for bar in chart.iter("rect") if bar.findtext("title")}
    assert "trainer: generate, 1 s" in bars
    assert "engine 0: version 3, 1.5 s" in bars
    assert not any("step," in str(title) for title in bars)
    long, short = (
        float(bars[name].get("width", 0)) for name in ("engine 0: version 3, 1.5 s", "trainer: generate, 1 s")
    )
    assert long == pytest.approx(1.5 * short, rel=1e-2)
    rows = [text.text for text in chart.iter("text") if text.get("text-anchor") == "end"]
    assert rows == ["trainer", "learner update", "publication", "engine 0"]


def test_many_engines_are_counted_and_names_are_escaped() -> None:
    bars = [Bar(f"engine {number}", "version 1", 0.0, 1.0) for number in range(40)] + [Bar("<b>", "x&y", 0.0, 1.0)]
    chart = gantt_chart(bars)
    assert "29 more rows are in timeline.json" in chart
    assert "<b>" not in chart
    assert len(re.findall("<title>", chart)) == 12


def test_a_file_that_is_no_timeline_is_named(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text(json.dumps({"events": []}))
    with pytest.raises(DataError, match="is not a timeline"):
        last_steps(tmp_path / "timeline.json")
