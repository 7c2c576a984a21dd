"""A run's files are sent again and again, by the attempt that may write and by no other."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_trainer.driver.run import _keep_quietly
from rljob_trainer.errors import BucketError
from rljob_trainer.record import place as state
from rljob_trainer.record.fence import Fence
from rljob_trainer.record.output import OutputFolder
from rljob_trainer.storage.bucket import ObjectBucket


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_SEND_SECONDS", 0.01)


async def until(there) -> None:
    async with asyncio.timeout(30):
        while not there():  # noqa: ASYNC110  (a store has no event)
            await asyncio.sleep(0.01)


async def test_an_attempt_that_was_given_up_sends_no_files(object_store, tmp_path: Path) -> None:
    address, asked = object_store.place(), 0
    with OutputFolder(tmp_path) as output:
        kept = state.state_of(output, address, keep=1)
        first = Fence.take(kept.attempt)

        def may_write() -> None:
            nonlocal asked
            asked += 1
            first.check()

        (tmp_path / "metrics.jsonl").write_text("first")
        async with state.kept_up_to_date(kept, may_write):
            await until(lambda: ObjectBucket(address).read("metrics.jsonl") == b"first")
            Fence.take(kept.attempt)
            ObjectBucket(address).write("metrics.jsonl", b"second")
            await until(lambda: first.lost)
            (tmp_path / "metrics.jsonl").write_text("stale")
            before = asked
            await asyncio.sleep(0.2)
            assert asked == before
    assert ObjectBucket(address).read("metrics.jsonl") == b"second"


@pytest.mark.parametrize("refusal", [BucketError("s3://bucket: no"), OSError(errno.ESTALE, "stale file handle")])
async def test_what_cannot_be_sent_once_is_sent_later_and_ends_nothing(
    object_store, tmp_path: Path, refusal: Exception
) -> None:
    address, refusals = object_store.place(), iter([refusal])
    with OutputFolder(tmp_path) as output:
        kept = state.state_of(output, address, keep=1)
        (tmp_path / "metrics.jsonl").write_text("1")

        def may_write() -> None:
            for refusal in refusals:
                raise refusal

        async with state.kept_up_to_date(kept, may_write):
            await until(lambda: ObjectBucket(address).read("metrics.jsonl") == b"1")


async def test_a_run_s_end_does_not_wait_for_a_store_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    hangs = threading.Event()
    store: Any = SimpleNamespace(place="s3://bucket/run", keep=hangs.wait)
    try:
        await _keep_quietly(store, 0.05)
    finally:
        hangs.set()
    assert "s3://bucket/run did not accept the run's last files within 0 s" in caplog.text
