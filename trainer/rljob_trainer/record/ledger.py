"""What became of every prompt: one row each in SQLite, so that nothing is lost or trained twice unnoticed.

    groups    ordinal, where the prompt is from, state, versions, deadline, attempt; of what has ended also lengths,
              reward and tokens by age
    resampled what was asked again: ordinal, by which attempt it had been asked, why, what had become of it until then
    versions  every number that was ever published, whatever became of the weights
    commands  what the operator wanted
    writer    one row: who opened the file last

The pipeline reports (``Journal``); rows are gathered in memory and written by a thread, a step's rows (those of several
steps, if it is behind) in one transaction, so a step costs the event loop a few appends to lists. A checkpoint carries
a snapshot; going back to it rolls the groups back with it, but never the versions, whose numbers are not used again,
nor what says that a group has been made more than once. What an attempt had not written when it was killed, nobody
knows; nor what one had not written that was stopped, and came back when another had opened the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rljob_api.status import Desired
from rljob_trainer.episodes.episode import Group, Prompt
from rljob_trainer.errors import CheckpointError, OutputError
from rljob_trainer.record.account import Account
from rljob_trainer.record.fence import FencedError

T = TypeVar("T")

log = logging.getLogger(__name__)

FILE = "ledger.sqlite"
ROLLED_BACK, ENGINE_LOST = "rolled back", "engine lost"
"""Why a group is asked again."""

_BUSY_SECONDS = 1.0
"""SQLite's own wait for a lock, in which its thread does nothing else."""
_PAUSE_SECONDS = 0.5
_LOCK_SECONDS = 60.0
"""How long a lock that somebody else holds is waited for."""
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)

_FORMAT = 4
"""Of the tables; to be raised with every change of theirs."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    ordinal INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL, source TEXT NOT NULL, row INTEGER NOT NULL,
    state TEXT NOT NULL, -- running, finished, trained, dropped (to have SQLite check it doubles the time of a row)
    reason TEXT,
    admitted_version INTEGER NOT NULL, deadline INTEGER NOT NULL,
    oldest_version INTEGER, newest_version INTEGER, samples INTEGER, tokens INTEGER, reward REAL, token_ages TEXT,
    trained_step INTEGER, trained_version INTEGER,
    attempt INTEGER NOT NULL, times_asked INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS resampled (
    ordinal INTEGER NOT NULL, attempt INTEGER NOT NULL, reason TEXT NOT NULL, state TEXT NOT NULL, time TEXT NOT NULL,
    PRIMARY KEY (ordinal, time, reason)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS commands (generation INTEGER, attempt INTEGER, command TEXT NOT NULL, time TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS writer (id INTEGER PRIMARY KEY CHECK (id = 1), name TEXT NOT NULL);
"""
_ADMIT = """
INSERT INTO groups (ordinal, epoch, source, row, state, admitted_version, deadline, attempt, times_asked)
VALUES (?, ?, ?, ?, 'running', ?, ?, ?, 1)
ON CONFLICT (ordinal) DO UPDATE SET state = 'running', reason = NULL, admitted_version = excluded.admitted_version,
    deadline = excluded.deadline, attempt = excluded.attempt, times_asked = times_asked + 1
"""
_FINISH = "UPDATE groups SET state = 'finished' WHERE ordinal = ? AND state = 'running'"
_DROP = "UPDATE groups SET state = 'dropped', reason = ?, samples = ?, tokens = ?, reward = ? WHERE ordinal = ?"
_TRAIN = """
UPDATE groups SET state = 'trained', trained_step = ?, trained_version = ?, oldest_version = ?, newest_version = ?,
    samples = ?, tokens = ?, reward = ?, token_ages = ? WHERE ordinal = ?
"""
_RESAMPLE = "INSERT OR IGNORE INTO resampled VALUES (?, ?, ?, ?, ?)"
_COMMAND = "INSERT INTO commands VALUES (?, ?, ?, ?)"


@dataclass(slots=True)
class _Changes:
    """What happened since the last write, in the order of the statements that write it."""

    admitted: list[tuple[Any, ...]]
    finished: list[tuple[int]]
    dropped: list[tuple[str, int, int, float | None, int]]
    trained: list[tuple[Group, int, int]]
    resampled: list[tuple[int, int, str, str, str]]

    def __bool__(self) -> bool:
        return bool(self.admitted or self.finished or self.dropped or self.trained or self.resampled)


def _nothing() -> _Changes:
    return _Changes([], [], [], [], [])


class Ledger:
    """The ledger of one run, open from ``open`` to ``close``. Its methods are for the event loop's thread."""

    def __init__(self, path: Path, attempt: int, patience_seconds: float = 3600.0) -> None:
        """Opens or makes the file, for which it may wait. Raises ``OutputError``.

        ``patience_seconds``: how long the number of a version waits for room on the disk.
        """
        self.path, self.attempt, self.patience_seconds = path, attempt, patience_seconds
        self.fresh = not path.exists()
        """Whether nothing was known before."""
        self._changes = _nothing()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._handed_over: deque[_Changes] = deque()
        self._asked = False
        """Whether the thread has yet to look at what was handed over."""
        self._writing: Future[None] | None = None
        self._unwritten: list[tuple[str, list[tuple[Any, ...]]]] = []
        """The thread's: statements that are still to be executed, in order."""
        self._told = False
        self._name = secrets.token_hex(8)
        """As the file's writer; not the attempt, whose count starts anew when its file is removed."""
        self._account = Account()
        """The thread's."""
        self.account = self._account
        """What has ended so far, as of the last ``write``; it does not change."""
        try:
            self._thread.submit(self._open_patiently).result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            remedy = self._remedy(error, "move it away")
            raise OutputError(f"cannot open the ledger {path}: {error}; {remedy} or choose another folder") from error

    # --- what the pipeline reports (Journal)

    def admitted(self, prompt: Prompt, version: int, deadline: int) -> None:
        self._changes.admitted.append(
            (prompt.ordinal, prompt.epoch, prompt.source, prompt.row, version, deadline, self.attempt)
        )

    def finished(self, ordinal: int) -> None:
        self._changes.finished.append((ordinal,))

    def dropped(self, group: Group, reason: str) -> None:
        self._changes.dropped.append(
            (reason, len(group.episodes), group.response_tokens, group.mean_score, group.prompt.ordinal)
        )

    def trained(self, groups: Sequence[Group], step: int, version: int) -> None:
        self._changes.trained.extend((group, step, version) for group in groups)

    def resampled(self, ordinals: Iterable[int], reason: str) -> None:
        """Running groups are asked again."""
        now = _now()
        self._changes.resampled.extend((ordinal, self.attempt, reason, "running", now) for ordinal in ordinals)

    # --- writing

    def write(self) -> None:
        """Has the thread write what has been reported, with all that waits by then in one transaction. What cannot be
        written is said once, stays in memory and is written with what comes next; the run goes on. Raises what is wrong
        with the rows themselves, at the next call."""
        self._check_written()
        if not self._changes:
            return
        self._handed_over.append(self._changes)
        self._changes = _nothing()
        if not self._asked:
            self._asked = True
            self._writing = self._thread.submit(self._write)

    async def announce(self, version: int, step: int) -> None:
        """A version is about to be published: from now on its number is used. Waits for a lock, and for room on a
        disk that is full. Raises ``OutputError``."""
        insert = "INSERT OR REPLACE INTO versions VALUES (?, ?, ?)"
        await self._do(self._execute, insert, (version, self.attempt, step), room=True)

    def command(self, desired: Desired) -> None:
        """What the operator wants."""
        text = desired.model_dump_json(by_alias=True, exclude_none=True)
        values = (desired.generation, self.attempt, text, _now())
        self._thread.submit(self._record, values)

    async def snapshot(self, target: Path) -> None:
        """Writes a copy with everything that has been reported. Raises ``OutputError``."""
        self.write()
        await self._do(self._write_unwritten)
        self._check_written()
        await self._do(self._copy_to, target)

    async def roll_back(self, snapshot: Path | None, *, step: int, next_ordinal: int, again: Iterable[int]) -> int:
        """Goes back to the end of ``step``; returns the highest version that was ever published (0: none). Raises
        ``OutputError``, ``CheckpointError`` when ledger and checkpoint are not of one run, and ``FencedError``.

        ``again`` are the prompts that were open then; those from ``next_ordinal`` on had not been handed out.
        """
        return await self._do(self._roll_back, snapshot, step, next_ordinal, list(again))

    async def highest_version(self) -> int:
        return await self._do(self._highest)

    async def close(self, *, write: bool = True) -> None:
        """Writes what is left, unless the run is another's by now."""
        try:
            if write:
                self.write()
                await self._do(self._write_unwritten)
        except OutputError as error:
            log.warning("%s: the most recent events are missing from it", error)
        finally:
            await asyncio.to_thread(self._end)
        if write:
            self._check_written()

    def _remedy(self, error: sqlite3.Error, otherwise: str) -> str:
        if _is(error, _LOCKED):
            return "stop the program that has it open"
        if _is(error, _DAMAGED):
            name = self.path.name
            return (
                f"the file is damaged: move {name}, {name}-wal and {name}-shm away and start again from the copy in "
                "the last checkpoint,"
            )
        return otherwise

    def _end(self) -> None:
        self._thread.shutdown()
        self._connection.close()

    def _check_written(self) -> None:
        """Raises what was wrong with the rows that the thread has looked at last."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def _do(self, function: Callable[..., T], *arguments: Any, room: bool = False) -> T:
        """What ``function`` returns, in the thread; again and again while somebody else holds a lock, and with ``room``
        while the disk is full."""
        began, told = time.monotonic(), False
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
            except sqlite3.Error as error:
                waited = time.monotonic() - began
                left = (
                    _LOCK_SECONDS - waited
                    if _is(error, _LOCKED)
                    else self.patience_seconds - waited
                    if room and _is(error, _NO_ROOM)
                    else 0.0
                )
                if left <= 0:
                    remedy = self._remedy(error, "check whether the disk is full")
                    after = f" within {waited:.0f} s" if told else ""
                    raise OutputError(f"cannot write the ledger {self.path}{after}: {error}; {remedy}") from error
                if not told:
                    remedy = "another program has it open" if _is(error, _LOCKED) else "make room"
                    log.warning(
                        "cannot write the ledger %s (%s): the run waits for up to %.0f s; %s",
                        self.path,
                        error,
                        left,
                        remedy,
                    )
                told = True
            await asyncio.sleep(_PAUSE_SECONDS)

    # --- in the thread

    def _open_patiently(self) -> None:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return self._open()
            except sqlite3.Error as error:
                if not _is(error, _LOCKED) or time.monotonic() >= until:
                    raise
            time.sleep(_PAUSE_SECONDS)

    def _open(self) -> None:
        _make_for_owner(self.path)
        self._connection = sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if self._connection.execute("SELECT 1 FROM sqlite_schema").fetchone() and not self._is_ours("main"):
            raise sqlite3.DatabaseError("it was written by another version of rljob")
        self._connection.executescript(f"{_SCHEMA} PRAGMA user_version = {_FORMAT};")
        self._connection.execute("INSERT OR REPLACE INTO writer VALUES (1, ?)", (self._name,))
        self._add_up_anew()

    def _is_ours(self, database: str) -> bool:
        return bool(self._connection.execute(f"PRAGMA {database}.user_version").fetchone()[0] == _FORMAT)

    def _add_up_anew(self) -> None:
        self._account = Account.of(self._connection)
        self.account = self._account.copy()

    def _execute(self, statement: str, values: tuple[Any, ...]) -> None:
        self._connection.execute(statement, values)

    def _write(self) -> None:
        self._asked = False
        while self._handed_over:
            self._take_in(self._handed_over.popleft())
        self.account = self._account.copy()
        self._try_to_write()

    def _take_in(self, changes: _Changes) -> None:
        """Makes rows of what happened: if they have to wait, the groups' tokens need not."""
        trained = []
        for group, step, version in changes.trained:
            tokens, reward, ages = group.response_tokens, group.mean_score, _token_ages(group, version)
            youngest, oldest = (next(iter(ages)), next(reversed(ages))) if ages else (0, 0)
            versions, samples, told = (version - oldest, version - youngest), len(group.episodes), _as_json(ages)
            trained.append((step, version, *versions, samples, tokens, reward, told, group.prompt.ordinal))
            self._account.add_trained(samples, tokens, reward, oldest, ages)
        ended = {row[-1] for row in (*trained, *changes.dropped)}
        self._unwritten += [
            (_ADMIT, changes.admitted),
            (_FINISH, [row for row in changes.finished if row[0] not in ended]),
            (_DROP, changes.dropped),
            (_TRAIN, trained),
            (_RESAMPLE, changes.resampled),
        ]
        for reason, samples, tokens, reward, _ in changes.dropped:
            self._account.add_dropped(reason, samples, tokens, reward)

    def _record(self, values: tuple[Any, ...]) -> None:
        self._unwritten.append((_COMMAND, [values]))
        self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self._write_unwritten()
        except sqlite3.Error as error:
            if not self._told:
                log.warning(
                    "cannot write the ledger %s (%s): its rows are kept in memory and lost if this process is killed; "
                    "make room",
                    self.path,
                    error,
                )
            self._told = True

    def _write_unwritten(self) -> None:
        with self._transaction() as is_writer:
            if is_writer:
                for statement, rows in self._unwritten:
                    self._connection.executemany(statement, rows)
        self._unwritten.clear()
        self._told = False

    @contextmanager
    def _transaction(self) -> Iterator[bool]:
        """Whether nobody else has opened the file since; until the end of it nobody does."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection.execute("SELECT name FROM writer").fetchone() == (self._name,)

    @contextmanager
    def _own_transaction(self) -> Iterator[None]:
        with self._transaction() as is_writer:
            if not is_writer:
                raise FencedError(f"another driver has opened {self.path}; this one no longer saves or publishes")
            yield

    def _copy_to(self, target: Path) -> None:
        target.unlink(missing_ok=True)
        self._connection.execute("VACUUM INTO ?", (str(target),))

    def _highest(self) -> int:
        return int(self._connection.execute("SELECT coalesce(max(version), 0) FROM versions").fetchone()[0])

    def _undone(self, next_ordinal: int, again: list[int]) -> list[tuple[int, int, str, str, str]]:
        """Rows for the groups whose copies since the snapshot ``past`` are given up: those that were not handed out
        then, and those open then that have been asked again or have ended since, or were running in a run that went on.
        Where nothing happened after the snapshot (a run that was stopped), open groups just go on."""
        columns = "SELECT ordinal, state, attempt, times_asked FROM"
        past = {row[0]: row for row in self._connection.execute(f"{columns} past.groups")}
        present = self._connection.execute(f"{columns} groups").fetchall()
        went_on = any(row != past.get(row[0]) for row in present)
        opened, now = set(again), _now()
        undone = []
        for row in present:
            ordinal, state, attempt, times_asked = row
            then = past.get(ordinal)
            # What was finished then and is "running" by an earlier roll-back has not been asked since.
            untouched = row == then and not (state == "running" and went_on)
            waits = then == (ordinal, "finished", attempt, times_asked) and state == "running"
            if ordinal >= next_ordinal or (ordinal in opened and not untouched and not waits):
                undone.append((ordinal, attempt, ROLLED_BACK, state, now))
        return undone

    def _take_over_from_past(self, next_ordinal: int, again: list[int], snapshot: Path) -> None:
        database = self._connection
        if not self._is_ours("past"):
            raise CheckpointError(
                f"the ledger {snapshot} was written by another version of rljob: continue with that version, or start "
                "over in another folder"
            )
        undone = self._undone(next_ordinal, again)
        with self._own_transaction():
            database.executemany(_RESAMPLE, undone)
            database.execute("INSERT OR IGNORE INTO resampled SELECT * FROM past.resampled")
            database.execute("DELETE FROM groups")
            database.execute("INSERT INTO groups SELECT * FROM past.groups")
            database.execute("INSERT OR IGNORE INTO versions SELECT * FROM past.versions")

    def _roll_back(self, snapshot: Path | None, step: int, next_ordinal: int, again: list[int]) -> int:
        database = self._connection
        self._unwritten.clear()
        highest = self._highest()
        if snapshot is not None and snapshot.exists():
            database.execute("ATTACH ? AS past", (str(snapshot),))
            try:
                self._take_over_from_past(next_ordinal, again, snapshot)
            finally:
                database.execute("DETACH past")
        with self._own_transaction():
            database.execute("DELETE FROM groups WHERE ordinal >= ?", (next_ordinal,))
            # Open then, whatever became of them afterwards.
            database.executemany(
                "UPDATE groups SET state = 'running', reason = NULL, trained_step = NULL, trained_version = NULL "
                "WHERE ordinal = ?",
                [(ordinal,) for ordinal in again],
            )
        late = database.execute("SELECT count(*) FROM groups WHERE trained_step > ?", (step,)).fetchone()[0]
        if late:
            raise CheckpointError(
                f"the ledger {self.path} does not belong to the checkpoint of step {step}: {late} groups were trained "
                "later and are not open in it; use another checkpoint or another folder"
            )
        self._add_up_anew()
        return max(highest, self._highest())


def _make_for_owner(path: Path) -> None:
    """Others may neither read the file nor lock it; SQLite gives the files beside it the same permissions. One that is
    there is not opened: closing it would give up the locks that this process has on it."""
    with contextlib.suppress(OSError):  # what is wrong with the place, SQLite says
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            path.chmod(0o600)


def _is(error: sqlite3.Error, kinds: tuple[int, ...]) -> bool:
    """Whether an error is of one of SQLite's kinds; the upper bits of its code say more."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in kinds


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _as_json(counts: Mapping[int, int]) -> str:
    """Four times as fast as the general way, which counts when it happens for every group."""
    return "{" + ", ".join([f'"{key}": {count}' for key, count in counts.items()]) + "}"


def _token_ages(group: Group, version: int) -> dict[int, int]:
    """Tokens by age in versions, for a group that is trained in ``version``; youngest first."""
    tokens: dict[int, int] = {}
    for leaf in group.leaves:
        versions = leaf.tokens.versions
        if not versions.size:
            continue
        # They never fall along a response, and most are made by one version: not every token has to be looked at.
        if (first := versions.item(0)) == versions.item(-1):
            tokens[version - first] = tokens.get(version - first, 0) + versions.size
        else:
            for made_by, count in zip(*np.unique(versions, return_counts=True), strict=True):
                age = version - int(made_by)
                tokens[age] = tokens.get(age, 0) + int(count)
    return tokens if len(tokens) < 2 else dict(sorted(tokens.items()))
