"""Groups that a checkpoint finds begun and not trained: the tokens they have, with log-probs and versions, in one file.

Finished groups are kept the same way: an engine returns a request that needs nothing more as it came, and rewards are
computed again. Flat arrays without pickle: sample by sample ``ordinals``, ``indices``, ``lengths`` (all ``[S]``), and
``token_ids``, ``log_probs``, ``versions`` (all ``[tokens]``).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from rljob_trainer.checkpoints.checkpoint import unreadable
from rljob_trainer.errors import CheckpointError
from rljob_trainer.rollout.protocol import Begun
from rljob_trainer.training.checks import possible

FILE = "groups.npz"


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


def read(
    folder: Path,
    *,
    versions_later: int,
    keep: Callable[..., Sequence[Any]] = lambda *arrays: arrays,
    report: Callable[[str], None] = lambda _: None,
) -> dict[int, dict[int, Begun]]:
    """The groups of a checkpoint, empty when it has none. Raises ``CheckpointError``.

    ``versions_later`` is added to every version: the weights of a checkpoint are published again under a new number,
    and ages count from that. ``keep`` takes a sample's three arrays and says where they are from now on
    (``Shelf.put``): the file is read sample after sample, never whole.

    A sample with a log-prob that no sampled token can have is left out, to be made anew, and told to ``report``:
    training refuses it, and would each time that the run goes on from here.
    """
    if not (folder / FILE).exists():
        return {}
    groups: dict[int, dict[int, Begun]] = {}
    try:
        with zipfile.ZipFile(folder / FILE) as file:
            ordinals, indices, lengths = (_Column(file, name).rest() for name in ("ordinals", "indices", "lengths"))
            tokens = [_Column(file, name) for name in ("token_ids", "log_probs", "versions")]
            for ordinal, index, length in zip(ordinals.tolist(), indices.tolist(), lengths.tolist(), strict=True):
                token_ids, log_probs, versions = (column.take(length) for column in tokens)
                if not possible(log_probs).all():
                    report(
                        f"sample {index} of prompt {ordinal} has a log-prob that no sampled token can have: it is made "
                        "again"
                    )
                    continue
                groups.setdefault(ordinal, {})[index] = Begun(*keep(token_ids, log_probs, versions + versions_later))
            for column in tokens:
                if len(column.rest()):
                    raise ValueError("it holds more tokens than its samples have")
    except OSError as error:
        raise unreadable(folder / FILE, error) from error
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{folder / FILE} cannot be read: {error}") from error
    return groups


class _Column:
    """One array of the file, read from its beginning to its end. The zip's checksum is verified there."""

    def __init__(self, file: zipfile.ZipFile, name: str) -> None:
        self._entry = file.open(f"{name}.npy")
        np.lib.format.read_magic(self._entry)
        (self._left,), _, self._dtype = np.lib.format.read_array_header_1_0(self._entry)

    def take(self, count: int) -> np.ndarray[Any, Any]:
        """The next ``count`` numbers. Raises ``ValueError`` when there are fewer."""
        data = self._entry.read(count * self._dtype.itemsize)
        self._left -= count
        values: np.ndarray[Any, Any] = np.frombuffer(data, self._dtype)
        if len(values) != count:
            raise ValueError(f"it ends after {len(values)} of {count} numbers")
        return values

    def rest(self) -> np.ndarray[Any, Any]:
        values = self.take(self._left)
        self._entry.read()  # to the end of the entry, where its checksum is compared
        return values
