"""An engine on a node that has not got the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljob_trainer.models.sharing import send_model
from rljob_trainer.rollout.actor import EngineSpec, build_engine
from rljob_trainer.storage.bucket import ObjectBucket


def test_an_engine_takes_the_model_from_a_bucket(llama_folder: Path, object_store: Any, tmp_path: Path) -> None:
    bucket = ObjectBucket(object_store.place())
    send_model(llama_folder, bucket)
    there = tmp_path / "node" / "model"
    engine = build_engine(EngineSpec("torch", str(there), address=bucket.address))
    assert (there / "config.json").read_bytes() == (llama_folder / "config.json").read_bytes()
    assert engine.version == 0
