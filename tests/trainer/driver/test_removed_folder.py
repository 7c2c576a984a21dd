"""An output folder that is removed while a run writes into it is called that, and is not made again."""

from __future__ import annotations

import asyncio
import io
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_job import copy_job

from rljob_api import RLJob, resolve
from rljob_trainer.driver import run
from rljob_trainer.record.fence import FILE, Fence, RemovedError
from rljob_trainer.storage.small import LocalFile
from rljob_trainer.telemetry.plain import PlainView
from rljob_trainer.telemetry.run_folder import SampleRow
from rljob_trainer.telemetry.sinks import JsonlSink


def test_whoever_checks_the_fence_hears_that_the_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    fence = Fence.take(LocalFile(folder / FILE))
    fence.check()
    shutil.rmtree(folder)
    for look in (fence.check, lambda: fence.announce(1)):
        with pytest.raises(RemovedError, match=r"run/attempt.json is gone: the folder was removed, emptied or renamed"):
            look()
    assert fence.lost
    assert not folder.exists()


def test_samples_do_not_make_a_removed_folder_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sink = JsonlSink(folder)
    shutil.rmtree(folder)
    sink.samples(1, [SampleRow(source="a", prompt="p", response="r")])
    sink.close()
    assert not folder.exists()


def test_a_run_notices_by_itself_that_its_folder_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While it waits for something else."""
    folder, ended = tmp_path / "run", threading.Event()

    def removed(*_: Any) -> None:
        while folder.exists():  # the status is written over and over meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        ended.wait(20)

    monkeypatch.setattr(run, "read_inputs", removed)
    monkeypatch.setattr(run, "_STATUS_SECONDS", 0.0)
    job = resolve(RLJob.model_validate(copy_job()))

    async def main() -> None:
        try:
            await run.run_job(job, run.RunOptions(folder, tmp_path), PlainView(io.StringIO()))
        finally:
            ended.set()

    with pytest.raises(RemovedError, match=r"attempt\.json is gone: the folder was removed"):
        asyncio.run(main())
    assert not folder.exists()
