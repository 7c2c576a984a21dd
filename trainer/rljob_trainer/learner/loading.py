"""Weights from a folder's files into a model that is not there yet, one module at a time.

Ranks that share a machine would each hold the whole model before they cut it up, if they read it as one: eight times
61 GB for a model of 30 thousand million parameters. So a model that will be cut up is made without weights
(``skeleton``), and each of its layers is filled just before it is cut: what a rank holds at a time is its shards and
one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from rljob_trainer.errors import JobFileError
from rljob_trainer.learner.published import StackedMatrix, pieces
from rljob_trainer.models.weights import weight_files


def skeleton() -> AbstractContextManager[None]:
    """Inside, modules are made without memory for their parameters. Buffers, which no file has, are what they are."""
    from accelerate import init_empty_weights

    made: Callable[..., AbstractContextManager[None]] = init_empty_weights
    return made(include_buffers=False)


class FolderWeights:
    """The tensors of a Hugging Face folder, by the names that transformers has for a model's parameters."""

    def __init__(self, folder: Path, field: str = "spec.model") -> None:
        """Reads the headers of the folder's files. ``field``: of the job file, for messages. Raises ``JobFileError``
        when it has none."""
        self._folder = folder
        self._field = field
        self._files: dict[str, Any] = {}
        for file in weight_files(folder):
            opened: Any = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def fill(self, module: nn.Module, named: Callable[[nn.Parameter], str], dtype: torch.dtype) -> None:
        """Gives those parameters of ``module`` that have no memory yet their values, in ``dtype``.

        ``named`` tells a parameter's name in the whole model. What several modules share stays shared. Raises
        ``JobFileError`` naming a tensor that the files lack.
        """
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for owner in module.modules():
            for own_name, parameter in list(owner._parameters.items()):
                if parameter is None or not parameter.is_meta:
                    continue
                if parameter not in filled:
                    values = self._values(named(parameter), tuple(parameter.shape)).to(dtype)
                    filled[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                owner._parameters[own_name] = filled[parameter]

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of the files by the name that it has there. Raises ``JobFileError`` for a missing one, and for one
        of another shape."""
        if name not in self._files:
            raise JobFileError(
                f"{self._field}: {self._folder} lacks the tensor {name}, which would start random; copy the model again"
            )
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise JobFileError(
                f"{self._field}: in {self._folder} the tensor {name} has the shape {list(tensor.shape)} instead of "
                f"{list(shape)}; copy the model again"
            )
        return tensor

    def _values(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        parts = list(pieces(name, shape))
        if not parts:
            return self.tensor(name, shape)
        whole: torch.Tensor | None = None
        for part in parts:
            matrix = self.tensor(part.name, _shape_of(part, shape))
            whole = matrix.new_empty(shape) if whole is None else whole
            whole[part.expert, part.rows] = matrix
        assert whole is not None
        return whole


def _shape_of(piece: StackedMatrix, stack: tuple[int, ...]) -> tuple[int, ...]:
    return (piece.rows.stop - piece.rows.start, stack[2])
