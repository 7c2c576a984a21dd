"""Half a character (a lone surrogate) is refused where it is read, and written as its escape where it was made."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.tiny_job import copy_job

from rljob_api.loading import load_jobs
from rljob_api.violations import JobInvalid
from rljob_trainer.cli import main
from rljob_trainer.control.standing import _short
from rljob_trainer.data.columns import column
from rljob_trainer.data.sources import open_rows
from rljob_trainer.data.tokenisation import PromptEncoder, PromptSettings
from rljob_trainer.driver.run import _described
from rljob_trainer.errors import DataError
from rljob_trainer.models.tokenizer import character_tokenizer
from rljob_trainer.telemetry.logs import logs_shown
from rljob_trainer.telemetry.plain import PlainView
from rljob_trainer.telemetry.report import write_report
from rljob_trainer.telemetry.run_folder import SampleRow, read_samples, samples_path, write_whole
from rljob_trainer.telemetry.sinks import open_sinks
from rljob_trainer.telemetry.trackers import MlflowSink, WandbSink
from rljob_trainer.texts import lone_surrogate, surrogate_within, writable

HALF = "half \ud83d of it"
ESCAPED = "half \\ud83d of it"
ROW = SampleRow(source="s", prompt=HALF, response=HALF, answer=HALF, prediction=HALF, score=1.0, finish="stop")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("plain", "plain"),
        ("é \U0001f600", "é \U0001f600"),
        (HALF, ESCAPED),
        ("\ude00\ud83d", "\\ude00\\ud83d"),
    ],
)
def test_a_text_that_can_be_written_is_itself_and_another_has_escapes(text: str, written: str) -> None:
    assert writable(text) == written
    assert written.encode("utf-8").decode("utf-8") == written
    assert (lone_surrogate(text) is None) == (text == written)


def test_the_place_of_half_a_character_is_found_in_nested_columns() -> None:
    row = {"id": 1, "chat": [{"role": "user", "content": "fine"}, {"role": "user", "content": HALF}]}
    assert surrogate_within(row) == ("chat[1].content", "\\ud83d")
    assert surrogate_within({"\ud83d": 1}) == ("\\ud83d", "\\ud83d")
    assert surrogate_within({"a": ["\U0001f600", None, 2.5]}) is None


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (rb'{"question": "half \ud83d", "answer": "1"}', "question"),
        (rb'{"question": "1", "answer": "\uDE00"}', "answer"),
        (rb'{"question": "1", "answer": "1", "meta": {"notes": ["\ude00\ud83d"]}}', "meta.notes[0]"),
    ],
)
def test_a_row_with_half_a_character_is_refused_with_file_line_and_column(
    line: bytes, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(rb'{"question": "\ud83d\ude00 whole \\ud83d", "answer": "2"}' + b"\n" + line + b"\n")
    with pytest.raises(DataError) as raised:
        open_rows(str(path))
    message = str(raised.value)
    assert message.startswith(f'{path}, line 2: the column "{name}" contains half a character (\\u')
    assert "correct it, or remove the row" in message


def test_whole_characters_and_what_only_looks_like_half_of_one_are_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(rb'{"question": "\ud83d\ude00 and \\ud83d"}' + b"\n" + '{"question": "한\U0001f600"}'.encode())
    rows = open_rows(str(path))
    assert [column(rows[i], "question") for i in range(2)] == ["\U0001f600 and \\ud83d", "한\U0001f600"]


def test_validate_says_where_half_a_character_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "1"}\n{"question": "\\ud83d"}\n')
    data = {"train": {"source": "data.jsonl"}, "prompt": "question", "maxPromptTokens": 6}
    job = copy_job(data=data, reward={"functions": [{"type": "length"}]})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert main(["validate", str(tmp_path / "job.yaml")]) != 0
    said = capsys.readouterr().out
    assert 'data.jsonl, line 2: the column "question" contains half a character' in said


@pytest.mark.parametrize(("prompt", "answer"), [(HALF, "1"), ("1", HALF)])
def test_rows_of_any_source_are_refused_before_the_tokenizer_sees_them(prompt: str, answer: str) -> None:
    encoder = PromptEncoder(character_tokenizer("1 ", 16), PromptSettings(prompt="q", answer="a"))
    with pytest.raises(DataError, match=r'^a set, row 3: the column ".*" contains half a character \(\\ud83d, '):
        encoder.encode([{"q": prompt, "a": answer}], ["a set, row 3"])


def test_a_job_file_with_half_a_character_is_refused_with_its_line() -> None:
    document: dict[str, Any] = copy_job()
    document["spec"]["reward"]["functions"][0]["name"] = "half"
    text = json.dumps(document, indent=1).replace('"half"', '"\\ud83d"')
    line = 1 + text[: text.index("\\ud83d")].count("\n")
    with pytest.raises(JobInvalid) as raised:
        load_jobs(text)
    assert f"line {line}" in str(raised.value)
    assert "\\ud83d is half a surrogate pair" in str(raised.value)


def test_a_character_that_json_writes_as_two_escapes_is_one_in_a_job_file() -> None:
    """So a job with an emoji reaches the driver in a cluster."""
    document: dict[str, Any] = copy_job()
    document["spec"]["data"]["prompt"] = "\U0001f600 {question}"
    (job,) = load_jobs(json.dumps(document, indent=1))
    assert job.spec.data.prompt == "\U0001f600 {question}"


def test_samples_are_written_and_read_with_escapes_and_so_is_the_report(tmp_path: Path) -> None:
    with open_sinks(tmp_path, tensorboard=False) as sinks:
        sinks.step(1, {"reward/mean": 1.0})
        sinks.samples(1, [ROW])
    (row,) = read_samples(samples_path(tmp_path, 1))
    assert (row.prompt, row.response, row.answer, row.prediction) == (ESCAPED,) * 4
    assert ESCAPED in write_report(tmp_path).read_text(encoding="utf-8")


def test_samples_of_an_older_run_that_hold_halves_can_be_reported(tmp_path: Path) -> None:
    with open_sinks(tmp_path, tensorboard=False) as sinks:
        sinks.step(1, {"reward/mean": 1.0})
    path = samples_path(tmp_path, 1)
    path.parent.mkdir()
    path.write_text(json.dumps({"source": "s", "prompt": HALF, "response": HALF, "score": 1.0}) + "\n")
    assert read_samples(path)[0].prompt == ESCAPED
    write_report(tmp_path)


def test_any_whole_file_takes_any_text(tmp_path: Path) -> None:
    write_whole(tmp_path / "status.json", HALF)
    assert (tmp_path / "status.json").read_text(encoding="utf-8") == ESCAPED


def test_samples_reach_the_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    if importlib.util.find_spec("wandb"):
        monkeypatch.setenv("WANDB_MODE", "offline")
        sink = WandbSink(tmp_path, project="p", name="n", warn=said.append)
        sink.samples(1, [ROW])
        sink.close()
    if importlib.util.find_spec("mlflow"):
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (tmp_path / "store").as_uri()
        other = MlflowSink(tmp_path / "run", experiment="e", name="n", tracking_uri=uri, warn=said.append)
        other.samples(1, [ROW])
        other.close()
    assert said == []


def test_a_log_line_reaches_a_terminal_that_takes_utf_8_only() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    with logs_shown(PlainView(stream)):
        logging.getLogger("rljob_trainer").warning("prediction %s", HALF)
    stream.seek(0)
    assert ESCAPED in stream.read()


def test_the_reason_of_an_end_can_be_told() -> None:
    assert _described(ValueError(HALF)) == f"ValueError: {ESCAPED}"
    assert _short(HALF) == ESCAPED
