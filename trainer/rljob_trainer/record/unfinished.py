"""Groups that a checkpoint finds begun and not trained: the tokens they have, with log-probs and versions, in one file.

Finished groups are kept the same way: an engine returns a request that needs nothing more as it came, and rewards are
computed again. Flat arrays without pickle: turn by turn ``ordinals``, ``samples``, ``turns``, ``contexts`` (digests of
what the model saw) and ``lengths`` (all ``[S]``), and the streams of ``Tokens``, ``[tokens]`` each. A stream of the
prompts has lengths of its own, ``lengths_of_...``.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from rljob_trainer.checkpoints.checkpoint import unreadable
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.requests import BegunTurn
from rljob_trainer.episodes.tokens import NOTHING, Tokens, is_of_prompt, stream_types, words
from rljob_trainer.errors import CheckpointError
from rljob_trainer.training.checks import possible

FILE = "groups.npz"


BegunGroups = Mapping[int, Mapping[EpisodeId, BegunTurn]]
"""What there is of each prompt's turns, by ordinal."""

_FACTS = ("ordinals", "samples", "turns", "contexts", "lengths")
_LENGTHS_OF = "lengths_of_"
_Arrays = Iterable[np.ndarray[Any, Any]]
_REST_BYTES = 16 << 20
"""Read between two calls of ``rest``."""


def write(groups: BegunGroups, folder: Path, rest: Callable[[], None] = lambda: None) -> None:
    """Array after array, sample after sample: no copy of all of them. Raises ``OSError``, and ``ValueError`` for a
    stream that only some samples have.

    ``rest`` is called now and then, to let go of what has been read (``rollout/shelf.py``).
    """
    turns = [(id, turn) for group in groups.values() for id, turn in group.items()]
    facts = [(id.ordinal, id.sample, id.turn, turn.context, len(turn.tokens)) for id, turn in turns]
    told = dict(zip(_FACTS, np.array(facts, np.int64).reshape(-1, len(_FACTS)).T, strict=True))
    total = int(told["lengths"].sum())
    columns: dict[str, tuple[Any, tuple[int, ...], _Arrays]] = {
        name: (np.int64, fact.shape, [fact]) for name, fact in told.items()
    }
    parts = [turn.tokens for _, turn in turns if len(turn.tokens)] or [NOTHING]
    for name in {name: None for part in parts for name in part.streams()}:
        streams = [part.streams().get(name) for part in parts]
        there = [stream for stream in streams if stream is not None]
        if is_of_prompt(name):
            of_prompts = [turn.tokens.streams().get(name) for _, turn in turns]
            lengths = np.array([0 if stream is None else len(stream) for stream in of_prompts], np.int64)
            columns[_LENGTHS_OF + name] = np.int64, lengths.shape, [lengths]
            columns[name] = (stream_types()[name], (int(lengths.sum()), *there[0].shape[1:]), there)
            continue
        if len(there) < len(parts):
            raise ValueError(f"{len(parts) - len(there)} of {len(parts)} samples have no {words(name)}")
        columns[name] = (stream_types()[name], (total, *there[0].shape[1:]), there)
    with zipfile.ZipFile(folder / FILE, "w") as file:
        for name, (dtype, shape, arrays) in columns.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
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
    keep: Callable[[Tokens], Tokens] = lambda tokens: tokens,
    report: Callable[[str], None] = lambda _: None,
) -> dict[int, dict[EpisodeId, BegunTurn]]:
    """The groups of a checkpoint, empty when it has none. Raises ``CheckpointError``.

    ``versions_later`` is added to every version: the weights of a checkpoint are published again under a new number,
    and ages count from that. ``keep`` takes a sample's tokens and says where they are from now on
    (``Shelf.put``): the file is read sample after sample, never whole.

    A sample with a log-prob that no sampled token can have is left out, to be made anew, and told to ``report``:
    training refuses it, and would each time that the run goes on from here.
    """
    if not (folder / FILE).exists():
        return {}
    groups: dict[int, dict[EpisodeId, BegunTurn]] = {}
    try:
        with zipfile.ZipFile(folder / FILE) as file:
            facts = zip(*(_Column(file, name).rest().tolist() for name in _FACTS), strict=True)
            there = {name: _Column(file, name) for name in stream_types() if f"{name}.npy" in file.namelist()}
            streams = {name: column for name, column in there.items() if not is_of_prompt(name)}
            of_prompts = {name: column for name, column in there.items() if is_of_prompt(name)}
            prompts = {name: iter(_Column(file, _LENGTHS_OF + name).rest().tolist()) for name in of_prompts}
            for ordinal, sample, turn, context, length in facts:
                id = EpisodeId(TRAINING, ordinal, sample, turn)
                taken = {name: column.take(length) for name, column in streams.items()}
                for name, column in of_prompts.items():
                    if count := next(prompts[name]):
                        taken[name] = column.take(count)
                tokens = Tokens(**taken)
                if not possible(tokens.log_probs).all():
                    report(f"{id} has a log-prob that no sampled token can have; it will be generated again")
                    continue
                groups.setdefault(ordinal, {})[id] = BegunTurn(context, keep(tokens.later(versions_later)))
            for column in there.values():
                if len(column.rest()):
                    raise ValueError("it has more tokens than its samples")
    except OSError as error:
        raise unreadable(folder / FILE, error) from error
    except (TypeError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{folder / FILE} cannot be read: {error}") from error
    return groups


class _Column:
    """One array of the file, read from its beginning to its end. The zip's checksum is verified there."""

    def __init__(self, file: zipfile.ZipFile, name: str) -> None:
        self._entry = file.open(f"{name}.npy")
        np.lib.format.read_magic(self._entry)
        (self._left, *self._further), _, self._dtype = np.lib.format.read_array_header_1_0(self._entry)

    def take(self, count: int) -> np.ndarray[Any, Any]:
        """The next ``count`` rows. Raises ``ValueError`` when there are fewer."""
        wanted = count * math.prod(self._further)
        data = self._entry.read(wanted * self._dtype.itemsize)
        self._left -= count
        values: np.ndarray[Any, Any] = np.frombuffer(data, self._dtype)
        if len(values) != wanted:
            raise ValueError(f"it ends after {len(values)} of {wanted} numbers")
        return values.reshape(count, *self._further)

    def rest(self) -> np.ndarray[Any, Any]:
        values = self.take(self._left)
        self._entry.read()  # to the end of the entry, where its checksum is compared
        return values
