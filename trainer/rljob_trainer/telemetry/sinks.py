"""Where a run's metrics and samples are written: JSONL files, TensorBoard, and optionally W&B and MLflow.

    with open_sinks(folder, tensorboard=True, restored_step=None) as sinks:
        sinks.step(1, {"reward/mean": 0.25})
        sinks.samples(1, [SampleRow(source="gsm8k", prompt=..., response=..., score=1.0)])

``metrics.jsonl`` is the record the report is made of: one object a step, on disk before ``step`` returns, and after a
resume cut back to the restored step. A folder that cannot be written at the start is an ``OutputError``. A disk that
fills up later stops no training: lines wait in memory for room, samples are left out, TensorBoard's files end, the log
says so once, and only lines that still wait at the end are an error. A name that the catalogue does not list is an
``UnknownMetricError``. Trackers in the network live in ``trackers.py``.
"""

from __future__ import annotations

import datetime
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from rljob_trainer.errors import OutputError
from rljob_trainer.telemetry import run_folder
from rljob_trainer.telemetry.names import check_all
from rljob_trainer.telemetry.run_folder import SampleRow, finite, writing

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes what a run reports. Calls come one after the other, from any thread, steps in rising order."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Several sinks as one, and the place where metric names are checked."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._working = threading.Lock()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands one step's metrics to every sink. Raises ``UnknownMetricError`` before any of them is written."""
        check_all(metrics)
        plain = {name: float(value) for name, value in metrics.items()}
        with self._working:
            for sink in self._sinks:
                sink.step(step, plain)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        with self._working:
            for sink in self._sinks:
                sink.samples(step, rows)

    def close(self) -> None:
        """Closes every sink, also when one of them fails; the first failure is raised at the end."""
        failure: Exception | None = None
        with self._working:
            for sink in self._sinks:
                try:
                    sink.close()
                except Exception as problem:  # noqa: BLE001  (the other sinks must still be closed; re-raised below)
                    failure = failure or problem
        if failure is not None:
            raise failure

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonlSink:
    """``metrics.jsonl`` and ``samples/step-000010.jsonl`` in the output folder.

    ``restored_step`` is the step a resumed run continues from: what was written for later steps is removed, so that
    no step appears twice. Its own line is replaced when that step is told again. None starts a new record and removes
    the old one.
    """

    def __init__(self, folder: Path, restored_step: int | None = None) -> None:
        self._folder = folder
        self._path = folder / run_folder.METRICS
        self._restored_step = restored_step
        with writing(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_later_samples(folder, restored_step)
            if restored_step is not None:
                _tell_missing(self._path, _cut_back(self._path, restored_step), restored_step)
            # Unbuffered: what the disk did not take is known to the byte, and no line is written twice or torn.
            self._file: IO[bytes] = self._path.open("wb" if restored_step is None else "ab", buffering=0)
        self._unwritten = b""
        self._told = False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._restored_step:
            with writing(self._path):
                _cut_back(self._path, step - 1)
        record = {"step": step, "time": _now(), **finite(metrics)}
        self._unwritten += json.dumps(record).encode() + b"\n"
        try:
            self._write()
        except OutputError as problem:
            self._tell(f"{problem}; until then metrics are kept in memory")
        else:
            self._told = False

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        text = "".join(row.to_json() + "\n" for row in rows)
        try:
            with writing(self._folder):
                self._folder.stat()  # one that was removed is not made again
            run_folder.write_whole(run_folder.samples_path(self._folder, step), text)
        except OutputError as problem:
            self._tell(f"{problem}; the samples of step {step} are skipped")

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        with writing(self._path):
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _tell(self, text: str) -> None:
        if not self._told:
            _log.warning("%s", text)
        self._told = True


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _remove_later_samples(folder: Path, restored_step: int | None) -> None:
    for step, path in run_folder.sample_files(folder).items():
        if restored_step is None or step > restored_step:
            path.unlink()


def _cut_back(path: Path, restored_step: int) -> set[int]:
    """Removes the lines after ``restored_step`` and those that cannot be read; the rest stays byte for byte. Returns
    the steps that are there."""
    if not path.exists():
        return set()
    steps, kept, whole = set(), [], True
    with path.open("rb+") as file:
        for line in file:
            if line.endswith(b"\n") and _step_of(line) <= restored_step:
                kept.append((line, whole))
                steps.add(int(_step_of(line)))
            else:
                whole = False
        if all(before for _, before in kept):
            file.truncate(sum(len(line) for line, _ in kept))
            return steps
    run_folder.write_whole(path, b"".join(line for line, _ in kept).decode())
    return steps


def _tell_missing(path: Path, steps: set[int], restored_step: int) -> None:
    """A machine that lost its power, or a disk that was full when a run was killed, can have cost lines."""
    missing = sorted(set(range(1, restored_step + 1)) - steps)
    if missing:
        some = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
        _log.warning(
            "%s has lost the lines of %d of the %d steps before the checkpoint (%s): curves and report have a gap "
            "there; training is not affected",
            path,
            len(missing),
            restored_step,
            some,
        )


def _step_of(line: bytes) -> float:
    """The step of a line; a line that cannot be read counts as one to be removed."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class TensorBoardSink:
    """Scalars as TensorBoard event files, without torch or TensorFlow.

    After a resume TensorBoard is told to forget what earlier files say about later steps; a new run removes them.
    """

    def __init__(self, folder: Path, restored_step: int | None = None) -> None:
        # Imported here: it costs a fifth of a second and jobs may switch it off.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Callable[..., Any] = event_pb2.Event
        self._summary: Callable[..., Any] = summary_pb2.Summary
        self._session_log: Any = event_pb2.SessionLog
        self._folder = folder / run_folder.TENSORBOARD
        self._restored_step = restored_step
        self._ended = False
        with writing(self._folder):
            if restored_step is None:
                for path in self._folder.glob("events.out.tfevents.*"):
                    path.unlink()
            self._writer = EventFileWriter(str(self._folder), flush_secs=30)
            if restored_step is not None:
                self._forget_from(restored_step + 1)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._ended:
            return
        values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        try:
            if step == self._restored_step:
                self._forget_from(step)
            self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        except OSError as problem:
            # Its thread has ended with the first write that failed, and takes no more.
            self._ended = True
            text = "the TensorBoard files in %s end before step %d (%s); metrics.jsonl continues"
            _log.warning(text, self._folder, step, problem.strerror or problem)

    def _forget_from(self, step: int) -> None:
        start = self._session_log(status=self._session_log.START)
        self._add(self._event(wall_time=time.time(), step=step, session_log=start))

    def _add(self, event: Any) -> None:
        self._writer.add_event(event)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Samples are read in their own files."""

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()


def open_sinks(
    folder: Path,
    *,
    tensorboard: bool = True,
    restored_step: int | None = None,
    trackers: Sequence[Sink] = (),
) -> Sinks:
    """The sinks of a run: files in ``folder`` (made if need be), and the trackers opened by ``trackers.py``."""
    sinks: list[Sink] = [JsonlSink(folder, restored_step)]
    if tensorboard:
        sinks.append(TensorBoardSink(folder, restored_step))
    return Sinks([*sinks, *trackers])
