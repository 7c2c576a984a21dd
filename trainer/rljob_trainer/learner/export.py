"""Writes a model as a Hugging Face folder: safetensors in the source's dtype, and the source's other files as they are.

Tensors are gathered one at a time and files are closed as they fill, so memory stays at one file's size.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rljob_trainer.errors import UnsavedError
from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.published import file_names
from rljob_trainer.learner.published import tensors as tensors_of
from rljob_trainer.models.weights import weight_files

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".safetensors.index.json")
FILE_BYTES = 4 << 30


def write_folder(
    folder: Path,
    source: Path,
    parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    layout: Layout,
    *,
    writer: bool,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Exports this rank's parameters, under Hugging Face names, and those of the others into ``folder`` (made if
    missing).

    All ranks call it; the one with ``writer`` writes. ``source`` is the folder the model came from. ``config.json``
    is written last: without it the folder is not a model. Raises ``CheckpointError`` when writing fails.
    """
    dtypes = source_dtypes(source)
    fallback = next(iter(dtypes.values()), torch.float32)
    heads = {head.name: file_names(head.name, head.shape) for head in layout.heads(parameters())}
    stored = [(name, dtypes.get(name, fallback), math.prod(shape)) for own in heads.values() for name, shape in own]
    files = _files(stored, file_bytes)
    whole = layout.gather(parameters(), lambda name: dtypes.get(heads[name][0][0], fallback))
    gathered = (part for name, tensor in whole for part in tensors_of(name, tensor))
    try:
        if writer:
            folder.mkdir(parents=True, exist_ok=True)
            _copy_others(source, folder)
        for file, contents in files.items():
            tensors = {}
            for expected, _ in contents:
                name, tensor = next(gathered)
                assert name == expected, (name, expected)
                if writer:
                    tensors[name] = tensor.cpu().contiguous()
            if writer:
                save_file(tensors, folder / file, metadata={"format": "pt"})
        if writer:
            if len(files) > 1:
                index = {name: file for file, contents in files.items() for name, _ in contents}
                total = sum(count * dtype.itemsize for _, dtype, count in stored)
                document = {"metadata": {"total_size": total}, "weight_map": index}
                (folder / "model.safetensors.index.json").write_text(json.dumps(document, indent=2))
            shutil.copyfile(source / "config.json", folder / "config.json")
            for file in files:  # which safetensors lets nobody but the owner read
                shutil.copymode(folder / "config.json", folder / file)
    except OSError as error:
        raise UnsavedError(f"the model cannot be written to {folder}: {error}") from error


def source_dtypes(source: Path) -> dict[str, torch.dtype]:
    """The dtype of every floating-point tensor in a folder's safetensors files, read from their headers."""
    result: dict[str, torch.dtype] = {}
    for file in weight_files(source):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                dtype = _DTYPES.get(opened.get_slice(name).get_dtype())
                if dtype is not None:  # else no parameter: a table of whole numbers
                    result[name] = dtype
    return result


def stored_dtype(source: Path) -> torch.dtype:
    """The narrowest dtype that holds all tensors of a folder exactly: half precision if all share it, else float32."""
    found = set(source_dtypes(source).values())
    return found.pop() if len(found) == 1 else torch.float32


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def _files(tensors: list[tuple[str, torch.dtype, int]], file_bytes: int) -> dict[str, list[tuple[str, torch.dtype]]]:
    """Which tensors go into which file, under the names that transformers and vLLM expect."""
    groups: list[list[tuple[str, torch.dtype]]] = [[]]
    size = 0
    for name, dtype, count in tensors:
        needed = count * dtype.itemsize
        if groups[-1] and size + needed > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append((name, dtype))
        size += needed
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def _copy_others(source: Path, folder: Path) -> None:
    """Tokenizer, chat template, generation settings, code: everything but weights and ``config.json``."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
