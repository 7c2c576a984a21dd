"""The tensors of a model folder themselves, as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from rljob_trainer.models.weights import weight_files


def tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and values, one at a time, whatever the files are called. Raises ``JobFileError`` where one lacks."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_tensor(name)
