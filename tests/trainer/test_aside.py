"""A call that hangs, in a file server or a store, holds up neither the end of an event loop nor that of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from rljob_trainer import aside

READS_AHEAD = """
import threading
from rljob_trainer.data.ahead import ReadAhead

begun = threading.Event()
def hangs(epoch, position):
    begun.set()
    threading.Event().wait()

ReadAhead(hangs, 100, 10).read_through(0, 0, lambda: True)
begun.wait()
"""


def test_a_loop_ends_beside_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "_END_SECONDS", 0.1)
    hangs = threading.Event()
    threading.Timer(20, hangs.set).start()

    async def gives_up() -> int:
        asyncio.get_running_loop().set_default_executor(aside.Threads())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(hangs.wait), 0.05)
        return await asyncio.to_thread(lambda: 7)

    assert asyncio.run(gives_up()) == 7
    assert not hangs.is_set()
    hangs.set()


def test_a_loop_waits_a_moment_for_calls_under_way() -> None:
    begun, done = threading.Event(), threading.Event()

    def writes() -> None:
        begun.set()
        threading.Event().wait(0.1)
        done.set()

    async def leaves() -> None:
        asyncio.get_running_loop().set_default_executor(aside.Threads())
        writing = asyncio.create_task(asyncio.to_thread(writes))
        await asyncio.to_thread(begun.wait)
        writing.cancel()

    asyncio.run(leaves())
    assert done.is_set()


def test_a_process_ends_while_a_row_that_is_read_ahead_hangs() -> None:
    subprocess.run([sys.executable, "-c", READS_AHEAD], check=True, timeout=30)


def test_no_call_begins_in_a_thread_that_is_ended() -> None:
    one, called = aside.OneThread("one"), []
    one.submit(called.append, 1).result()
    one.end(1.0)
    later = one.submit(called.append, 2)
    with pytest.raises(TimeoutError):
        later.result(0.05)
    assert called == [1]
