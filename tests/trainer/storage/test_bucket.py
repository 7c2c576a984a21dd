"""A folder in a real object store: what is written is read, listed, moved and removed, and failures name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_trainer.errors import BucketError, UnreachableError, exit_code_of
from rljob_trainer.learner import state
from rljob_trainer.storage.bucket import ObjectBucket


def test_what_is_written_is_read_and_listed_at_once(object_store, tmp_path: Path) -> None:
    bucket = ObjectBucket(object_store.place() + "/")
    assert bucket.files() == {}
    assert bucket.read("a.json") is None
    bucket.write("a.json", b"first")
    before = bucket.files()["a.json"]
    bucket.write("a.json", b"later")
    after = bucket.files()["a.json"]
    assert (before.size, after.size) == (5, 5)
    assert before.tag != after.tag
    assert ObjectBucket(bucket.address).read("a.json") == b"later"

    (tmp_path / "big").write_bytes(bytes(range(256)) * (1 << 16))
    bucket.below("deep").upload(tmp_path / "big", "er/big")
    assert list(bucket.files()) == ["a.json", "deep/er/big"]
    bucket.download("deep/er/big", tmp_path / "here" / "big")
    assert (tmp_path / "here" / "big").read_bytes() == (tmp_path / "big").read_bytes()


def test_a_place_does_not_see_others_that_begin_alike(object_store) -> None:
    bucket = ObjectBucket(object_store.place())
    ObjectBucket(f"{bucket.address}-other").write("x", b"1")
    assert bucket.files() == {}


def test_moving_and_removing(object_store) -> None:
    bucket = ObjectBucket(object_store.place())
    for name in ("a", "b/c"):
        bucket.write(name, name.encode())
    bucket.move(["a", "b/c"], bucket.below("aside"))
    assert list(bucket.files()) == ["aside/a", "aside/b/c"]
    assert bucket.read("aside/b/c") == b"b/c"
    bucket.remove(["aside/a", "gone already"])
    assert list(bucket.files()) == ["aside/b/c"]
    bucket.remove([])


@pytest.mark.parametrize("act", [ObjectBucket.files, lambda b: b.write("x", b"1")])
def test_a_bucket_that_does_not_exist_is_named(object_store, act) -> None:
    with pytest.raises(BucketError, match=r"s3://no-such-bucket/path: .*check the address, the network") as refused:
        act(ObjectBucket("s3://no-such-bucket/path"))
    assert exit_code_of(refused.value) == 1


def test_a_store_that_is_not_there_is_tried_again(object_store, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        for act in (
            lambda: ObjectBucket("s3://bucket/path").files(),
            lambda: state.save("s3://bucket/learner", [], state.StateOwner("fsdp2", 0, 1)),
        ):
            with pytest.raises(UnreachableError, match="EndpointConnectionError") as away:
                act()
            assert exit_code_of(away.value) == 75
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_an_unknown_kind_of_store_is_an_error_of_ours() -> None:
    with pytest.raises(BucketError, match=r"xyz://bucket: cannot list objects: .*Protocol not known"):
        ObjectBucket("xyz://bucket").files()
