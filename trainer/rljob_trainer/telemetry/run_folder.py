"""The files a run leaves in its output folder: their names, and how to read them back.

Writing is done by ``sinks.py``, ``summary.py``, ``report`` and ``timing.py``; what all of them share is here.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rljob_trainer.errors import DataError, OutputError, lacks_room
from rljob_trainer.secret_values import masked
from rljob_trainer.texts import writable

JOB = "job.yaml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
TIMELINE = "timeline.json"
STATUS = "status.json"
SAMPLES = "samples"
EPISODES = "episodes"
JUDGES = "judges"
REWARD_MODELS = "reward_models.json"
TENSORBOARD = "tensorboard"

VALIDATION_STEP = "validation/step"
"""The metric that says which step's weights a validation beside training saw; without it, those of its line's step."""

_SAMPLE_FILE = re.compile(r"step-(\d+)\.jsonl")


_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One generated sample as it is written for people to read: here, in trackers and in the report.

    Keys and passwords are masked; lone surrogates, which none of them can hold, are escaped (``texts.writable``).
    """

    source: str
    prompt: str
    response: str
    score: float | None = None
    answer: str | None = None
    prediction: str | None = None
    correct: bool | None = None
    finish: str | None = None
    tokens: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    turns: Sequence[Mapping[str, str | float]] = ()
    """Of an episode of several turns, in order: ``by``, who spoke (``model``, ``environment``, or ``rewritten
    history``), and the ``text``; ``earned``, what of the score an answer has earned, where that is said."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, str):
                object.__setattr__(self, each.name, masked(writable(value)))
        if self.turns:
            turns = [{**turn, "text": masked(writable(str(turn["text"])))} for turn in self.turns]
            object.__setattr__(self, "turns", turns)

    def to_json(self) -> str:
        """One line of JSON; what is not known is left out."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        known = {name: value for name, value in values if value not in (None, {}, ())}
        try:
            return _STRICT.encode(known)
        except (TypeError, ValueError):  # a mapping that is no dict, a number that JSON has no word for
            return _STRICT.encode(finite(known))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an ``OSError`` inside into an ``OutputError`` that says which file, why, and what to do."""
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or str(problem)
        remedy = "choose another folder with --output"
        if lacks_room(problem):
            remedy = f"make room, make the folder writable, or {remedy}"
        elif problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = f"make the folder writable, or {remedy}"
        raise OutputError(f"cannot write {path}: {reason}; {remedy}") from problem


def write_whole(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in one move: a reader sees the old file or the new one.

    Lone surrogates are escaped. Raises ``OutputError``.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """``value`` with every number that JSON has no word for (NaN, infinities) as None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file. A last line that was cut off by a crash is left out; another bad line raises
    ``DataError`` with its number. A file that does not exist is empty."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as problem:
                if not line.endswith("\n"):
                    return
                what = f"{path}, line {number}: not JSON ({problem.msg}); repair or remove the line"
                raise DataError(what) from problem


def samples_path(folder: Path, step: int) -> Path:
    return folder / SAMPLES / f"step-{step:06d}.jsonl"


def sample_files(folder: Path) -> dict[int, Path]:
    """The sample files of a run by step, in order."""
    found = ((_SAMPLE_FILE.fullmatch(path.name), path) for path in (folder / SAMPLES).glob("step-*.jsonl"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def read_samples(path: Path) -> list[SampleRow]:
    """The rows of one sample file; fields of a later version are ignored."""
    known = set(SampleRow.__dataclass_fields__)
    return [SampleRow(**{name: value for name, value in row.items() if name in known}) for row in read_lines(path)]
