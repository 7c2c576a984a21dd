"""What the driver and a reward worker say to each other, and how it travels: a length, then a pickle.

A worker's messages are many and small, and each one that travels alone costs both sides a wake-up. So they wait in an
``Outbox`` for company, at most ``COMPANY_SECONDS``: in memory that the driver shares, so that what a worker had to say
is not lost when it hangs or is killed.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, NamedTuple, Self

from rljob_trainer.rewards.terms import Outcome, Response, TermSpec

COMPANY_SECONDS = 0.02
"""How long a message may wait for others while its worker goes on."""
_HEADER = struct.Struct("<4sQ")
_MARK = b"\x93rlj"
"""Begins every frame: what somebody else has written into the pipe is no frame."""
_OUTBOX_BYTES = 1 << 16
_STOPPED = struct.Struct("<d")
_SIGNAL = struct.Struct("<i")
_LENGTH = struct.Struct("<I")
_SIGNAL_AT = _STOPPED.size
_LENGTH_AT = _SIGNAL_AT + _SIGNAL.size
_MESSAGES_AT = _LENGTH_AT + _LENGTH.size


class GarbledError(Exception):
    """Something that is no frame came out of a worker's pipe."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first frame to a worker, which answers with ``Ready``. Each later one is a list of ``Request``."""

    terms: tuple[TermSpec, ...]
    timeout_seconds: float


class Ready(NamedTuple):
    """The functions are loaded, or why they are not."""

    problem: str | None = None


class Request(NamedTuple):
    """A sample to be scored by all terms that apply to its source, but for those named in ``skip``."""

    response: Response
    skip: frozenset[str] = frozenset()


class Calling(NamedTuple):
    """This term's function is called for a sample (its place in the list) now; sent only where several could be the one
    that hangs."""

    sample: int
    term: str


class Scored(NamedTuple):
    """Outcome of a sample. Not ``final``: its async functions are still under way."""

    sample: int
    outcome: Outcome
    of: int
    """``Response.digest`` of what was judged: the driver looks whether that stands at this place."""
    final: bool = True


def frame(message: Any) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(_MARK, len(body)) + body


def read_frame(incoming: BinaryIO) -> Any:
    """The next message of a blocking pipe, None when its other end has been closed."""
    header = incoming.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    return pickle.loads(incoming.read(_HEADER.unpack(header)[1]))


class Unframing:
    """Messages out of bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def messages(self, arrived: bytes) -> list[Any]:
        """The messages that ``arrived`` completes. Raises ``GarbledError`` for what is no message."""
        data = self._rest + arrived
        found, at = [], 0
        while len(data) - at >= _HEADER.size:
            mark, length = _HEADER.unpack_from(data, at)
            if mark != _MARK:
                raise GarbledError
            end = at + _HEADER.size + length
            if len(data) < end:
                break
            try:
                found.append(pickle.loads(data[at + _HEADER.size : end]))
            except Exception as problem:  # pickle raises what it likes
                raise GarbledError from problem
            at = end
        self._rest = data[at:]
        return found


class SharedMemory:
    """A few pages that a process shares with one that it starts: ``file`` is inherited, the other end attaches.

    They hold how long the worker was stopped (the driver writes that), the last signal that a function sent to its own
    process, and the messages that are not sent yet.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.pages = mmap.mmap(file.fileno(), _OUTBOX_BYTES)

    @classmethod
    def new(cls) -> Self:
        file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        file.truncate(_OUTBOX_BYTES)
        return cls(file)

    @property
    def stopped_seconds(self) -> float:
        """How long the worker has been stopped (SIGSTOP, a paused machine), as far as the driver has noticed."""
        seconds: float = _STOPPED.unpack_from(self.pages, 0)[0]
        return seconds

    @stopped_seconds.setter
    def stopped_seconds(self, seconds: float) -> None:
        _STOPPED.pack_into(self.pages, 0, seconds)

    @property
    def own_signal(self) -> int:
        """The last signal that Python code of the worker or of a child of it sent to the worker; 0: none."""
        number: int = _SIGNAL.unpack_from(self.pages, _SIGNAL_AT)[0]
        return number

    @own_signal.setter
    def own_signal(self, number: int) -> None:
        _SIGNAL.pack_into(self.pages, _SIGNAL_AT, number)

    def messages(self) -> list[Any]:
        """What its writer, who has ended, had not sent yet; some of it may have been sent all the same."""
        length = _LENGTH.unpack_from(self.pages, _LENGTH_AT)[0]
        return Unframing().messages(self.pages[_MESSAGES_AT : _MESSAGES_AT + length])

    def clear(self) -> None:
        _LENGTH.pack_into(self.pages, _LENGTH_AT, 0)

    def close(self) -> None:
        self.pages.close()
        self.file.close()


class Outbox:
    """A worker's way to say something: now (``flush``), or soon.

    It belongs to the process that made it. A child that a function forked, and that came out of the function, ends here
    without a word: what it has to say is no outcome, and its siblings' are not its to tell.
    """

    def __init__(self, outgoing: BinaryIO, memory: SharedMemory) -> None:
        self._outgoing = outgoing
        self._memory = memory
        self._owner = os.getpid()
        self._end = _MESSAGES_AT
        self._sent = time.monotonic()

    def end_escaped_child(self) -> None:
        """Ends this process when it is not the owner."""
        if os.getpid() != self._owner:
            os._exit(0)

    def post(self, message: Any) -> None:
        """Raises ``BrokenPipeError`` when the driver is gone, as ``flush`` does."""
        self.end_escaped_child()
        data = frame(message)
        end = self._end + len(data)
        if end > _OUTBOX_BYTES:
            self.flush()
            end = self._end + len(data)
        if end > _OUTBOX_BYTES:
            self._send(data)
            return
        pages = self._memory.pages
        pages[self._end : end] = data
        self._end = end
        # Last, so that what it counts is whole.
        _LENGTH.pack_into(pages, _LENGTH_AT, end - _MESSAGES_AT)
        if time.monotonic() - self._sent >= COMPANY_SECONDS:
            self.flush()

    def flush(self) -> None:
        self.end_escaped_child()
        if self._end > _MESSAGES_AT:
            self._send(self._memory.pages[_MESSAGES_AT : self._end])
            self._end = _MESSAGES_AT
            self._memory.clear()

    def _send(self, data: bytes) -> None:
        self._outgoing.write(data)
        self._outgoing.flush()
        self._sent = time.monotonic()
