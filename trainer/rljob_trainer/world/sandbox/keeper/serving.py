"""The keeper: an interpreter that is ready, and forks for each program that it is asked for.

It is inside the sandbox, and knows no more of a program than how long its payload is: it hands that on unread, in
memory that its forks do not get, so that no program finds anything of those before it. Standard library only."""

from __future__ import annotations

import mmap
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

from . import tree
from .confinement import Confinement
from .program import Ends, Program, become_program
from .protocol import CANCEL, ENDED, FAILED, HEADER, MOST_FILES, READY, REQUEST, STARTED, End, Outcome, Settings

WINDOW_BYTES = 2**17
SETUP_SECONDS = 10.0
"""Until a program's process that has not begun to be one is taken for broken."""
TICK_SECONDS = 0.01
"""Between looks at what the program uses."""


class DriverGoneError(Exception):
    """The driver is gone."""


MADV_WIPEONFORK = 18
"""Linux; Python's library has no name for it."""


class Window:
    """Memory that is empty in forks of this process."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(MADV_WIPEONFORK)
        self.view = memoryview(self._memory)


class Captured:
    """What a program writes to one of its outputs, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # One byte more says that there is more.
        self._window = Window(limit + 1)
        self.length = 0

    @property
    def over(self) -> bool:
        return self.length > self._limit

    def read(self, descriptor: int) -> bool:
        """Reads what there is; False at its end, or at the limit."""
        if self.over:
            return False
        try:
            count = os.readv(descriptor, [self._window.view[self.length :]])
        except BlockingIOError:
            return True
        self.length += count
        return count > 0

    def drain(self, descriptor: int) -> None:
        """Reads what is left. Whoever should still be writing is not waited for."""
        while not self.over:
            try:
                count = os.readv(descriptor, [self._window.view[self.length :]])
            except BlockingIOError:
                return
            if not count:
                return
            self.length += count

    def written(self) -> memoryview:
        return self._window.view[: min(self.length, self._limit)]


@dataclass(slots=True)
class _Running:
    """One program, from its fork until nothing of it is left."""

    process: int
    begun: float
    """When it was forked, then when it started."""
    setup: bytearray = field(default_factory=bytearray)
    outcome: Outcome = "exited"
    status: int | None = None
    processor_seconds: float = 0.0


class Keeper:
    """Serves one driver, one program at a time."""

    def __init__(self, control: int, confinement: Confinement, settings: Settings) -> None:
        self._control = control
        self._confinement = confinement
        self._settings = settings
        self._payload = Window(WINDOW_BYTES)
        self._captured = (Captured(settings.limits.output_bytes), Captured(settings.limits.output_bytes))

    def serve(self) -> Program | None:
        """Returns None when the driver is gone, and, in each fork that becomes a program, that program."""
        while True:
            request = b""
            while len(request) < REQUEST.size:
                more = os.read(self._control, REQUEST.size - len(request))
                if not more:
                    return None
                # A program that was cancelled as it ended was so already.
                request = (request + more).removeprefix(CANCEL)
            program = self._one(REQUEST.unpack(request)[0])
            if program is not None:
                return program

    def _one(self, length: int) -> Program | None:
        payload, stdout, stderr, setup = (os.pipe() for _ in range(4))
        keeper = os.getpid()
        process = os.fork()
        if process == 0:
            return become_program(
                Ends(keeper, payload[0], stdout[1], stderr[1], setup[1]), self._confinement, self._settings
            )
        for descriptor in (payload[0], stdout[1], stderr[1], setup[1]):
            os.close(descriptor)
        running = _Running(process, time.monotonic())
        outputs = dict(zip((stdout[0], stderr[0]), self._captured, strict=True))
        for captured in self._captured:
            captured.length = 0
        try:
            self._forward(length, payload[1])
            self._follow(running, outputs, setup[0])
        finally:
            self._confinement.kill(process)
        for descriptor, captured in outputs.items():
            captured.drain(descriptor)
            os.close(descriptor)
        with suppress(BlockingIOError):
            running.setup += os.read(setup[0], 4096)
        os.close(setup[0])
        self._report(running)
        return None

    def _forward(self, length: int, payload: int) -> None:
        """Hands on what the program is; all of it is taken from the driver even where nobody reads it any more."""
        open_payload = True
        while length:
            count = os.readv(self._control, [self._payload.view[: min(length, WINDOW_BYTES)]])
            if not count:
                raise DriverGoneError
            length -= count
            left = self._payload.view[:count]
            while left and open_payload:
                try:
                    left = left[os.write(payload, left) :]
                except BrokenPipeError:
                    open_payload = False
        os.close(payload)

    def _follow(self, running: _Running, outputs: dict[int, Captured], setup: int) -> None:
        """Returns when the program has ended, or is to be ended."""
        ended = os.pidfd_open(running.process)
        poll = select.poll()
        for descriptor in (*outputs, setup):
            os.set_blocking(descriptor, False)
        for descriptor in (*outputs, setup, ended, self._control):
            poll.register(descriptor, select.POLLIN)
        look = running.begun + TICK_SECONDS
        end = running.begun + SETUP_SECONDS
        while running.status is None and running.outcome == "exited":
            ready = dict(poll.poll(1000 * TICK_SECONDS))
            for descriptor in ready.keys() & outputs.keys():
                if not outputs[descriptor].read(descriptor):
                    poll.unregister(descriptor)
            if setup in ready:
                text = os.read(setup, 4096)
                running.setup += text
                if not text:
                    poll.unregister(setup)
                elif running.setup == STARTED:
                    running.begun = time.monotonic()
                    end = running.begun + self._settings.limits.wall_seconds
            if self._control in ready:
                if os.read(self._control, 1) != CANCEL:
                    raise DriverGoneError
                running.outcome = "cancelled"
            if ended in ready:
                _, running.status, used = os.wait4(running.process, 0)
                running.processor_seconds = used.ru_utime + used.ru_stime
                break
            now = time.monotonic()
            if any(captured.over for captured in outputs.values()):
                running.outcome = "too much output"
            elif now > end:
                running.outcome = "timed out"
            elif now > look:
                self._look(running)
                # However much there is to count, at most a tenth of the time is spent on it.
                look = time.monotonic() + max(TICK_SECONDS, 10 * (time.monotonic() - now))
        os.close(ended)

    def _look(self, running: _Running) -> None:
        """Compares what the program uses with what it may."""
        limits = self._settings.limits
        threads, resident = tree.usage(os.getpid())
        files, stored = self._confinement.space()
        if threads > limits.processes:
            running.outcome = "too many processes"
        elif resident > limits.memory_bytes:
            running.outcome = "out of memory"
        elif files > MOST_FILES or stored > limits.file_bytes:
            running.outcome = "too many files"

    def _report(self, running: _Running) -> None:
        seconds = time.monotonic() - running.begun
        if running.setup != STARTED and running.outcome != "cancelled":
            text = bytes(running.setup) or f"its process ended ({running.status}) or hung before it began".encode()
            self._say(FAILED, text)
            return
        outcome, code = running.outcome, -signal.SIGKILL
        if running.status is not None:
            code = os.waitstatus_to_exitcode(running.status)
            late = running.processor_seconds >= self._settings.limits.cpu_seconds
            if code == -signal.SIGXCPU or (code == -signal.SIGKILL and late):
                # The second comes a second after the first, which can be ignored.
                outcome = "timed out"
            elif code < 0:
                outcome = "killed"
        over = any(captured.over for captured in self._captured)
        if over and outcome == "exited":
            outcome = "too much output"
        stdout, stderr = (captured.written() for captured in self._captured)
        end = End(outcome, code, seconds, len(stdout), len(stderr), over)
        self._say(ENDED, end.pack(), stdout, stderr)

    def say_ready(self) -> None:
        self._say(READY)

    def _say(self, kind: bytes, *parts: bytes | memoryview) -> None:
        left = [memoryview(part) for part in (HEADER.pack(kind, sum(map(len, parts))), *parts)]
        while left:
            count = os.writev(self._control, left)
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
