"""A checkpoint in an object store is one when its manifest is there; what is wrong with it is noticed and named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import s3fs

from rljob_trainer.checkpoints.bucket import BucketCheckpoints
from rljob_trainer.checkpoints.checkpoint import Checkpoint, driver_state, latest
from rljob_trainer.checkpoints.finding import find_checkpoint, holds_checkpoints
from rljob_trainer.errors import BucketError, CheckpointError, UnsavedError
from rljob_trainer.storage.bucket import ObjectBucket

pytestmark = pytest.mark.integrity


@pytest.fixture
def bucket(object_store) -> ObjectBucket:
    return ObjectBucket(object_store.place())


@pytest.fixture
def make(bucket: ObjectBucket, tmp_path: Path) -> Callable[..., BucketCheckpoints]:
    def make(keep: int = 3, **more) -> BucketCheckpoints:
        return BucketCheckpoints(bucket.below("checkpoints"), keep, tmp_path / "scratch", **more)

    return make


async def write(store: BucketCheckpoints, step: int, **more) -> Checkpoint:
    async def save(place: str) -> None:
        ObjectBucket(place).write("weights", bytes([step % 256]) * 1000)

    async def rest(folder: Path) -> None:
        (folder / "groups.npz").write_text(f"groups of {step}")

    return await store.write(step, {"step": step}, save, rest, **more)


async def test_what_was_written_is_read_back(make, bucket: ObjectBucket) -> None:
    written = await write(make(), 7)
    newest = latest(make(), report=pytest.fail)
    assert newest == written
    assert newest.step == 7
    assert newest.place.startswith(f"{bucket.address}/checkpoints/step-00000007-")
    assert driver_state(newest.files()) == {"step": 7}
    assert (newest.files() / "groups.npz").read_text() == "groups of 7"
    assert ObjectBucket(newest.learner).read("weights") == b"\x07" * 1000


async def test_the_drivers_part_is_fetched_once_for_all_who_read_it(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the tokens of all open groups."""
    fetched, download = [], ObjectBucket.download

    def counted(self: ObjectBucket, name: str, file: Path) -> None:
        fetched.append(name)
        download(self, name, file)

    await write(make(), 7)
    monkeypatch.setattr(ObjectBucket, "download", counted)
    newest = make().open(7)
    assert {newest.files() for _ in range(3)} == {newest.files()}
    assert sorted(fetched) == ["driver.json", "groups.npz"]


async def test_only_the_last_k_are_kept_in_order_of_steps(make, bucket: ObjectBucket) -> None:
    for step in (5, 9, 10, 100):
        await write(make(keep=2), step)
    assert make().steps() == [10, 100]
    assert {name.split("/")[1][:13] for name in bucket.files()} == {"step-00000010", "step-00000100"}
    await write(make(keep=1), 101)
    assert make().steps() == [101]


async def test_the_same_step_again_replaces_the_one_before(make, bucket: ObjectBucket) -> None:
    await write(make(), 4)
    first = await write(make(), 5)
    second = await write(make(), 5)
    assert first.place != second.place
    assert make().steps() == [4, 5]
    assert make().open(5) == second
    assert not ObjectBucket(first.place).files()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda b, name: b.write(f"{name}/learner/weights", b"x" * 500), "learner/weights has 500 bytes, not 1000"),
        (lambda b, name: b.write(f"{name}/learner/weights", b"x" * 1000), "content of learner/weights has changed"),
        (lambda b, name: b.remove([f"{name}/learner/weights"]), "learner/weights is missing"),
        (lambda b, name: b.write(f"{name}/manifest.json", b'{"format": 1, "st'), "unreadable manifest.json"),
    ],
)
async def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(make, damage, named: str) -> None:
    store = make()
    await write(store, 1)
    newest = await write(store, 2)
    damage(store.bucket, newest.place.rpartition("/")[2])
    with pytest.raises(CheckpointError, match=named):
        store.open(2)
    reports: list[str] = []
    used = latest(store, reports.append)
    assert used is not None
    assert used.step == 1
    assert len(reports) == 1
    assert named in reports[0]


async def test_one_that_another_version_wrote_is_not_stepped_over(make) -> None:
    store = make()
    await write(store, 1)
    newest = await write(store, 2)
    ObjectBucket(newest.place).write("manifest.json", b'{"format": 9, "step": 2, "files": {}}')
    with pytest.raises(CheckpointError, match="has format 9; this version of rljob reads 5"):
        latest(store, pytest.fail)


async def test_a_store_that_does_not_answer_is_no_reason_to_go_back(
    make, object_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        await write(make(), step)
    store = make()
    assert store.steps() == [1, 2]
    monkeypatch.setattr(store, "steps", lambda: [1, 2])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(BucketError, match="EndpointConnectionError"):
            latest(store, pytest.fail)
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


async def test_what_cannot_be_removed_now_is_removed_with_the_next(
    make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise BucketError("s3://bucket: cannot remove objects")

    await write(make(), 1)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectBucket, "remove", refused)
        assert (await write(make(keep=1), 2)).step == 2
    assert "cannot remove objects" in caplog.text
    assert make().steps() == [1, 2]
    await write(make(keep=1), 3)
    assert make().steps() == [3]


async def test_a_write_that_fails_leaves_the_earlier_ones_and_no_rest(make, bucket: ObjectBucket) -> None:
    store = make()
    first = await write(store, 1)

    async def fails(place: str) -> None:
        ObjectBucket(place).write("half", b"1")
        raise CheckpointError("rank 3 has no room")

    with pytest.raises(CheckpointError, match="rank 3 has no room"):
        await store.write(2, {}, fails)

    asked: list[int] = []

    def taken_over() -> None:
        asked.append(len(bucket.files()))
        if len(asked) > 1:
            raise CheckpointError("attempt 2 has taken over")

    sent: list[str] = []
    with pytest.raises(CheckpointError, match="attempt 2"):
        await write(make(before_commit=lambda: sent.append("files")), 2, may_commit=taken_over)
    assert not sent
    assert asked[0] == len(bucket.files()) < asked[1]
    assert {name.split("/")[1] for name in bucket.files()} == {first.place.rpartition("/")[2]}


async def test_a_disk_that_does_not_take_the_drivers_part_is_named(make, tmp_path: Path) -> None:
    """A run goes on after this error (and after no other) and tries the next checkpoint."""
    (tmp_path / "scratch").write_text("no folder")
    with pytest.raises(UnsavedError, match=r"driver's part of the checkpoint of step 3 to .*scratch: Not a directory"):
        await write(make(), 3)
    assert make().steps() == []


async def test_what_a_rank_adds_to_a_write_that_failed_is_removed_when_it_has_ended(make, bucket: ObjectBucket) -> None:
    store, other = make(), "checkpoints/step-00000002-0123abcd/learner/weights"
    bucket.write(other, b"1")
    places: list[str] = []

    async def given_up(place: str) -> None:
        places.append(place)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await store.write(2, {}, given_up)
    ObjectBucket(places[0]).write("late", b"1")
    store.clean_own()
    assert list(bucket.files()) == [other]  # another attempt's, which may be at work on it


async def test_a_store_that_failed_is_not_waited_for_again_at_the_end(make, bucket: ObjectBucket) -> None:
    store, places = make(), []

    async def no_answer(place: str) -> None:
        places.append(place)
        raise BucketError("the store does not answer")

    with pytest.raises(BucketError):
        await store.write(2, {}, no_answer)
    ObjectBucket(places[0]).write("late", b"1")
    store.clean_own()
    assert len(bucket.files()) == 1
    store.clean()  # the next start
    assert not bucket.files()


async def test_what_a_killed_writer_left_is_never_read_and_is_cleaned(make, bucket: ObjectBucket) -> None:
    store = make()
    await write(store, 1)
    bucket.write("checkpoints/step-00000002-0123abcd/learner/weights", b"1")
    assert store.steps() == [1]
    store.clean()
    assert all("step-00000001" in name for name in bucket.files())
    assert latest(store, pytest.fail).step == 1


async def test_a_run_that_is_rolled_back_has_no_later_ones(make) -> None:
    store = make()
    for step in (1, 2, 3):
        await write(store, step)
    store.discard_after(1)
    assert store.steps() == [1]


async def test_what_is_set_aside_outlives_the_next_start_and_as_many_stay_as_are_kept_otherwise(make, bucket) -> None:
    store = make(keep=1)
    await write(make(), 1)
    second = await write(make(), 2)
    third = await write(make(), 3)
    said = store.discard_after(1)
    assert [place.partition(" ")[0] for place in said] == [second.place, third.place]
    store.clean()
    ObjectBucket(second.place).write("manifest.json", ObjectBucket(second.place).read("aside.json"))
    assert make().open(2).place == second.place  # whole, once its manifest has its name again
    ObjectBucket(second.place).remove(["manifest.json"])
    fourth = await write(store, 4)
    assert {name.split("/")[1] for name in bucket.files()} == {
        place.rpartition("/")[2] for place in (third.place, fourth.place)
    }


async def test_what_is_to_be_there_before_it_counts_is_done_before(make, bucket: ObjectBucket) -> None:
    seen: list[list[int]] = []
    await write(make(before_commit=lambda: seen.append(make().steps())), 1)
    assert seen == [[]]


async def test_a_user_names_a_checkpoint_or_a_run(make, bucket: ObjectBucket, tmp_path: Path) -> None:
    assert not holds_checkpoints(bucket.address)
    first = await write(make(), 1)
    second = await write(make(), 2)
    assert holds_checkpoints(bucket.address)
    for place in (bucket.address, f"{bucket.address}/", f"{bucket.address}/checkpoints", second.place):
        assert find_checkpoint(place, tmp_path, pytest.fail) == second
    assert find_checkpoint(first.place, tmp_path, pytest.fail) == first
    assert find_checkpoint(bucket.address, tmp_path, pytest.fail, step=1) == first
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; it has checkpoints of steps \[1, 2\]"):
        find_checkpoint(bucket.address, tmp_path, pytest.fail, step=3)
    with pytest.raises(CheckpointError, match="has no complete checkpoint; pass a checkpoint"):
        find_checkpoint(f"{bucket.address}/samples", tmp_path, pytest.fail)
    with pytest.raises(BucketError, match="no-such-bucket"):
        find_checkpoint("s3://no-such-bucket/x", tmp_path, pytest.fail)
