"""The records of all open episodes on a disk: appended by one thread, read back by the next process.

The log is a folder of segments, ``00000001.log`` and so on. A line is three little-endian integers of 32 bits (its
length without them, its CRC-32, the length of its header), the header in JSON, and the streams of a turn's tokens one
after the other. docs/episodes.md says what the log promises.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.receipts import Receipt
from rljob_trainer.episodes.record import CallPlace, EpisodeRecord, RecordedCall, RecordedTurn, What
from rljob_trainer.episodes.requests import BegunTurn
from rljob_trainer.episodes.tokens import Tokens, stream_types

_HEAD = struct.Struct("<III")
_FORMAT = 1
_SYNC_SECONDS = 0.5
"""Lines that come within so long reach the disk together."""
_log = logging.getLogger(__name__)


class CallLog(Protocol):
    """Where the calls of an episode that has begun are kept."""

    def put(self, id: EpisodeId, call: RecordedCall) -> None: ...

    def synced(self) -> Future[None]: ...


class Unrecorded:
    """The log of episodes that nobody goes on with."""

    def put(self, id: EpisodeId, call: RecordedCall) -> None:
        """Keeps nothing."""

    def synced(self) -> Future[None]:
        """Nothing is waited for."""
        done: Future[None] = Future()
        done.set_result(None)
        return done


class EpisodeLog:
    """Takes lines from one thread, and writes them in another. What could not be written (``OSError``) is raised from
    the next call."""

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20) -> None:
        """Reads what is there: ``records`` has every episode that is not over. Raises ``OSError``."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        folder.mkdir(exist_ok=True)
        before = sorted(folder.glob("*.log"))
        self.records: dict[EpisodeId, EpisodeRecord] = {}
        self._base: Base | None = None
        for path in before:
            self._base = _read(path, self.records) or self._base
        self._number = int(before[-1].stem) if before else 0
        self._old = before
        """Segments of earlier processes: what is open in them is written anew when this one begins to write."""
        self._of_segment: dict[Path, set[EpisodeId]] = {}
        """The open episodes that have lines in it; in order."""
        self._filled = 0
        self._work: queue.SimpleQueue[bytes | _Command] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._write, name="episode-log", daemon=True)
        self._thread.start()

    # --- what episodes do

    def begin(self, id: EpisodeId, program: str) -> EpisodeRecord:
        """An episode begins, or begins anew: what was recorded of it is forgotten."""
        self.records[id] = record = EpisodeRecord(program)
        self._put(id, _encoded(id, {"program": program}))
        return record

    def put(self, id: EpisodeId, call: RecordedCall) -> None:
        """A call of an episode that has begun: its intent, or its end."""
        self.records[id].put(call)
        self._put(id, _line(id, call))

    def over(self, id: EpisodeId) -> None:
        """An episode is trained or dropped: nobody will run it again."""
        if self.records.pop(id, None) is None:
            return
        self._put(id, _encoded(id, {"over": True}))
        for path, episodes in list(self._of_segment.items()):
            episodes.discard(id)
            if not episodes and path != self._current:
                del self._of_segment[path]
                self._work.put(_Command(remove=path))

    def synced(self) -> Future[None]:
        """Done when everything that was put before is on the disk."""
        self._check()
        command = _Command()
        self._work.put(command)
        return command.done

    def close(self) -> None:
        """Writes what is still to be written."""
        self._work.put(_Command(end=True))
        self._thread.join()
        self._check()

    # --- what a process does before its first episode

    def restore(
        self, open_prompts: Collection[int], next_ordinal: int, *, step: int, version: int, published_as: int
    ) -> dict[EpisodeId, BegunTurn]:
        """The run goes on from the checkpoint of ``step``, whose weights were ``version`` and are ``published_as``.

        Keeps the training records of ``open_prompts``, and of prompts from ``next_ordinal`` on, which were
        handed out after the checkpoint and will be again under the same numbers; what later weights made is
        forgotten, and the versions of the rest are moved, as those of kept tokens are. Returns what is left of
        turns that were cut, by the identity of the turn, as far as there is something.
        """
        left: dict[EpisodeId, BegunTurn] = {}
        known = self._in_here(step, version)
        if known is None:
            _log.warning("%s: written after step %d, where the run continues: episodes start over", self._folder, step)
            self.records = {}
        else:
            later = published_as - known
            self.records = {
                id: record
                for id, record in self.records.items()
                if id.purpose == TRAINING and (id.ordinal in open_prompts or id.ordinal >= next_ordinal)
            }
            for id, record in self.records.items():
                cut = record.cut(known + 1)
                record.later(later)
                if cut is not None and len(cut[1].tokens):
                    turn, begun = cut
                    left[id._replace(turn=turn)] = begun._replace(tokens=begun.tokens.later(later))
        self._base = Base(step, published_as)
        self._write_anew()
        return left

    def _write_anew(self) -> None:
        """All that is open into one segment, which is there whole or not at all, and takes the place of those before:
        numbers of two times in one log could not be told apart."""
        path = self._next_segment()
        beside = path.with_suffix(".new")
        with beside.open("wb") as file:
            file.write(_encoded(None, {"format": _FORMAT, "base": self._base, "anew": True}))
            for id, record in self.records.items():
                file.write(_encoded(id, {"program": record.program}))
                for call in record.calls.values():
                    file.write(_line(id, call))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        for old in self._old:
            old.unlink()
        self._old = []
        self._of_segment = {path: set(self.records)} if self.records else {}
        self._filled = self._segment_bytes  # the next line begins another one

    def _in_here(self, step: int, version: int) -> int | None:
        """The number of a checkpoint's weights in what is on record; None: it is not known any more.

        An earlier process that went on from the same checkpoint has moved the numbers already. A checkpoint from before
        the one that it went on from has numbers of a time that nothing on record is from.
        """
        if self._base is None or step > self._base.step:
            return version
        return self._base.published_as if step == self._base.step else None

    # --- the lines

    @property
    def _current(self) -> Path | None:
        return next(reversed(self._of_segment), None)

    def _put(self, id: EpisodeId, line: bytes) -> None:
        self._check()
        if self._current is None or self._filled + len(line) > self._segment_bytes:
            self._filled = 0
            path = self._next_segment()
            self._of_segment[path] = set()
            self._work.put(_Command(open=path))
            self._work.put(_encoded(None, {"format": _FORMAT, "base": self._base}))
        self._filled += len(line)
        if id in self.records:
            self._of_segment[self._current].add(id)  # type: ignore[index]
        self._work.put(line)

    def _next_segment(self) -> Path:
        self._number += 1
        return self._folder / f"{self._number:08}.log"

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write(self) -> None:
        """The thread. Lines go to the kernel at once, which outlives the process, and to the disk soon."""
        file: IO[bytes] | None = None
        due: float | None = None
        over = False
        while not over:
            items = self._next(due)
            asked = [item for item in items if isinstance(item, _Command)]
            # Who waits may be gone, or go from now on.
            commands = [command for command in asked if command.done.set_running_or_notify_cancel()]
            over = any(command.end for command in asked)
            try:
                for item in items if self._failure is None else ():
                    if isinstance(item, bytes):
                        assert file is not None
                        file.write(item)
                        due = due or time.monotonic() + _SYNC_SECONDS
                        continue
                    if item.remove is not None:
                        item.remove.unlink(missing_ok=True)
                    if item.open is not None:
                        _close(file)
                        file = item.open.open("ab")
                if file is not None and self._failure is None:
                    file.flush()
                    if commands or (due is not None and due <= time.monotonic()):
                        os.fsync(file.fileno())
                        due = None
                    if over:
                        file.close()
            except OSError as error:
                self._failure = error  # nothing is written any more: what follows could not be read past the gap
            if self._failure is not None:
                due = None
            for command in commands:
                if self._failure is None:
                    command.done.set_result(None)
                else:
                    command.done.set_exception(self._failure)

    def _next(self, due: float | None) -> list[bytes | _Command]:
        """What there is to do, at the latest when something is ``due``."""
        try:
            items = [self._work.get(timeout=None if due is None else max(0.0, due - time.monotonic()))]
        except queue.Empty:
            return []
        while not self._work.empty():
            items.append(self._work.get())
        return items


class Base(NamedTuple):
    """Where a process has gone on from: versions on record count from there."""

    step: int
    """Of the checkpoint."""
    published_as: int
    """The number of its weights from then on."""


class _Command:
    """What the thread does between two lines."""

    def __init__(self, *, open: Path | None = None, remove: Path | None = None, end: bool = False) -> None:
        self.open, self.remove, self.end = open, remove, end
        self.done: Future[None] = Future()


def _close(file: IO[bytes] | None) -> None:
    if file is not None:
        file.flush()
        os.fsync(file.fileno())
        file.close()


def _line(id: EpisodeId, call: RecordedCall) -> bytes:
    header: dict[str, Any] = {"branch": call.place.branch, "number": call.place.number, "what": call.what}
    if call.turn is not None:
        receipt = call.turn.receipt
        header |= {"finish": call.turn.finish, "seconds": call.turn.seconds}
        header |= {"receipt": None if receipt is None else receipt.to_json()}
        return _encoded(id, header, call.turn.tokens)
    return _encoded(id, header | ({"result": call.result, "seconds": call.seconds} if call.done else {}))


def _encoded(id: EpisodeId | None, header: Mapping[str, Any], tokens: Tokens | None = None) -> bytes:
    types = stream_types()
    streams = {} if tokens is None else tokens.streams()
    told = {**header, "id": id, "streams": {name: stream.shape for name, stream in streams.items()}}
    text = json.dumps(told).encode()
    body = b"".join([text, *(stream.astype(types[name], copy=False).tobytes() for name, stream in streams.items())])
    return _HEAD.pack(len(body), zlib.crc32(body), len(text)) + body


def _read(path: Path, records: dict[EpisodeId, EpisodeRecord]) -> Base | None:
    """Takes in a segment's lines, and returns its base. What a crash has left half written at its end is not there."""
    base: Base | None = None
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum, header = _HEAD.unpack(head)
            body = file.read(length)
            if len(body) < length or zlib.crc32(body) != checksum:
                _log.warning("%s: skipped an incomplete line before byte %d", path, file.tell())
                break
            told = json.loads(body[:header])
            if "format" not in told:
                _take_in(records, told, body[header:])
            elif told["format"] == _FORMAT:
                base = told["base"] and Base(*told["base"])
                if told.get("anew"):
                    records.clear()  # what was in earlier segments is in this one, as far as it counts
            else:
                _log.warning("%s was written by another version of rljob: its episodes start over", path)
                break
    return base


def _take_in(records: dict[EpisodeId, EpisodeRecord], told: Mapping[str, Any], streams: bytes) -> None:
    id = EpisodeId(*told["id"])
    if "over" in told:
        records.pop(id, None)
    elif "program" in told:
        records[id] = EpisodeRecord(told["program"])
    elif id in records:  # not where the segment with its beginning is gone: it was over
        place, what = CallPlace(tuple(told["branch"]), told["number"]), What(*told["what"])
        call = RecordedCall(place, what, "result" in told, told.get("result"), told.get("seconds", 0.0))
        if told["streams"]:
            receipt = None if told["receipt"] is None else Receipt.from_json(told["receipt"])
            tokens = _tokens(streams, told["streams"])
            call = RecordedCall(place, what, True, turn=RecordedTurn(tokens, told["finish"], told["seconds"], receipt))
        records[id].put(call)


def _tokens(data: bytes, shapes: Mapping[str, list[int]]) -> Tokens:
    streams, at = {}, 0
    for name, shape in shapes.items():
        dtype = stream_types()[name]
        end = at + dtype.itemsize * math.prod(shape)
        streams[name] = np.frombuffer(data[at:end], dtype).reshape(shape)
        at = end
    return Tokens(**streams)
