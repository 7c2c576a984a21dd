"""Groups that a checkpoint finds begun and not trained: the tokens they have, with log-probs and versions, in one file.

Finished groups are kept the same way: an engine returns a request that needs nothing more as it came, and rewards are
computed again. Flat arrays without pickle: sample by sample ``ordinals``, ``indices``, ``lengths`` (all ``[S]``), and
``token_ids``, ``log_probs``, ``versions`` (all ``[tokens]``).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from rljob_trainer.errors import CheckpointError
from rljob_trainer.samples import FloatArray, IntArray

FILE = "groups.npz"


@dataclass(frozen=True, slots=True)
class Begun:
    """What one sample has so far; all arrays ``[T]``."""

    token_ids: IntArray
    log_probs: FloatArray
    versions: IntArray


BegunGroups = Mapping[int, Mapping[int, Begun]]
"""Ordinal -> index of the sample -> what it has."""

_Arrays = Iterable[np.ndarray[Any, Any]]
_REST_BYTES = 16 << 20
"""Read between two calls of ``rest``."""


def write(groups: BegunGroups, folder: Path, rest: Callable[[], None] = lambda: None) -> None:
    """Array after array, sample after sample: no copy of all of them. Raises ``OSError``.

    ``rest`` is called now and then, to let go of what has been read (``rollout/shelf.py``).
    """
    samples = [(ordinal, index, begun) for ordinal, group in groups.items() for index, begun in group.items()]
    ordinals = np.array([ordinal for ordinal, _, _ in samples], np.int64)
    indices = np.array([index for _, index, _ in samples], np.int64)
    lengths = np.array([len(begun.token_ids) for _, _, begun in samples], np.int64)
    columns: dict[str, tuple[Any, int, _Arrays]] = {
        "ordinals": (np.int64, len(samples), [ordinals]),
        "indices": (np.int64, len(samples), [indices]),
        "lengths": (np.int64, len(samples), [lengths]),
        "token_ids": (np.int32, int(lengths.sum()), (begun.token_ids for _, _, begun in samples)),
        "log_probs": (np.float32, int(lengths.sum()), (begun.log_probs for _, _, begun in samples)),
        "versions": (np.int32, int(lengths.sum()), (begun.versions for _, _, begun in samples)),
    }
    with zipfile.ZipFile(folder / FILE, "w") as file:
        for name, (dtype, length, arrays) in columns.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
                np.lib.format.write_array_header_1_0(entry, header)
                _write_data(entry, arrays, dtype, rest)


def _write_data(entry: IO[bytes], arrays: _Arrays, dtype: Any, rest: Callable[[], None]) -> None:
    unrested = 0
    for array in arrays:
        entry.write(array.astype(dtype, copy=False).tobytes())
        unrested += array.nbytes
        if unrested >= _REST_BYTES:
            rest()
            unrested = 0
    rest()


def read(folder: Path, *, versions_later: int) -> dict[int, dict[int, Begun]]:
    """The groups of a checkpoint, empty when it has none. Raises ``CheckpointError``.

    ``versions_later`` is added to every version: the weights of a checkpoint are published again under a new number,
    and ages count from that.
    """
    if not (folder / FILE).exists():
        return {}
    try:
        with np.load(folder / FILE, allow_pickle=False) as arrays:
            ordinals, indices, lengths = (arrays[name].tolist() for name in ("ordinals", "indices", "lengths"))
            token_ids, log_probs, versions = (arrays[name] for name in ("token_ids", "log_probs", "versions"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{folder / FILE} cannot be read: {error}") from error
    groups: dict[int, dict[int, Begun]] = {}
    end = 0
    for ordinal, index, length in zip(ordinals, indices, lengths, strict=True):
        start, end = end, end + length
        groups.setdefault(ordinal, {})[index] = Begun(
            token_ids[start:end], log_probs[start:end], versions[start:end] + versions_later
        )
    return groups
