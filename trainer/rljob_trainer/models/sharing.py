"""Makes sure that the nodes of a cluster find the model's folder: on storage that all of them mount."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.folder import ModelFolder


def on_shared_storage(model: ModelFolder, storage: Path, target: Path | None) -> ModelFolder:
    """``model`` itself when all its files lie below ``storage``, else a copy of it in ``target``.

    ``target`` is a folder on that storage; None when the job has none. Then only a folder that the image may hold on
    every node will do, and what this process has made or fetched raises ``JobFileError``.
    """
    files = [path for path in model.path.iterdir() if path.is_file()]
    if all(path.resolve().is_relative_to(storage.resolve()) for path in files):
        return model
    if target is None:
        raise JobFileError(
            f"spec.model: the model is in {model.path}, where other nodes cannot see it; put it into a volume and "
            "write pvc://claim/path, or set spec.checkpoint.uri to pvc://claim/path, so that it can be copied there"
        )
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in files:
        shutil.copyfile(path, partial / path.name)  # what a link leads to
    if target.is_symlink():
        target.unlink()
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return dataclasses.replace(model, path=target)
