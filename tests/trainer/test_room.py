"""What fails for want of space ends with an exit code of its own, whatever was written and in whichever process."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rljob_trainer.driver.together import together
from rljob_trainer.errors import DataError, OutputError, RLJobError, exit_code_of
from rljob_trainer.learner import state
from rljob_trainer.telemetry.run_folder import writing

FULL = Path("/dev/full")
"""A file that takes nothing, by the kernel itself: every write is ENOSPC."""
NO_ROOM = 73
"""EX_CANTCREAT of sysexits.h."""


def write_a_file(_folder: Path) -> None:
    with writing(FULL), FULL.open("wb", buffering=0) as file:
        file.write(b"x")


def save_tensors(folder: Path) -> None:
    """torch raises an error of its own instead, with the cause inside."""
    (folder / ".metadata.tmp").symlink_to(FULL)
    state.save(folder, [], state.StateOwner("fsdp2", 0, 1))


def save_random_states(folder: Path) -> None:
    (folder / state._random_file(0)).symlink_to(FULL)
    state.save(folder, [], state.StateOwner("fsdp2", 0, 1))


def error_of(writes: Callable[[Path], None], folder: Path) -> RLJobError:
    with pytest.raises(RLJobError) as raised:
        writes(folder)
    return raised.value


@pytest.mark.parametrize("writes", [write_a_file, save_tensors, save_random_states])
def test_no_space_left_is_an_exit_code_of_its_own(writes: Callable[[Path], None], tmp_path: Path) -> None:
    error = error_of(writes, tmp_path)
    assert "No space left on device" in str(error)
    assert exit_code_of(error) == NO_ROOM
    # As it comes from the process of a rank: without the errors that it was raised from.
    assert exit_code_of(pickle.loads(pickle.dumps(error))) == NO_ROOM


def test_a_database_that_is_full_is_no_room(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "full.sqlite")) as database:
        database.execute("PRAGMA max_page_count = 1")
        try:
            database.execute("CREATE TABLE versions (version INTEGER)")
        except sqlite3.Error as full:
            error = RLJobError("the ledger cannot be written")
            error.__cause__ = full
    assert exit_code_of(error) == NO_ROOM


@pytest.mark.parametrize(
    ("error", "code"),
    [(RLJobError("a"), 1), (DataError("a"), 65), (ValueError("a"), 1), (PermissionError(13, "denied"), 1)],
)
def test_every_other_error_keeps_its_code(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


def test_data_that_is_refused_while_the_disk_is_full_is_refused_for_what_it_is() -> None:
    error = DataError("row 3 has no answer")
    error.__context__ = OSError(28, "No space left on device")
    assert exit_code_of(error) == 65


async def out_of_room() -> None:
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise OutputError("the file cannot be written") from error


async def test_an_error_of_one_of_several_parts_keeps_what_it_was_raised_from() -> None:
    with pytest.raises(OutputError) as raised:
        await together(out_of_room(), asyncio.sleep(60))
    assert exit_code_of(raised.value) == NO_ROOM
