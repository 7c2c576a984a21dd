"""The ledger waits for what passes, and an error that comes while a run is being closed hides no earlier one."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest

from rljob_trainer.driver.closing import closing as closing_part
from rljob_trainer.errors import EngineError, OutputError
from rljob_trainer.record import ledger as ledgers
from rljob_trainer.record.ledger import Ledger

pytestmark = pytest.mark.integrity


def versions(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as database:
        return [version for (version,) in database.execute("SELECT version FROM versions ORDER BY version")]


async def test_a_version_waits_for_a_lock_that_somebody_else_holds_for_longer_than_sqlite_waits(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    with closing(sqlite3.connect(ledger.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        announced = asyncio.create_task(ledger.announce(1, step=0))
        await asyncio.sleep(2 * ledgers._BUSY_SECONDS + 0.5)
        assert not announced.done()
        other.execute("COMMIT")
    await asyncio.wait_for(announced, 30)
    await ledger.close()
    assert versions(ledger.path) == [1]


async def test_a_version_waits_for_room_on_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite itself says that there is none: of a database that may have no more pages than it has."""
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1)

    def may_have(pages: int) -> None:
        ledger._connection.execute(f"PRAGMA max_page_count = {pages}")

    await ledger._do(may_have, 1)
    # A table that is full: its rows do not fit into the one page it has.
    with caplog.at_level(logging.WARNING):
        filling = asyncio.create_task(_fill(ledger))
        while "make room" not in caplog.text:
            assert not filling.done()
            await asyncio.sleep(0.01)
        await ledger._do(may_have, 100_000)
        await asyncio.wait_for(filling, 30)
    await ledger.close()
    assert versions(ledger.path) == list(range(2000))


async def _fill(ledger: Ledger) -> None:
    for version in range(2000):
        await ledger.announce(version, step=0)


async def test_patience_ends_with_an_error_that_says_how_long_it_was(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1, patience_seconds=0.6)
    await ledger._do(lambda: ledger._connection.execute("PRAGMA max_page_count = 1"))
    with pytest.raises(OutputError, match=r"cannot write the ledger .* within 1 s: .*full"):
        await _fill(ledger)


async def test_the_file_is_opened_when_its_lock_is_free_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    await Ledger(path, attempt=1).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        opened = asyncio.create_task(asyncio.to_thread(Ledger, path, 2))
        await asyncio.sleep(ledgers._BUSY_SECONDS + 0.5)
        assert not opened.done()
        other.execute("COMMIT")
    ledger = await asyncio.wait_for(opened, 30)
    assert time.monotonic() - began > ledgers._BUSY_SECONDS
    await ledger.close()


async def test_the_first_error_is_told_and_that_of_closing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def full() -> None:
        raise OutputError("no room for the last lines")

    async def run(error: Exception | None) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_exit(closing_part(full))
            if error is not None:
                raise error

    with pytest.raises(EngineError, match="engine 0 is gone"):
        await run(EngineError("engine 0 is gone"))
    assert "no room for the last lines" in caplog.text
    with pytest.raises(OutputError, match="no room for the last lines"):
        await run(None)
