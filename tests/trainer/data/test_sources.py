"""Rows from files, folders and Hugging Face data sets; damaged ones are refused with file, line and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rljob_trainer.data.columns import column
from rljob_trainer.data.sources import JsonLines, open_rows
from rljob_trainer.errors import DataError
from rljob_trainer.storage.bucket import ObjectBucket

ROWS = [{"question": f"What is {i}?", "answer": str(i)} for i in range(5)]


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_columns_and_places(tmp_path: Path, suffix: str) -> None:
    write = write_jsonl if suffix == "jsonl" else write_parquet
    path = write(tmp_path / f"data.{suffix}")
    rows = open_rows(path.name, base=tmp_path)
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows.columns == ("question", "answer")
    assert rows.place(2) == (f"{path}, line 3" if suffix == "jsonl" else f"{path}, row 2")
    assert len(open_rows(str(path), limit=2)) == 2
    assert len(open_rows(str(path), limit=20)) == 5


def test_blank_lines_carriage_returns_and_a_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\n{"q": "a"}\r\n\r\n\n{"q": "\xc3\xa9"}')
    rows = JsonLines(path)
    assert [rows[i] for i in range(len(rows))] == [{"q": "a"}, {"q": "é"}]
    assert [rows.place(i) for i in range(2)] == [f"{path}, line 2", f"{path}, line 5"]


def test_several_files_are_one_source_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "part-2.jsonl", ROWS[3:])
    write_parquet(tmp_path / "part-1.parquet", ROWS[:3])
    rows = open_rows("part-*", base=tmp_path)
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows.place(3) == f"{tmp_path / 'part-2.jsonl'}, line 1"
    write_jsonl(tmp_path / "part-3.jsonl", [{"other": 1}])
    with pytest.raises(DataError, match=r"part-3.jsonl has the columns other, but .*part-1.parquet has question"):
        open_rows("part-*", base=tmp_path)


def test_a_folder_gives_the_files_of_its_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "test.jsonl", ROWS[2:])
    (tmp_path / "README.md").write_text("about")
    assert len(open_rows(str(tmp_path), split="train")) == 2
    assert len(open_rows(str(tmp_path))) == 5
    with pytest.raises(DataError, match="whose names begin with 'dev'"):
        open_rows(str(tmp_path), split="dev")


def test_a_truncated_file_names_the_line_where_it_breaks_off(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"data.jsonl, line 5: the file ends in the middle .*; copy or download") as e:
        open_rows(str(path))
    assert '{"question": "What is 4' in str(e.value).replace("\\", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'question': 1}", "line 3: not valid JSON .*; correct the line or remove it"),
        ('["a"]', "line 3: a line must contain one JSON object, not a list"),
        ('"a"', "line 3: a line must contain one JSON object, not a str"),
        ("\udcff", "line 3: the text is not UTF-8"),
        ("[" * 100_000, "line 3: its columns are nested more than 64 levels deep; flatten the row or remove it"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_jsonl(tmp_path / "data.jsonl")
    lines = path.read_bytes().splitlines()
    lines[2] = line.encode(errors="surrogateescape")
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=message):
        open_rows(str(path))


def test_a_large_file_is_checked_at_its_ends_when_opened_and_elsewhere_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_trainer.data.sources.CHECKED_BYTES", 100)
    monkeypatch.setattr("rljob_trainer.data.sources.CHECKED_ROWS", 2)
    path = write_jsonl(tmp_path / "data.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "broken", *lines[3:]]))
    rows = open_rows(str(path))
    assert rows[3] == ROWS[3]
    with pytest.raises(DataError, match="line 3"):
        rows[2]
    path.write_text("\n".join([*lines, "broken"]))
    with pytest.raises(DataError, match="line 6"):
        open_rows(str(path))
    path.write_text("\n".join([lines[0], "broken", *lines[2:]]))
    with pytest.raises(DataError, match="line 2"):
        open_rows(str(path))
    # Rows may be so long that the first two are too much.
    monkeypatch.setattr("rljob_trainer.data.sources.CHECKED_BYTES", 20)
    assert open_rows(str(path))[0] == ROWS[0]


def test_a_row_without_a_column_of_the_first_row_is_known_when_a_file_is_opened(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [*ROWS, {"question": "?"}, {"answer": "!"}, {"question": "??"}])
    rows = open_rows(str(path))
    assert (rows.first_without("question"), rows.first_without("answer")) == (6, 5)
    assert rows.place(5) == f"{path}, line 6"
    # Columns that nobody needs may come and go; rows beyond the limit are not used.
    limited = open_rows(str(path), limit=6)
    assert (limited.first_without("question"), limited.first_without("answer")) == (None, 5)
    write_jsonl(tmp_path / "also.jsonl")
    several = open_rows("*.jsonl", base=tmp_path)
    assert several.first_without("answer") == len(ROWS) + 5
    assert several.place(len(ROWS) + 5) == f"{path}, line 6"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_without_a_column_inside_another_is_known_too(tmp_path: Path, suffix: str) -> None:
    write = write_jsonl if suffix == "jsonl" else write_parquet
    inner = {"reward": {"truth": "1"}}
    assert open_rows(str(write(tmp_path / f"a.{suffix}", [inner] * 3))).first_without("reward.truth") is None
    rows = open_rows(str(write(tmp_path / f"b.{suffix}", [inner, inner, {"reward": None}, inner])))
    assert rows.first_without("reward.truth") == 2
    assert rows.first_without("reward") is None


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_in_which_a_column_is_null_is_known_when_a_file_is_opened(tmp_path: Path, suffix: str) -> None:
    write = write_jsonl if suffix == "jsonl" else write_parquet
    nulls = [{"question": "?", "answer": None}, {"question": None, "answer": "!"}, {"question": None, "answer": "!"}]
    path = write(tmp_path / f"data.{suffix}", [*ROWS, *nulls])
    rows = open_rows(str(path))
    assert (rows.first_null("question"), rows.first_null("answer")) == (6, 5)
    limited = open_rows(str(path), limit=6)
    assert (limited.first_null("question"), limited.first_null("answer")) == (None, 5)
    write(tmp_path / f"also.{suffix}")
    several = open_rows(f"*.{suffix}", base=tmp_path)
    assert several.first_null("question") == len(ROWS) + 6
    inner = [{"reward": {"truth": "1"}}, {"reward": {"truth": None}}]
    assert open_rows(str(write(tmp_path / f"inner.{suffix}", inner))).first_null("reward.truth") == 1
    assert open_rows(str(write(tmp_path / f"inner.{suffix}", inner))).first_null("reward") is None


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_nan_is_an_empty_cell_and_never_the_word_nan(tmp_path: Path, suffix: str) -> None:
    write = write_jsonl if suffix == "jsonl" else write_parquet
    path = write(tmp_path / f"data.{suffix}", [{"answer": 1.5}, {"answer": 2.0}, {"answer": float("nan")}])
    rows = open_rows(str(path))
    assert rows.first_null("answer") == 2
    assert [column(rows[index], "answer") for index in range(3)] == [1.5, 2.0, None]
    whole = open_rows(str(write(tmp_path / f"whole.{suffix}", [{"answer": 1.5}])))
    assert whole.first_null("answer") is None


def test_of_a_large_file_the_first_rows_and_the_last_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_trainer.data.sources.CHECKED_BYTES", 100)
    monkeypatch.setattr("rljob_trainer.data.sources.CHECKED_ROWS", 2)
    lacking = {"question": "?"}
    for index, known in ((1, True), (2, False), (4, True)):
        path = write_jsonl(tmp_path / f"{index}.jsonl", [*ROWS[:index], lacking, *ROWS[index + 1 :]])
        assert open_rows(str(path)).first_without("answer") == (index if known else None)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-20], lambda b: b[:30] + b"\0" * 60 + b[90:], lambda b: b"not parquet"]
)
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, damage: Any) -> None:
    path = write_parquet(tmp_path / "data.parquet")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"data.parquet cannot be read as Parquet .*; copy or download the file again"):
        open_rows(str(path))


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"\n\n", "only empty lines"), (b"\r\n\r\n", "only empty lines")]
)
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_rows("data.jsonl", base=tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", r"spec.data.train.source: there is no file .*missing.jsonl"),
        ("inner/missing.jsonl", r"inner/missing.jsonl; check the path \(relative ones start at [^()]*(?<!inner)\)"),
        ("./missing", "there is no file"),
        ("missing-*.parquet", "there is no file"),
        ("data.csv", "is neither JSON Lines .* nor Parquet"),
        ("pvc://claim/data.jsonl", "a volume of the cluster"),
        ("nonsense://bucket/data.jsonl", "cannot be read"),
    ],
)
def test_a_source_that_is_not_there_is_refused(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=message):
        open_rows(source, base=tmp_path, field="spec.data.train.source")


def test_a_remote_file_comes_through_fsspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    with fsspec.open("memory://rows/data.jsonl", "wb") as file:
        file.write(b'{"q": "a"}\n')
    monkeypatch.chdir(tmp_path)
    first = open_rows("memory://rows/data.jsonl")
    assert first[0] == {"q": "a"}
    # Another file may have the same name.
    with fsspec.open("memory://rows/other/data.jsonl", "wb") as file:
        file.write(b'{"q": "b"}\n')
    assert open_rows("memory://rows/other/data.jsonl")[0] == {"q": "b"}
    assert open_rows("memory://rows/data.jsonl")[0] == first[0] == {"q": "a"}


def test_a_file_in_a_bucket(object_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = ObjectBucket(object_store.place())
    bucket.write("data.jsonl", b'{"q": "a"}\n')
    monkeypatch.chdir(tmp_path)
    assert open_rows(f"{bucket}/data.jsonl")[0] == {"q": "a"}
    with pytest.raises(DataError, match=r"other.jsonl cannot be read"):
        open_rows(f"{bucket}/other.jsonl")


def test_data_sets_saved_by_the_datasets_library(tmp_path: Path) -> None:
    saved = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    saved.save_to_disk(tmp_path / "both")
    saved["test"].save_to_disk(tmp_path / "one")
    both = open_rows("both", base=tmp_path)
    assert [both[i] for i in range(len(both))] == ROWS
    assert both.columns == ("question", "answer")
    assert len(open_rows("both", base=tmp_path, split="test")) == 1
    assert len(open_rows("one", base=tmp_path)) == 1
    with pytest.raises(DataError, match=r"has no split 'dev'; it has train, test"):
        open_rows("both", base=tmp_path, split="dev")


def test_a_hub_name_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for source in ("hf://nobody/nothing:main", "nobody/nothing"):
        with pytest.raises(DataError, match=r"(?s)nobody/nothing.*HF_HUB_OFFLINE=1"):
            open_rows(source, base=tmp_path)


GOOD = b'{"question": "1+1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (GOOD + '{"question": "Fähre?", "answer": "2"}\n'.encode("latin-1"), "line 2: the text is not UTF-8 (byte 15"),
        (GOOD + b'{"question": "\xed\xa0\x80", "answer": "2"}\n', "line 2: the text is not UTF-8 (byte 14"),
        (GOOD.decode().encode("utf-16"), "is UTF-16 text, but JSON Lines must be UTF-8; save it as UTF-8"),
        (GOOD + b'{"question": "a\0b", "answer": "2"}\n', "line 2: not valid JSON"),
        (GOOD.replace(b"\n", b"\r") * 2, "line 1: lines end with carriage returns only"),
        (GOOD + b'{"question": "a", "answer": "2", "question": "b"}\n', "line 2: the name 'question' appears twice"),
        (GOOD + b'{"question": "a", "of": {"x": 1, "x": 2}}\n', "line 2: the name 'x' appears twice in one object"),
        (GOOD + b"\0" * 40, "line 2: the file ends in the middle of a JSON object"),
        (GOOD + b'{"question": %s}\n' % (b"9" * 5000), "line 2: an integer has more than 4300 digits; shorten"),
        (
            GOOD + b'{"question": %s1%s}\n' % (b"[" * 70, b"]" * 70),
            "line 2: its columns are nested more than 64 levels",
        ),
        (
            GOOD + b'{"question": %s1%s}\n' % (b"[" * 9999, b"]" * 9999),
            "line 2: its columns are nested more than 64 le",
        ),
    ],
)
def test_text_that_is_no_row_is_named_with_its_line(content: bytes, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError) as raised:
        open_rows(str(file))
    assert str(raised.value).startswith(str(file))
    assert problem in str(raised.value)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD + GOOD)
    assert [dict(row) for row in map(open_rows(str(file)).__getitem__, range(2))] == [json.loads(GOOD)] * 2


def test_many_brackets_side_by_side_are_not_deep(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": [[1]] * 100}) + "\n")
    assert len(open_rows(str(file))[0]["question"]) == 100


def test_a_line_of_gigabytes_is_refused_without_being_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    with file.open("wb") as out:
        out.write(GOOD)
        out.truncate(200_000_000)  # a hole: the rest of the file is one line of zeros
    with pytest.raises(DataError, match=r"line 2: the line has 200 MB, more than the 67 allowed for a row"):
        open_rows(str(file))


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    import pyarrow

    text = pyarrow.array([b"a", b"\xff\xfe"]).cast(pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"question": text}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet cannot be read as Parquet .*UTF.?8"):
        open_rows(str(tmp_path / "rows.parquet"))


def test_a_data_set_on_disk_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot be read as a saved data set .*copy the folder again"):
        open_rows(str(tmp_path))
