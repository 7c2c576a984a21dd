"""Which model a run began with: kept in its checkpoints, and compared before anything is started.

A checkpoint holds tensors. Another number of heads, or a base model instead of its tuned sibling, may have tensors of
the very same shapes: training would go on with another network, or against another reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_trainer.checkpoints.checkpoint import Checkpoint, driver_state
from rljob_trainer.errors import CheckpointError
from rljob_trainer.models.config import read_json

if TYPE_CHECKING:
    from rljob_api.spec.model import Model
    from rljob_trainer.models.fixed import FixedModel

STATE = "model"
"""In the driver's part of a checkpoint."""

_BLOCK_BYTES = 1 << 16
_BLOCKS = 16
"""Looked at in each file of weights besides its first: two trainings of one network differ nearly everywhere."""
_OF_THE_WRITER = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Fields of a configuration that say who wrote it and how, and nothing about the network."""

_CRITIC = "spec.algorithm.critic.model"
_SECTIONS = {
    "random": "spec.model.random.",
    "config": "config.json: ",
    "weights": "file ",
    "critic": f"{_CRITIC}, config.json: ",
    "critic's version": f"{_CRITIC}, ",
}
"""Of a description, and how a field of each is shown."""
_OF_THE_START = ("weights", "critic's version")
"""Those that say nothing about the network, but which numbers it began with."""

Description = dict[str, dict[str, Any]]
"""Section -> field -> value, as JSON has it."""


def describe(spec: Model, folder: Path, critic: FixedModel | None = None) -> Description:
    """What identifies the start model, read from the job and from its local ``folder``. Tokenizers are not part of it:
    the data set's own state tells whether prompts are the same.

    A random model is what it is drawn from. Any other is its configuration, and its files of weights by their names,
    sizes and a digest of some blocks of each. Of a ``critic`` that starts from a model of its own that one's
    configuration and version are part of it.
    """
    found: Description = {}
    if critic is not None:
        found = {"critic": _config(critic.folder()), "critic's version": {"version": critic.version}}
    if spec.random is not None:
        drawn = spec.random.model_dump(mode="json", by_alias=True, exclude={"tokenizer"})
        return {"random": drawn, **found}
    weights = {file.name: _fingerprint(file) for file in folder.glob("*.safetensors")}
    return {"config": _config(folder), "weights": weights, **found}


def _config(folder: Path) -> dict[str, Any]:
    return {name: value for name, value in read_json(folder / "config.json").items() if name not in _OF_THE_WRITER}


def check_same(checkpoint: Checkpoint, now: Description, *, own: bool) -> None:
    """Raises ``CheckpointError`` naming the first field that is not what it was when ``checkpoint`` was written.

    ``own`` False: the checkpoint of another run, whose network has to be the same. What it started from need not be.
    """
    then: Description = driver_state(checkpoint.files()).get(STATE, {})
    for field, was, found in _differences(then, now, own):
        raise CheckpointError(
            f"checkpoint {checkpoint.place} belongs to another model: {field} was {was!r} and is {found!r} now. Use "
            "the model that the run started with (spec.model, spec.algorithm.critic.model), or another output folder "
            "for this model; `rljob run --resume never` starts over with it"
        )


def _differences(then: Description, now: Description, own: bool) -> Iterator[tuple[str, Any, Any]]:
    if own and then and ("random" in then) != ("random" in now):
        yield "spec.model", _kind(then), _kind(now)
    if then and ("critic" in then) != ("critic" in now):
        of_its_own, of_policy = "its own model", "the policy"
        yield (_CRITIC, of_its_own, of_policy) if "critic" in then else (_CRITIC, of_policy, of_its_own)
    for section, shown in _SECTIONS.items():
        if section not in then or section not in now or (section in _OF_THE_START and not own):
            continue
        for name, was in then[section].items():
            if section == "random" and name == "seed" and not own:
                continue
            if (found := now[section].get(name)) != was:
                yield f"{shown}{name}", was, found


def _kind(description: Mapping[str, Any]) -> str:
    return "random" if "random" in description else "read from a folder"


def _fingerprint(file: Path) -> str:
    """Size and digest of the first block and of some at even distances."""
    size = file.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        for block in range(_BLOCKS + 1):
            stream.seek(max(0, size - _BLOCK_BYTES) * block // _BLOCKS)
            digest.update(stream.read(_BLOCK_BYTES))
    return f"{size} bytes, {digest.hexdigest()}"
