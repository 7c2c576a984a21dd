"""summary.json comes back as it was written; validation remembers first, last and best."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from rljob_trainer.errors import DataError, OutputError
from rljob_trainer.telemetry.sinks import open_sinks
from rljob_trainer.telemetry.summary import Summary, ValidationHistory, describe_machine, package_versions

START = datetime.datetime(2026, 11, 21, 6, 0, tzinfo=datetime.UTC)


def a_summary() -> Summary:
    history = ValidationHistory()
    history.add(0, {"validation/gsm8k/mean@8": 0.1, "reward/mean": 9.0})
    history.add(10, {"validation/gsm8k/mean@8": 0.6, "validation/gsm8k/maj@8/mean": 0.7, "validation/mean": 0.6})
    history.add(20, {"validation/gsm8k/mean@8": 0.5})
    return Summary(
        outcome="interrupted",
        reason="SIGINT",
        job="gsm8k",
        started_at=START,
        ended_at=START + datetime.timedelta(seconds=90),
        seconds=90.5,
        steps=20,
        version=21,
        seconds_by_stage={"generate": 60.25},
        validation=history.by_source(),
        packages=package_versions(),
        machine=describe_machine(["NVIDIA H200"]),
    )


def test_round_trip(tmp_path: Path) -> None:
    written = a_summary()
    path = written.write(tmp_path)
    assert path.name == "summary.json"
    assert Summary.read(tmp_path) == written
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]  # nothing half-written is left behind


def test_the_file_is_plain_json_that_scripts_can_read(tmp_path: Path) -> None:
    a_summary().write(tmp_path)
    read = json.loads((tmp_path / "summary.json").read_text())
    assert read["outcome"] == "interrupted"
    assert read["started_at"] == "2026-11-21T06:00:00Z"
    assert read["validation"]["gsm8k"]["mean@8"] == {
        "first": {"step": 0, "value": 0.1},
        "last": {"step": 20, "value": 0.5},
        "best": {"step": 10, "value": 0.6},
    }
    assert read["validation"]["gsm8k"]["maj@8/mean"]["best"] == {"step": 10, "value": 0.7}
    assert read["validation"][""] == {"mean": {k: {"step": 10, "value": 0.6} for k in ("first", "last", "best")}}
    assert read["machine"]["devices"] == ["NVIDIA H200"]
    assert read["machine"]["cores"] >= 1
    assert read["packages"]["python"].startswith("3.")


def test_a_summary_of_a_later_version_is_still_read(tmp_path: Path) -> None:
    a_summary().write(tmp_path)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"news": 1}))
    assert Summary.read(tmp_path) == a_summary()


def test_the_best_is_the_earliest_of_equals_and_nan_is_no_value() -> None:
    history = ValidationHistory()
    for step, value in ((1, math.nan), (2, 0.5), (3, 0.5), (4, math.inf)):
        history.add(step, {"validation/a/mean@1": value})
    (result,) = history.by_source()["a"].values()
    assert (result.first.step, result.best.step, result.last.step) == (2, 2, 3)


def test_history_continues_from_the_metrics_of_a_resumed_run(tmp_path: Path) -> None:
    with open_sinks(tmp_path, tensorboard=False) as sinks:
        sinks.step(1, {"validation/a/mean@1": 0.9})
        sinks.step(2, {"validation/a/mean@1": math.nan})
    history = ValidationHistory.read(tmp_path)
    history.add(3, {"validation/a/mean@1": 0.4})
    (result,) = history.by_source()["a"].values()
    assert (result.first.value, result.best.step, result.last.step) == (0.9, 1, 3)


def test_an_unknown_outcome_is_refused() -> None:
    with pytest.raises(ValidationError):
        Summary.model_validate(a_summary().model_dump() | {"outcome": "fine"})


def test_a_missing_or_broken_summary_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"summary.json does not exist"):
        Summary.read(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(DataError, match=r"summary.json is not the summary of a run"):
        Summary.read(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*summary.json: .*--output"):
        a_summary().write(tmp_path / "file")
