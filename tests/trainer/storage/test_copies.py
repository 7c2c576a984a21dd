"""A run's files go to a bucket as they change, and come back where the next attempt starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rljob_trainer.storage.bucket import ObjectBucket
from rljob_trainer.storage.copies import Copies


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_files_go_and_come_back(object_store, tmp_path: Path) -> None:
    here, there, bucket = tmp_path / "here", tmp_path / "there", ObjectBucket(object_store.place())
    (here / "samples").mkdir(parents=True)
    for name in ("metrics.jsonl", "samples/step-1.jsonl", "ledger.sqlite", ".lock", "samples/.x.partial"):
        (here / name).write_text(name)
    (here / "model").symlink_to(tmp_path)
    copies = Copies(here, bucket, own=("ledger.sqlite", "model", "checkpoints"))
    copies.send()
    assert list(bucket.files()) == ["metrics.jsonl", "samples/step-1.jsonl"]

    bucket.write("checkpoints/x", b"not a file of the run")
    Copies(there, bucket, own=("checkpoints",)).bring()
    assert files(there) == {"metrics.jsonl": "metrics.jsonl", "samples/step-1.jsonl": "samples/step-1.jsonl"}


def test_only_what_has_changed_is_sent(object_store, tmp_path: Path) -> None:
    bucket = ObjectBucket(object_store.place())
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    copies = Copies(tmp_path, bucket, own=())
    copies.send()
    bucket.write("a", b"mark")
    bucket.write("b", b"mark")
    (tmp_path / "b").write_text("22")
    copies.send()
    assert (bucket.read("a"), bucket.read("b")) == (b"mark", b"22")


def test_what_was_brought_is_not_sent_again(object_store, tmp_path: Path) -> None:
    bucket = ObjectBucket(object_store.place())
    bucket.write("a", b"1")
    copies = Copies(tmp_path, bucket, own=())
    copies.bring()
    bucket.write("a", b"mark")
    copies.send()
    assert bucket.read("a") == b"mark"


def test_what_is_gone_here_goes_there_only_when_all_is_sent(object_store, tmp_path: Path) -> None:
    bucket = ObjectBucket(object_store.place())
    (tmp_path / "a").write_text("1")
    copies = Copies(tmp_path, bucket, own=("checkpoints",))
    copies.send()
    bucket.write("checkpoints/x", b"1")
    bucket.write("earlier-1/checkpoints/x", b"1")
    (tmp_path / "earlier-1").mkdir()
    (tmp_path / "a").rename(tmp_path / "earlier-1" / "a")
    copies.send()
    others = ["checkpoints/x", "earlier-1/a", "earlier-1/checkpoints/x"]
    assert list(bucket.files()) == ["a", *others]
    copies.send_all()
    assert list(bucket.files()) == others


def test_folders_of_others_are_not_looked_into_and_may_go_at_any_moment(
    object_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, scan = ObjectBucket(object_store.place()), os.scandir
    for name in ("samples/a", "samples/gone/b", "checkpoints/writing/driver.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    looked_into = []

    def scandir(path):
        if isinstance(path, int):  # by rmtree
            return scan(path)
        looked_into.append(Path(path).name)
        if looked_into[-1] == "gone":
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    Copies(tmp_path, bucket, ("checkpoints",)).send()
    monkeypatch.undo()
    assert set(looked_into) >= {"samples", "gone"}
    assert not {"checkpoints", "writing"} & set(looked_into)
    assert list(bucket.files()) == ["samples/a"]
