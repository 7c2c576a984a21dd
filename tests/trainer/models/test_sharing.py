"""A model reaches storage that all nodes see: as it is, as a copy of what links lead to, or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.folder import ModelFolder
from rljob_trainer.models.sharing import fetch_model, on_shared_storage, send_model
from rljob_trainer.storage.bucket import ObjectBucket


def folder(path: Path) -> ModelFolder:
    path.mkdir(parents=True, exist_ok=True)
    facts = {"family": "llama", "context_length": 8, "vocabulary_size": 4, "hidden_size": 32, "layers": 1, "heads": 1}
    more = {
        "kv_heads": 1,
        "head_dim": 32,
        "tied": True,
        "parameters": 1,
        "eos_token_ids": (1,),
        "pad_token_id": 1,
        "untrainable": None,
        "unsupported": None,
        "unreplayable": None,
    }
    return ModelFolder(path=path, **facts, **more)  # type: ignore[arg-type]


def test_what_lies_there_is_used_there(tmp_path: Path) -> None:
    model = folder(tmp_path / "mnt" / "claim" / "model")
    (model.path / "config.json").write_text("{}")
    assert on_shared_storage(model, tmp_path / "mnt", tmp_path / "mnt" / "run" / "model") is model


def test_links_out_of_it_are_copied(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "blob").write_text("weights")
    target = tmp_path / "mnt" / "run" / "model"
    model = folder(target)
    (target / "model.safetensors").symlink_to(cache / "blob")
    shared = on_shared_storage(model, tmp_path / "mnt", target)
    assert shared.path == target
    assert not (target / "model.safetensors").is_symlink()
    assert (target / "model.safetensors").read_text() == "weights"


def test_without_a_place_for_a_copy_it_is_refused(tmp_path: Path) -> None:
    model = folder(tmp_path / "cache" / "model")
    (model.path / "config.json").write_text("{}")
    with pytest.raises(JobFileError, match="which other nodes cannot read"):
        on_shared_storage(model, tmp_path / "mnt", None)


def test_a_node_takes_the_model_from_the_bucket(object_store, tmp_path: Path) -> None:
    blobs, here, there = tmp_path / "blobs", tmp_path / "here", tmp_path / "node" / "run" / "model"
    blobs.mkdir()
    (blobs / "weights").write_bytes(b"w" * 1000)
    here.mkdir()
    (here / "config.json").write_text("{}")
    (here / "model.safetensors").symlink_to(blobs / "weights")
    bucket = ObjectBucket(object_store.place())
    with pytest.raises(JobFileError, match="no complete model in s3://"):
        fetch_model(there, bucket.address)
    send_model(here, bucket)

    with ThreadPoolExecutor() as threads:  # ranks and engines of one node
        list(threads.map(lambda _: fetch_model(there, bucket.address), range(4)))
    assert (there / "model.safetensors").read_bytes() == b"w" * 1000
    assert (there / "config.json").read_text() == "{}"

    bucket.remove(bucket.files())
    fetch_model(there, bucket.address)  # it is there


def test_a_model_is_sent_once_and_again_when_it_is_another(object_store, tmp_path: Path) -> None:
    bucket = ObjectBucket(object_store.place())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "old.safetensors").write_bytes(b"1" * 1000)
    send_model(tmp_path, bucket)
    bucket.write("config.json", b"mark")
    send_model(tmp_path, bucket)
    assert bucket.read("config.json") == b"mark"

    (tmp_path / "old.safetensors").rename(tmp_path / "new.safetensors")
    (tmp_path / "new.safetensors").write_bytes(b"2" * 1000)
    send_model(tmp_path, bucket)
    assert bucket.read("config.json") == b"{}"
    assert bucket.read("new.safetensors") == b"2" * 1000
    assert bucket.read("old.safetensors") is None
