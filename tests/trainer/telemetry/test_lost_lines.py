"""A record that has lost lines says so when the run goes on, and keeps those that are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_trainer.telemetry.sinks import JsonlSink


def line(step: int) -> str:
    return json.dumps({"step": step, "reward/mean": 0.5}) + "\n"


def steps_of(path: Path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "kept", "said"),
    [
        (line(1) + line(2), [1, 2], "has lost the lines of 2 of the 4 steps before the checkpoint (3, 4)"),
        (line(1) + line(4), [1, 4], "has lost the lines of 2 of the 4 steps before the checkpoint (2, 3)"),
        (line(1) + '{"step": 2, "re\n' + line(3) + line(4) + line(5), [1, 3, 4], "lines of 1 of the 4 steps"),
        ("", [], "has lost the lines of 4 of the 4 steps before the checkpoint (1, 2, 3, 4)"),
    ],
    ids=["at the end", "in the middle", "torn", "all"],
)
def test_lost_lines_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, kept: list[int], said: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    JsonlSink(tmp_path, restored_step=4).close()
    assert said in caplog.text
    assert steps_of(path) == kept


def test_a_whole_record_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(line, range(6))))
    JsonlSink(tmp_path, restored_step=4).close()
    assert caplog.text == ""
    assert steps_of(path) == [0, 1, 2, 3, 4]
