"""The ledger: what it says of prompts, how it goes back with a checkpoint, and that version numbers never return."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from small_episodes import an_episode

from rljob_api.status import Desired
from rljob_trainer.episodes.episode import Group, Prompt, RewardResult
from rljob_trainer.episodes.identity import TRAINING, EpisodeId, ordinals_of, validation_of
from rljob_trainer.errors import CheckpointError, OutputError
from rljob_trainer.record.fence import FencedError
from rljob_trainer.record.ledger import Ledger
from rljob_trainer.telemetry.summary import AgeCounts, EndedGroups

pytestmark = pytest.mark.integrity


def prompt(ordinal: int) -> Prompt:
    return Prompt(ordinal, 0, ordinal, "test", "", (1,), None)


def group(ordinal: int, versions: list[int], score: float) -> Group:
    asked = prompt(ordinal)
    return Group(asked, [an_episode(asked, 0, versions, reward=RewardResult(score))])


def rows(path: Path, columns: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(path) as database:
        return database.execute(f"SELECT {columns} FROM groups ORDER BY ordinal").fetchall()


async def test_a_row_says_what_became_of_a_prompt(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=2)
    assert ledger.fresh
    for ordinal in range(4):
        ledger.admitted(prompt(ordinal), version=3, deadline=4)
    ledger.finished(0)
    ledger.write()
    ledger.finished(1)
    ledger.dropped(group(2, [3, 3], 1.0), "all samples have the same score")
    ledger.trained([group(0, [3, 3, 4], 0.5)], step=7, version=4)
    await ledger.close()
    columns = "ordinal, state, reason, oldest_version, newest_version, trained_step, trained_version"
    assert rows(ledger.path, columns) == [
        (0, "trained", None, 3, 4, 7, 4),
        (1, "finished", None, None, None, None, None),
        (2, "dropped", "all samples have the same score", None, None, None, None),
        (3, "running", None, None, None, None, None),
    ]
    assert rows(ledger.path, "samples, tokens, reward, token_ages") == [
        (1, 3, 0.5, '{"0": 1, "1": 2}'),
        (None, None, None, None),
        (1, 2, 1.0, None),
        (None, None, None, None),
    ]
    assert rows(ledger.path, "admitted_version, deadline, attempt, times_asked") == [(3, 4, 2, 1)] * 4


async def test_going_back_undoes_what_came_after_but_keeps_the_versions(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    for ordinal in range(3):
        ledger.admitted(prompt(ordinal), version=0, deadline=1)
    ledger.trained([group(0, [0], 1.0)], step=1, version=0)
    await ledger.announce(1, step=0)
    await ledger.snapshot(tmp_path / "snapshot")
    # What follows is lost with its process: 1 is trained, 2 dropped, 3 begun, two more versions are published.
    ledger.admitted(prompt(3), version=1, deadline=2)
    ledger.trained([group(1, [0], 1.0)], step=2, version=1)
    ledger.dropped(group(2, [0], 1.0), "uniform")
    await ledger.announce(2, step=1)
    await ledger.announce(3, step=2)
    await ledger.close()

    again = Ledger(tmp_path / "ledger.sqlite", attempt=2)
    assert not again.fresh
    assert await again.roll_back(tmp_path / "snapshot", step=1, next_ordinal=3, again=[1, 2]) == 3
    again.admitted(prompt(1), version=4, deadline=5)
    await again.close()
    assert rows(again.path, "ordinal, state, reason, trained_step, attempt, times_asked") == [
        (0, "trained", None, 1, 1, 1),
        (1, "running", None, None, 2, 2),
        (2, "running", None, None, 1, 1),
    ]


def made_again(path: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(path) as database:
        return database.execute(
            "SELECT ordinal, attempt, reason, state FROM resampled ORDER BY time, ordinal"
        ).fetchall()


async def test_what_is_made_again_stays_on_record(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    for ordinal in range(7):
        ledger.admitted(prompt(ordinal), version=0, deadline=2)
    ledger.trained([group(0, [0], 1.0)], step=1, version=0)
    ledger.finished(1)
    ledger.finished(2)
    ledger.resampled([5], "engine lost")
    await ledger.snapshot(tmp_path / "snapshot")
    # 1, finished then, is trained; 2 stays finished; 3 finishes; 4 is dropped; 5 and 6 go on; 7 is handed out.
    ledger.trained([group(1, [0], 1.0)], step=2, version=1)
    ledger.finished(3)
    ledger.dropped(group(4, [0], 0.0), "uniform")
    ledger.admitted(prompt(7), version=1, deadline=3)
    ledger.resampled([6], "engine lost")
    await ledger.close()

    lost = [(5, 1, "engine lost", "running"), (6, 1, "engine lost", "running")]
    first = [
        (1, 1, "rolled back", "trained"),
        (3, 1, "rolled back", "finished"),
        (4, 1, "rolled back", "dropped"),
        (5, 1, "rolled back", "running"),
        (6, 1, "rolled back", "running"),
        (7, 1, "rolled back", "running"),
    ]
    again = Ledger(tmp_path / "ledger.sqlite", attempt=2)
    await again.roll_back(tmp_path / "snapshot", step=1, next_ordinal=7, again=[1, 2, 3, 4, 5, 6])
    assert made_again(again.path) == lost + first
    for ordinal in range(1, 7):
        again.admitted(prompt(ordinal), version=3, deadline=5)
    await again.close()

    third = Ledger(tmp_path / "ledger.sqlite", attempt=3)
    await third.roll_back(tmp_path / "snapshot", step=1, next_ordinal=7, again=[1, 2, 3, 4, 5, 6])
    await third.close()
    assert made_again(third.path) == lost + first + [(o, 2, "rolled back", "running") for o in range(1, 7)]


def test_only_requests_of_training_are_for_a_prompt_of_the_ledger() -> None:
    asked = [EpisodeId(TRAINING, *which) for which in ((12, 0), (3, 0), (3, 1), (3, 1 << 20))]
    assert ordinals_of([*asked, EpisodeId(validation_of("held-out"), 5, 0)]) == [3, 12]


async def test_a_run_that_was_stopped_and_goes_on_makes_nothing_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    for ordinal in range(3):
        ledger.admitted(prompt(ordinal), version=0, deadline=1)
    ledger.finished(1)
    await ledger.snapshot(tmp_path / "snapshot")
    await ledger.close()
    for attempt in (2, 3):
        again = Ledger(tmp_path / "ledger.sqlite", attempt)
        await again.roll_back(tmp_path / "snapshot", step=0, next_ordinal=3, again=[0, 2])
        await again.close()
    assert made_again(again.path) == []


async def test_without_its_own_file_the_snapshot_says_what_was_made_again(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "first.sqlite", attempt=1)
    first.admitted(prompt(0), version=0, deadline=0)
    first.resampled([0], "engine lost")
    await first.snapshot(tmp_path / "snapshot")
    await first.close()
    second = Ledger(tmp_path / "second.sqlite", attempt=2)
    await second.roll_back(tmp_path / "snapshot", step=0, next_ordinal=1, again=[0])
    await second.close()
    assert made_again(second.path) == [(0, 1, "engine lost", "running")]


async def test_the_account_is_of_the_surviving_lineage(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    for ordinal in range(6):
        ledger.admitted(prompt(ordinal), version=0, deadline=2)
    ledger.trained([group(0, [1, 2, 2], 1.0), group(1, [2], 0.0)], step=1, version=2)
    ledger.dropped(group(2, [0, 0, 0, 0], 0.5), "uniform")
    await ledger.snapshot(tmp_path / "snapshot")
    before = ledger.account
    # Lost with its process.
    ledger.trained([group(3, [0], 0.0)], step=2, version=3)
    ledger.dropped(group(4, [2, 2], 0.5), "uniform")
    ledger.dropped(group(5, [2], 0.0), "too long")
    await ledger.close()
    assert ledger.account.ages == AgeCounts(oldest={0: 1, 1: 1, 3: 1}, tokens={0: 3, 1: 1, 3: 1})
    assert ledger.account.ended == (
        EndedGroups(groups=3, samples=3, response_length=5 / 3, reward=1 / 3),
        {
            "too long": EndedGroups(groups=1, samples=1, response_length=1, reward=0.0),
            "uniform": EndedGroups(groups=2, samples=2, response_length=3, reward=0.5),
        },
    )

    again = Ledger(tmp_path / "ledger.sqlite", attempt=2)
    assert again.account == ledger.account
    await again.roll_back(tmp_path / "snapshot", step=1, next_ordinal=6, again=[3, 4, 5])
    assert again.account == before
    # Numbers went on meanwhile; ages count from where the lineage goes on.
    again.trained([group(3, [8, 9], 1.0)], step=2, version=9)
    await again.close()
    assert again.account.ages == AgeCounts(oldest={0: 1, 1: 2}, tokens={0: 4, 1: 2})
    assert again.account.ended == (
        EndedGroups(groups=3, samples=3, response_length=2, reward=2 / 3),
        {"uniform": EndedGroups(groups=1, samples=1, response_length=4, reward=0.5)},
    )


async def test_without_its_own_file_the_snapshot_is_enough(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "first.sqlite", attempt=1)
    first.admitted(prompt(0), version=0, deadline=0)
    await first.announce(5, step=0)
    await first.snapshot(tmp_path / "snapshot")
    await first.close()
    second = Ledger(tmp_path / "second.sqlite", attempt=2)
    assert await second.roll_back(tmp_path / "snapshot", step=0, next_ordinal=1, again=[0]) == 5
    await second.close()
    assert rows(second.path, "ordinal, state") == [(0, "running")]


@pytest.mark.parametrize("left", [None, 0o644])
async def test_nobody_else_may_read_or_lock_it(tmp_path: Path, left: int | None) -> None:
    path = tmp_path / "ledger.sqlite"
    if left is not None:
        path.touch()
        path.chmod(left)
    ledger = Ledger(path, attempt=1)
    await ledger.announce(1, step=0)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    await ledger.close()
    assert modes == dict.fromkeys(("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"), 0o600)


async def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_text("something else, and long enough to be looked at as a database file" * 20)
    with pytest.raises(OutputError, match=r"ledger\.sqlite: file is not a database; .*last checkpoint, or choose an"):
        Ledger(path, attempt=1)


async def test_a_ledger_of_which_half_is_lost_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, attempt=1)
    for ordinal in range(2000):
        ledger.admitted(prompt(ordinal), version=0, deadline=0)
    await ledger.close()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(OutputError, match=r"move ledger\.sqlite, ledger\.sqlite-wal and ledger\.sqlite-shm away"):
        await Ledger(path, attempt=2).roll_back(None, step=0, next_ordinal=0, again=[])


async def test_a_ledger_of_another_version_of_rljob_is_named(tmp_path: Path) -> None:
    older = tmp_path / "older"
    with sqlite3.connect(older) as database:
        database.execute("CREATE TABLE groups (ordinal INTEGER PRIMARY KEY)")
    with pytest.raises(OutputError, match="older: it was written by another version of rljob; move it away"):
        Ledger(older, attempt=1)
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    with pytest.raises(CheckpointError, match=r"older was written by another version of rljob: continue with that"):
        await ledger.roll_back(older, step=2, next_ordinal=1, again=[])
    await ledger.snapshot(tmp_path / "snapshot")
    await ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite", attempt=2)
    assert await again.roll_back(tmp_path / "snapshot", step=0, next_ordinal=0, again=[]) == 0
    await again.close()


async def test_a_ledger_of_another_run_is_named(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    ledger.admitted(prompt(0), version=0, deadline=1)
    ledger.trained([group(0, [0], 1.0)], step=5, version=4)
    ledger.write()
    with pytest.raises(CheckpointError, match=r"ledger\.sqlite does not belong to the checkpoint of step 2: 1 groups"):
        await ledger.roll_back(None, step=2, next_ordinal=1, again=[])
    await ledger.close()


async def test_who_opened_the_file_last_is_the_only_one_that_writes(tmp_path: Path) -> None:
    """A driver that was stopped with rows in hand comes back when another has taken over its run."""
    stopped = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    stopped.admitted(prompt(0), version=0, deadline=1)
    stopped.write()
    await stopped.highest_version()  # after the thread has written
    stopped.admitted(prompt(1), version=0, deadline=1)
    # Its count starts anew where the file with the attempts is gone.
    other = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    other.admitted(prompt(1), version=5, deadline=6)
    other.finished(1)
    other.write()
    await other.highest_version()
    stopped.write()
    stopped.command(Desired(generation=1, attempt=1))
    with pytest.raises(FencedError, match=r"another driver has opened .*; this one no longer saves or publishes"):
        await stopped.roll_back(None, step=0, next_ordinal=0, again=[])
    await stopped.close()
    await other.close()
    assert rows(other.path, "ordinal, state, admitted_version") == [(0, "running", 0), (1, "finished", 5)]
    with sqlite3.connect(other.path) as database:
        assert database.execute("SELECT * FROM commands").fetchall() == []


def limit(ledger: Ledger, pages: int) -> None:
    """SQLite itself then says that the disk is full."""
    ledger._thread.submit(ledger._connection.execute, f"PRAGMA max_page_count = {pages}").result()


@pytest.mark.parametrize("noticed", ["write", "snapshot", "close"])
async def test_what_is_wrong_with_a_row_is_not_kept_from_the_run(tmp_path: Path, noticed: str) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    wrong = group(0, [1], 1.0)
    made = wrong.episodes[0].leaves[0].tokens
    object.__setattr__(made, "versions", None)
    ledger.trained([wrong], step=1, version=1)
    if noticed == "write":
        ledger.write()
        await ledger.highest_version()  # after the thread has looked at it
        with pytest.raises(AttributeError, match="size"):
            ledger.write()
    elif noticed == "snapshot":
        with pytest.raises(AttributeError, match="size"):
            await ledger.snapshot(tmp_path / "snapshot.sqlite")
        assert not (tmp_path / "snapshot.sqlite").exists()
    with pytest.raises(AttributeError, match="size"):
        await ledger.close()


async def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", attempt=1)
    ledger.admitted(prompt(0), version=0, deadline=1)
    ledger.write()
    limit(ledger, 1)
    for step in range(1, 4):
        for ordinal in range(step * 100, step * 100 + 100):
            ledger.admitted(prompt(ordinal), version=0, deadline=1)
            ledger.trained([group(ordinal, [0], 1.0)], step=step, version=0)
        ledger.write()
    ledger.command(Desired(generation=1, attempt=1))
    with pytest.raises(OutputError, match=r"cannot write the ledger .*ledger\.sqlite: database or disk is full"):
        await ledger.snapshot(tmp_path / "snapshot")
    assert caplog.text.count("ledger.sqlite (database or disk is full): its rows are kept") == 1
    assert len(rows(ledger.path, "ordinal")) < 301
    limit(ledger, 1 << 20)
    await ledger.snapshot(tmp_path / "snapshot")
    for path in (ledger.path, tmp_path / "snapshot"):
        assert len(rows(path, "ordinal")) == 301
        assert rows(path, "trained_step")[1:] == [(1,)] * 100 + [(2,)] * 100 + [(3,)] * 100
        with sqlite3.connect(path) as database:
            assert database.execute("SELECT generation FROM commands").fetchall() == [(1,)]
    await ledger.close()
