"""An engine on a node that has not got the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rljob_trainer.errors import EngineError
from rljob_trainer.models.sharing import send_model
from rljob_trainer.rollout import actor
from rljob_trainer.rollout.actor import EngineActor, EngineSpec, build_engine
from rljob_trainer.rollout.protocol import Engine
from rljob_trainer.storage.bucket import ObjectBucket


def test_an_engine_takes_the_model_from_a_bucket(llama_folder: Path, object_store: Any, tmp_path: Path) -> None:
    bucket = ObjectBucket(object_store.place())
    send_model(llama_folder, bucket)
    there = tmp_path / "node" / "model"
    engine = build_engine(EngineSpec("torch", str(there), address=bucket.address))
    assert (there / "config.json").read_bytes() == (llama_folder / "config.json").read_bytes()
    assert engine.version == 0


def test_an_engine_that_ends_before_its_loop_is_there_is_an_engine_that_has_ended(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(spec: EngineSpec, ended: Callable[[EngineError], None]) -> Engine:
        told = threading.Thread(target=ended, args=(EngineError("its core is gone"),), daemon=True)
        told.start()
        # Time to tell whoever is there already.
        told.join(0.2)
        return build_engine(spec)

    monkeypatch.setattr(actor, "build_engine", built)
    made = EngineActor("3", EngineSpec("torch", str(llama_folder)))
    with ThreadPoolExecutor(1) as waiting, pytest.raises(EngineError, match=r"engine 3 failed.*its core is gone"):
        waiting.submit(made.wait_until_ended).result(60)
