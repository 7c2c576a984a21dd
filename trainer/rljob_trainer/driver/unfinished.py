"""Groups that a checkpoint finds begun and not trained: the tokens they have, with log-probs and versions, in one file.

Finished groups are kept the same way: an engine returns a request that needs nothing more as it came, and rewards are
computed again. Flat arrays without pickle: sample by sample ``ordinals``, ``indices``, ``lengths`` (all ``[S]``), and
``token_ids``, ``log_probs``, ``versions`` (all ``[tokens]``).
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


def write(groups: BegunGroups, folder: Path) -> None:
    """Raises ``OSError``."""
    samples = [(ordinal, index, begun) for ordinal, group in groups.items() for index, begun in group.items()]

    with (folder / FILE).open("wb") as file:
        np.savez(
            file,
            ordinals=np.array([ordinal for ordinal, _, _ in samples], np.int64),
            indices=np.array([index for _, index, _ in samples], np.int64),
            lengths=np.array([len(begun.token_ids) for _, _, begun in samples], np.int64),
            token_ids=np.concatenate([np.empty(0, np.int32), *(begun.token_ids for _, _, begun in samples)]),
            log_probs=np.concatenate([np.empty(0, np.float32), *(begun.log_probs for _, _, begun in samples)]),
            versions=np.concatenate([np.empty(0, np.int32), *(begun.versions for _, _, begun in samples)]),
        )


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
