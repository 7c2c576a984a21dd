"""A learner's state in a folder or a bucket: torch's distributed checkpoint, which any number of ranks can read.

    learner.json      format, backend and ranks that wrote it, updates done by each model, run and step it belongs to,
                      and where adapters are trained, which base they belong to
    random-0003.pt    random states of rank 3
    digests-0003.json sums of the parts of all tensors that rank 3 wrote
    .metadata, *.distcp   parameters and optimizer moments, each shard once

Each rank writes its own shards where they belong and reads the parts of shards that it needs: no rank, and no node,
ever sees the whole. Tensors have canonical names and say which box of the whole they are, so what one backend has
written another one reads. What it cannot read is said: an optimizer's state that is kept in another form, a tensor that
has another shape. Random states are those of the ranks that drew from them: they come back when as many ranks of the
same backend read as wrote. Whether the files are the ones that were written is checked by whoever owns the place
(``checkpoints``); here it is only checked that they can be read and fit this model.
"""

from __future__ import annotations

import io
import json
import shutil
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as collectives
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from rljob_trainer.errors import (
    CheckpointError,
    UnreachableError,
    UnreadableError,
    UnsavedError,
    causes,
    reading_failed,
)
from rljob_trainer.learner.state_files import StateFiles, state_files
from rljob_trainer.learner.state_tensors import ShardTensor
from rljob_trainer.learner.trained import Trained
from rljob_trainer.storage import is_address
from rljob_trainer.storage.bucket import REMEDY, refused
from rljob_trainer.weights.manifest import manifest_of
from rljob_trainer.weights.shards import Shard

FORMAT = 3
_DESCRIPTION = "learner.json"
_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""How torch's RuntimeError for the host's memory begins."""
_LIST = ".metadata"
"""The list of tensors that torch keeps beside them."""


@dataclass(frozen=True, slots=True)
class StateOwner:
    """Which rank of which learner writes or reads."""

    backend: str
    rank: int
    ranks: int


def save(place: str | Path, models: Sequence[Trained], owner: StateOwner, belongs_to: str = "") -> None:
    """Writes this rank's shards, their digests and random states; rank 0 also the description. A collective call.

    ``belongs_to`` says in words of which run and step the state is.
    ``place`` is a folder that exists, or an address. Raises ``CheckpointError``.
    """
    files = state_files(place)
    try:
        _quietly(
            save_tensors, _tensors(_shards(models)), storage_writer=files.writer(), no_dist=not dist.is_initialized()
        )
        random = io.BytesIO()
        torch.save(_random_states(), random)
        files.write(_random_file(owner.rank), random.getvalue())
        files.write(_digest_file(owner.rank), json.dumps(_digests(models)).encode())
        if owner.rank == 0:
            updates = {m.name: m.updates for m in models}
            description = {
                "format": FORMAT,
                "backend": owner.backend,
                "ranks": owner.ranks,
                "updates": updates,
                "belongs_to": belongs_to,
                "adapters": {m.name: m.adapter.described() for m in models if m.adapter is not None},
            }
            files.write(_DESCRIPTION, json.dumps(description).encode())
    except CheckpointError:
        raise
    # A store's client raises what it likes.
    except (Exception, CheckpointException) as error:
        away = is_address(place) and not refused(_first(error))
        raise (UnreachableError if away else UnsavedError)(
            f"the learner's state cannot be written to {place}{_free(place)}: {_reason(error)}; "
            + (REMEDY if is_address(place) else "make room or choose another folder")
        ) from error


def load(place: str | Path, models: Sequence[Trained], owner: StateOwner, belongs_to: str = "") -> None:
    """Reads what ``save`` wrote, in place. Raises ``CheckpointError`` naming the file or the model that is wrong, and
    when the state belongs to another run or step than ``belongs_to`` says (empty: nobody knows).

    Where as many ranks of the same backend read as wrote, each also looks whether its tensors are those that were saved
    together, and random states come back; otherwise they stay as they were made from the seed.
    After an error the models may hold a mixture: load another checkpoint or stop.
    """
    files = state_files(place)
    description = _described(files, place)
    if belongs_to and description["belongs_to"] != belongs_to:
        raise CheckpointError(
            f"the learner's part in {place} belongs to {description['belongs_to']}, but the driver's part of the "
            f"checkpoint to {belongs_to}: it was mixed from several checkpoints. Use an unmodified checkpoint"
        )
    for model in models:
        if model.name not in description["updates"]:
            raise CheckpointError(
                f"{place} has no {model.name} (it has: {', '.join(description['updates'])}); "
                "it was written by a job with another algorithm"
            )
        _check_adapter(description, model, place)
    try:
        _quietly(
            load_tensors, _tensors(_shards(models)), storage_reader=files.reader(), no_dist=not dist.is_initialized()
        )
        random, saved = None, None
        if (description["backend"], description["ranks"]) == (owner.backend, owner.ranks):
            data = files.read(name := _digest_file(owner.rank))
            if data is None:
                raise FileNotFoundError(f"{name} is missing")
            saved = json.loads(data)
            data = files.read(name := _random_file(owner.rank))
            if data is None:
                raise FileNotFoundError(f"{name} is missing")
            random = torch.load(io.BytesIO(data), weights_only=True)
    # Damaged bytes surface as whatever the unpickler or the zip reader stumbles over; torch's wrapper around that
    # is not even an Exception.
    except (Exception, CheckpointException) as error:
        raise _misfit(place, files, description["backend"], owner, _shards(models)) or _unreadable(
            place, files, error
        ) from error
    if saved is not None:
        _check(saved, _digests(models), place)
    if random is not None:
        _restore_random(random)
    for model in models:
        model.updates = int(description["updates"][model.name])


def load_weights(place: str | Path, model: Trained) -> None:
    """Reads one model's parameters and nothing else, in place: whichever optimizer trained it, its state stays unread.

    Raises ``CheckpointError`` naming the file that is wrong.
    """
    files = state_files(place)
    description = _described(files, place)
    if model.name not in description["updates"]:
        raise CheckpointError(f"{place} has no {model.name} (it has: {', '.join(description['updates'])})")
    _check_adapter(description, model, place)
    try:
        _quietly(
            load_tensors, _tensors(model.weights()), storage_reader=files.reader(), no_dist=not dist.is_initialized()
        )
    except (Exception, CheckpointException) as error:  # as in load
        raise _unreadable(place, files, error) from error


def _check_adapter(description: dict[str, Any], model: Trained, place: str | Path) -> None:
    """Raises ``CheckpointError`` unless a state's tensors are what ``model`` trains: all of a model, or the same kind
    of adapter to the same base."""
    saved, own = description["adapters"].get(model.name), None if model.adapter is None else model.adapter.described()
    if saved == own:
        return
    if saved is None or own is None:
        what, here = ("an adapter", "a whole model") if own is None else ("a whole model", "an adapter")
        raise CheckpointError(
            f"the learner's state in {place} is that of {what}, but spec.model.lora asks for {here}: set model.lora as "
            "in the job that wrote it, or start a new run from the model that `rljob export` makes of it"
        )
    names = {"base_sha256": "the base's manifest"}
    for field, was in saved.items():
        if was != own[field]:
            raise CheckpointError(
                f"the adapter in {place} belongs to another job: {names.get(field, f'spec.model.lora.{field}')} was "
                f"{was} and is {own[field]} here. Use the model and the model.lora that it was trained with"
            )


def _misfit(
    place: str | Path, files: StateFiles, writer: str, owner: StateOwner, shards: Sequence[Shard]
) -> CheckpointError | None:
    """What the models need and a checkpoint has not, or in another shape, in words; None where its list of tensors
    cannot be read or has all."""
    try:
        listed = files.reader().read_metadata().state_dict_metadata
    except Exception:  # noqa: BLE001  damaged, which is being said already
        return None
    lacking = sorted(shard.name for shard in shards if shard.name not in listed)
    if lacking and all(".optimizer." in name for name in lacking):
        if writer != owner.backend:
            return CheckpointError(
                f"the learner's state in {place} was written by the backend {writer} with an optimizer state that "
                f"{owner.backend} stores differently (it has no {lacking[0]}); continue with trainer.backend: {writer} "
                "and its trainer.optimizer.type, or start a new run from the model that `rljob export` makes of it"
            )
        return CheckpointError(
            f"the learner's state in {place} was written with another optimizer (it has no {lacking[0]}); set "
            "trainer.optimizer.type to that one, or start a new run from the model that `rljob export` makes of it"
        )
    for shard in shards:
        found = listed.get(shard.name)
        if isinstance(found, TensorStorageMetadata) and tuple(found.size) != shard.shape:
            return CheckpointError(
                f"{shard.name} in {place} has the shape {list(found.size)}, but here {list(shard.shape)}: it "
                f"belongs to another model, or was written by a backend ({writer}) that pads it"
            )
    return None


def _unreadable(place: str | Path, files: StateFiles, error: BaseException) -> CheckpointError:
    sentence = f"the learner's state in {place} cannot be read: {_reason(error)}"
    if is_address(place):  # compared with its manifest, tag by tag, before anything of it is read
        failed = not isinstance(error, FileNotFoundError)
    else:
        failed = reading_failed(error) or _machine_failed(error) or _list_fails(files)
    if failed:
        return UnreadableError(f"{sentence}; its content may be intact: try again")
    return CheckpointError(f"{sentence}; the files are damaged or belong to another model")


def _machine_failed(error: BaseException) -> bool:
    """Whether there was no memory for what is in the files, or ranks lost each other while they read: gloo's errors are
    plain ``RuntimeError``, known by torch's collective calls, which raise them."""
    return any(
        isinstance(cause, MemoryError | torch.OutOfMemoryError | torch.AcceleratorError | dist.DistError)
        or (isinstance(cause, RuntimeError) and _NO_MEMORY in str(cause))
        or _raised_in(cause) == collectives.__file__
        for cause in causes(error)
    )


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


def _list_fails(files: StateFiles) -> bool:
    """Whether the list of tensors is there and cannot be read; of such an error torch keeps only the text."""
    try:
        files.read(_LIST)
    except OSError as error:
        return reading_failed(error)
    return False


def _described(files: StateFiles, place: str | Path) -> dict[str, Any]:
    name = f"{place}/{_DESCRIPTION}"
    try:
        data = files.read(_DESCRIPTION)
    except OSError as error:
        raise UnreadableError(f"{name} cannot be read: {error.strerror or error}; try again") from error
    if data is None:
        raise CheckpointError(f"{place} is not a learner's checkpoint: {_DESCRIPTION} is missing")
    try:
        description: dict[str, Any] = json.loads(data)
        maps = ("updates", "adapters")
        known = description["format"] == FORMAT and all(isinstance(description[part], dict) for part in maps)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from error
    if not known:
        raise CheckpointError(
            f"{name} has format {description['format']}, this program reads {FORMAT}; use the version that wrote it"
        )
    return description


def _digests(models: Sequence[Trained]) -> dict[str, int]:
    """Digests of this rank's part of every tensor, by name and box: as many ranks may cut them up otherwise."""
    return dict(manifest_of((_boxed(shard), shard.tensor) for shard in _shards(models)).sums)


def _boxed(shard: Shard) -> str:
    ends = zip(shard.offset, shard.tensor.shape, strict=True)
    return f"{shard.name}[{', '.join(f'{start}:{start + size}' for start, size in ends)}]"


def _check(saved: dict[str, int], read: dict[str, int], place: str | Path) -> None:
    wrong = [name for name, digest in read.items() if saved.get(name, digest) != digest]
    if not wrong:
        return
    parts = sorted({".".join(name.split(".")[:2]) for name in wrong})
    raise CheckpointError(
        f"{', '.join(parts)} in {place}: {len(wrong)} of {len(read)} tensors are not those that were saved with the "
        f"rest, first {wrong[0]}: they belong to another run or step. Use an unmodified checkpoint"
    )


def _shards(models: Sequence[Trained]) -> list[Shard]:
    return [shard for model in models for shard in model.state()]


def _tensors(shards: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """The tensors as a checkpoint takes them."""
    return {shard.name: ShardTensor(shard) for shard in shards}


def _random_file(rank: int) -> str:
    return f"random-{rank:04d}.pt"


def _digest_file(rank: int) -> str:
    return f"digests-{rank:04d}.json"


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _quietly(function: Any, *args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        # It warns that no process group exists, which is how one rank is meant to work.
        warnings.simplefilter("ignore")
        function(*args, **kwargs)


def _free(place: str | Path) -> str:
    """torch's own message for a full disk does not say that it is one."""
    try:
        return f", where {shutil.disk_usage(place).free / 1e6:,.1f} MB are free"
    except OSError:  # an address, or no folder at all
        return ""


def _reason(error: BaseException) -> str:
    """One line: the first failure inside torch's wrapper, or the error itself."""
    inner = _first(error)
    text = str(inner).splitlines()
    where = f"rank {min(error.failures)}: " if isinstance(error, CheckpointException) and error.failures else ""
    return f"{where}{type(inner).__name__}: {text[0] if text else ''}"


def _first(error: BaseException) -> BaseException:
    """The first failure inside torch's wrapper, or the error itself."""
    if isinstance(error, CheckpointException) and error.failures:
        failure: BaseException = error.failures[min(error.failures)][0]
        return failure
    return error
