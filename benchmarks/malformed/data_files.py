"""Malformed data files: good rows with one thing wrong, held against ``rljob validate`` and the start of a run.

``run(count, seed)`` makes so many of them, the same ones each time. A file is either refused before anything starts, by
a sentence that names it (and the line or row, where one is to blame), or a run takes a prompt from every row of it.
Some things only a tokenizer sees, which ``validate`` does not load: those are refused when the run starts. Anything
else is a fault: an exception that is not the product's own, one that asks for another try, a sentence without a place
or a remedy, a row that is silently lost.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api import Readable, RLJob, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFUSED, STARTS, AT_START, FAULT = "refused by validate", "accepted and starts", "refused at the start", "fault"

ROWS = 7
ODD: tuple[Any, ...] = (
    None, True, False, "", " ", "x" * 5000, "\0", "Fähre 🚢", 0, -1, 1.0, 1.5, 1e308,
    float("nan"), float("inf"), 10**400,
    [], [1], ["a"], {}, {"a": {"b": None}}, [[[[[1]]]]], [None],
    [{"role": "user", "content": "2+2?"}],
    [{"role": "user"}],
    [{"role": 1, "content": "a"}],
    [{"role": "user", "content": None}],
    [{"role": "tool", "content": "4"}],
    [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}],
    [{"role": "user", "content": "a"}, "b"],
)  # fmt: skip
TEMPLATE = "{% for message in messages %}{{ message.role + ': ' + message.content }}\n{% endfor %}"
"""Fails on content that is no text, as most templates do."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What became of one file."""

    number: int
    kind: str
    """What was done to it."""
    outcome: str
    says: str


def run(count: int, seed: int) -> list[FileRecord]:
    """The records of ``count`` files."""
    with tempfile.TemporaryDirectory(prefix="rljob-malformed-") as scratch:
        folder = Path(scratch)
        plain, chat = _tokenizer(folder / "plain", None), _tokenizer(folder / "chat", TEMPLATE)
        return [_one(number, seed, folder / "case", {"plain": plain, "chat": chat}) for number in range(count)]


def _tokenizer(folder: Path, template: str | None) -> PreTrainedTokenizerBase:
    """A model with a token for every byte, so that no text is unknown to it, and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from rljob_api.spec.model import Model
    from rljob_trainer.models import materialise
    from rljob_trainer.models.tokenizer import load_tokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate([*letters, "</s>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    own = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    own.save_pretrained(folder / "tokenizer")
    shape = {"hiddenSize": 32, "layers": 1, "heads": 1, "contextLength": 256}
    spec = {"random": {**shape, "tokenizer": {"source": str(folder / "tokenizer")}}}
    return load_tokenizer(materialise(Model.model_validate(spec), folder / "model").path)


def _one(number: int, seed: int, folder: Path, tokenizers: dict[str, PreTrainedTokenizerBase]) -> FileRecord:
    draw = random.Random(f"{seed} {number}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows: Rows = [
        {"question": f"{n}+{n}?", "answer": str(2 * n), "extra": {"level": n, "tags": ["a", "b"]}} for n in range(ROWS)
    ]
    kind = draw.choice(list(KINDS))
    file, done = KINDS[kind](folder, rows, draw)
    model = draw.choice(list(tokenizers))
    prompt = draw.choice(["question", "question", "question", "Add: {question}", "extra.level", "{extra.tags}"])
    outcome, says = _judged(folder, file, model, prompt, tokenizers[model])
    said = f"{kind}: {done}, {model}, {prompt}" if outcome == FAULT else kind
    return FileRecord(number, said, outcome, says.replace(str(folder), ""))


def _judged(folder: Path, file: Path, model: str, prompt: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    from rljob_trainer.data import training_feed, validation_sets
    from rljob_trainer.errors import RLJobError
    from rljob_trainer.preflight import preflight

    document = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"source": f"../{model}/model"},
            "data": {
                "train": {"source": f"./{file.name}"},
                "validation": [{"name": "held-out", "source": f"./{file.name}"}],
                "prompt": prompt,
                "answer": "answer",
                "maxPromptTokens": 128,
                "overlongPrompts": "truncate",
            },
            "reward": {"functions": [{"type": "exactMatch"}]},
            "algorithm": {"preset": "grpo"},
            "rollout": {"engine": "torch", "maxResponseTokens": 64},
            "stop": {"epochs": 1},
        },
    }
    job = RLJob.model_validate(document)
    try:
        if found := preflight(Readable(job), base=folder, code=[folder]):
            text = "\n".join(map(str, found))
            named = all(violation.path.startswith("spec.") and violation.remedy for violation in found)
            return (REFUSED if named and file.name in text else FAULT), text
        data = resolve(job).spec.data
        feed = training_feed(data, tokenizer, base=folder, epochs=1)
        prompts = []
        while (taken := feed.next()) is not None:
            prompts.append(taken)
        validation_sets(data, tokenizer, base=folder)
        whole = len(prompts) == len(feed) and all(prompt.token_ids for prompt in prompts)
        return (STARTS, "") if whole else (FAULT, f"{len(prompts)} prompts of {len(feed)} rows")
    except RLJobError as error:
        good = error.exit_code in (64, 65) and "; " in str(error) and file.name in str(error)
        return (AT_START if good else FAULT), f"{error.exit_code}: {error}"
    except BaseException:  # noqa: BLE001  the libraries' panics are no Exception
        return FAULT, traceback.format_exc()


def _lines(rows: Rows) -> list[bytes]:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    finally:
        sys.set_int_max_str_digits(limit)


def _json_value(folder: Path, rows: Rows, draw: random.Random) -> tuple[Path, str]:
    """One cell, or one column of all rows, has an odd value."""
    name, value = draw.choice(["question", "answer", "extra"]), draw.choice(ODD)
    changed = rows if draw.random() < 0.5 else [draw.choice(rows)]
    for row in changed:
        row[name] = value
    file = folder / draw.choice(["rows.jsonl", "rows.ndjson", "rows.json"])
    file.write_bytes(b"\n".join(_lines(rows)) + b"\n" * draw.randrange(3))
    return file, f"{len(changed)} of {name} = {repr(value)[:60]}"


def _json_columns(folder: Path, rows: Rows, draw: random.Random) -> tuple[Path, str]:
    """A column is missing, renamed, or more is there."""
    row = draw.choice(rows)
    way = draw.choice(["missing", "renamed", "empty row", "empty name", "long name", "all missing"])
    if way == "missing":
        del row["answer"]
    elif way == "renamed":
        row["Question"] = row.pop("question")
    elif way == "empty row":
        row.clear()
    elif way == "all missing":
        for each in rows:
            del each["answer"]
    else:
        row["" if way == "empty name" else "x" * 10_000] = 1
    file = folder / "rows.jsonl"
    file.write_bytes(b"\n".join(_lines(rows)))
    return file, way


def _json_lines(folder: Path, rows: Rows, draw: random.Random) -> tuple[Path, str]:
    """A line is no row."""
    lines = _lines(rows)
    odd = (
        b"", b" ", b"\t", b"\r", b"null", b"true", b"5", b'"text"', b"[]", b"[1]", b"{", b"}", b"{}", b"{'a': 1}",
        b"NaN",
        b"\0", b"\0" * 100, b"\xff\xfe", b"\xef\xbb\xbf{}", b"{" * 70_000, b"[" * 70_000, b"a,b,c",
        b'{"question": ' + b"[" * 80 + b"]" * 80 + b', "answer": "1"}',
        b'{"question": "1", "answer": ' + b'{"a":' * 80 + b"1" + b"}" * 80 + b"}",
        b'{"question": ' + b"7" * 9000 + b', "answer": "1"}',
        b'{"question": "1", "question": "2", "answer": "1"}',
        lines[0] + lines[1], lines[0] + b",", b"// a remark", lines[0] + b"\r",
        lines[0][: draw.randrange(len(lines[0]))],
    )  # fmt: skip
    at, line = draw.randrange(len(lines) + 1), draw.choice(odd)
    lines.insert(at, line)
    file = folder / "rows.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n" * draw.randrange(2))
    return file, f"line {at} is {line[:40]!r}"


def _json_bytes(folder: Path, rows: Rows, draw: random.Random) -> tuple[Path, str]:
    """The text's bytes are cut, turned, or in another encoding."""
    rows[3]["question"] = "Fähre: 3+3?"
    text = b"\n".join(_lines(rows))
    at = draw.randrange(len(text))
    ways = {
        "cut": text[:at],
        "empty": b"",
        "blank": b"\n\n \n",
        "flipped": text[:at] + bytes([text[at] ^ (1 << draw.randrange(8))]) + text[at + 1 :],
        "zeros": text[:at] + b"\0" * 8 + text[at:],
        "noise": text[:at] + draw.randbytes(8) + text[at:],
        "latin-1": text.decode().encode("latin-1"),
        "utf-16": text.decode().encode(draw.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32"])),
        "mark": b"\xef\xbb\xbf" + text,
        "other line ends": text.replace(b"\n", draw.choice([b"\r\n", b"\r", b"\n\n", b"\v", "\u2028".encode()])),
        "one array": b"[" + text.replace(b"\n", b",") + b"]",
        "compressed": gzip.compress(text),
    }
    way = draw.choice(list(ways))
    file = folder / "rows.jsonl"
    file.write_bytes(ways[way])
    return file, f"{way} at {at}"


def _parquet(folder: Path, rows: Rows, draw: random.Random) -> tuple[Path, str]:
    """Types, nulls and columns that a Parquet file may have, and a prompt may not."""
    import pyarrow
    import pyarrow.parquet

    column = draw.choice(["question", "answer", "extra"])
    texts = pyarrow.array([f"{n}?" for n in range(ROWS)])
    odd: dict[str, Any] = {
        "null": pyarrow.nulls(ROWS),
        "some null": pyarrow.array([None if n == draw.randrange(ROWS) else "a" for n in range(ROWS)], pyarrow.string()),
        "bytes": texts.cast(pyarrow.binary()),
        "no text": pyarrow.array([b"\xff\xfe"] * ROWS).view(pyarrow.string()),
        "times": pyarrow.array([2**60] * ROWS, pyarrow.timestamp("ms")),
        "dates": pyarrow.array([2**31 - 1] * ROWS, pyarrow.date32()),
        "decimals": pyarrow.array([1] * ROWS, pyarrow.decimal128(38, 2)),
        "lists": pyarrow.array([["a"]] * ROWS),
        "empty lists": pyarrow.array([[]] * ROWS, pyarrow.list_(pyarrow.int64())),
        "structs": pyarrow.array([{"a": {"b": 1}}] * ROWS),
        "maps": pyarrow.array([[("a", 1)]] * ROWS, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "words": texts.dictionary_encode(),
        "large": texts.cast(pyarrow.large_string()),
        "deep": _deep(draw.choice([20, 80])),
        "messages": pyarrow.array([[{"role": "user", "content": "a"}]] * ROWS),
        "tools": pyarrow.array([[{"role": "tool", "content": "a"}]] * ROWS),
    }
    kind = draw.choice(list(odd))
    columns: dict[str, Any] = {"question": texts, "answer": texts, "extra": texts, column: odd[kind]}
    names, arrays = list(columns), list(columns.values())
    way = draw.choice(["", "", "", "twice", "gone", "no rows"])
    if way == "twice":
        names[0] = names[1]
    elif way == "gone":
        del names[0], arrays[0]
    table = pyarrow.table(arrays, names=names)
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(table.slice(0, 0) if way == "no rows" else table, file)
    return file, f"{column} is {kind} {way}"


def _deep(levels: int) -> Any:
    import pyarrow

    kind, value = pyarrow.int64(), 1
    for _ in range(levels):
        kind, value = pyarrow.list_(kind), [value]  # type: ignore[assignment]
    return pyarrow.array([value] * ROWS, kind)


def _parquet_bytes(folder: Path, rows: Rows, draw: random.Random) -> tuple[Path, str]:
    """A Parquet file's bytes are cut or turned."""
    import pyarrow
    import pyarrow.parquet

    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({n: [str(row[n]) for row in rows] for n in ("question", "answer")}), file)
    data = file.read_bytes()
    at = draw.randrange(len(data))
    ways = {
        "cut": data[:at],
        "head cut": data[at:],
        "flipped": data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :],
        "zeros": data[:at] + b"\0" * 8 + data[at + 8 :],
        "noise": data[:at] + draw.randbytes(8) + data[at + 8 :],
        "text": b"\n".join(_lines(rows)),
        "empty": b"",
    }
    way = draw.choice(list(ways))
    file.write_bytes(ways[way])
    return file, f"{way} at {at}"


def _places(folder: Path, rows: Rows, draw: random.Random) -> tuple[Path, str]:
    """What is named is no file of rows."""
    way = draw.choice(
        ["csv", "folder", "folder of two", "saved to disk", "absent", "link to nothing", "a folder.jsonl"]
    )
    text = b"\n".join(_lines(rows))
    if way == "csv":
        file = folder / "rows.csv"
        file.write_bytes(b"question,answer\n1+1?,2\n")
    elif way in ("absent", "link to nothing"):
        file = folder / "rows.jsonl"
        if way == "link to nothing":
            file.symlink_to(folder / "nothing")
    else:
        file = folder / ("rows.jsonl" if way == "a folder.jsonl" else "rows")
        file.mkdir()
        if way == "folder of two":
            (file / "a.jsonl").write_bytes(text)
            (file / "b.jsonl").write_bytes(text if draw.random() < 0.3 else b'{"question": "1"}')
        elif way == "saved to disk":
            (file / draw.choice(["dataset_info.json", "dataset_dict.json"])).write_text(
                draw.choice(["", "{}", "[", "5"])
            )
    return file, way


KINDS: dict[str, Callable[[Path, Rows, random.Random], tuple[Path, str]]] = {
    "JSON Lines, a value": _json_value,
    "JSON Lines, columns": _json_columns,
    "JSON Lines, a line": _json_lines,
    "JSON Lines, bytes": _json_bytes,
    "Parquet, types and columns": _parquet,
    "Parquet, bytes": _parquet_bytes,
    "places": _places,
}
