"""Malformed data files and model folders are refused by a sentence before anything starts, or they work."""

from __future__ import annotations

from benchmarks.malformed import data_files, models


def test_no_data_file_ends_in_a_traceback_or_asks_for_another_try() -> None:
    records = data_files.run(100, seed=2026)
    assert [record for record in records if record.outcome == data_files.FAULT] == []
    assert {record.outcome for record in records} >= {data_files.REFUSED, data_files.STARTS}


def test_no_model_folder_ends_in_a_traceback_or_asks_for_another_try() -> None:
    records = models.run(100, seed=2026)
    assert [record for record in records if record.outcome == models.FAULT] == []
    assert {record.outcome for record in records} >= {models.REFUSED, models.STARTS}
    values = [record for record in records if record.kind == "safetensors, values"]
    assert {record.outcome for record in values} == {models.REFUSED}
