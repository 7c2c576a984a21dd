"""A run goes on with the model that it began with, or says which field of it is another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rljob_api.spec.model import Model
from rljob_trainer.checkpoints.checkpoint import Checkpoint
from rljob_trainer.checkpoints.folder import FolderCheckpoints
from rljob_trainer.errors import CheckpointError, exit_code_of
from rljob_trainer.models.fixed import FixedModel, fixed_model
from rljob_trainer.record.start_model import STATE, Description, check_same, describe

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "transformers_version": "5.0.0"}


def random(**fields: Any) -> Description:
    given = {"hiddenSize": 64, "heads": 2, "tokenizer": {"characters": "0123456789"}}
    return describe(Model.model_validate({"random": given | fields}), Path("not read"))


def folder(place: Path, weight: float = 0.0, **fields: Any) -> Description:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG | fields))
    weights = torch.zeros(600_000)
    weights[-1] = weight
    save_file({"w": weights}, place / "model.safetensors")
    return describe(Model.model_validate({"source": str(place)}), place)


async def saved(place: Path, model: Description) -> Checkpoint:
    async def save(_: str) -> None: ...

    return await FolderCheckpoints(place / "checkpoints", 1).write(3, {STATE: model}, save)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"heads": 4}, r"spec\.model\.random\.heads was 2 and is 4 now"),
        ({"layers": 3}, r"spec\.model\.random\.layers was 2 and is 3 now"),
        ({"family": "qwen2"}, r"spec\.model\.random\.family was 'llama' and is 'qwen2' now"),
        ({"seed": 1}, r"spec\.model\.random\.seed was 0 and is 1 now"),
    ],
)
async def test_another_random_model_is_refused_by_its_field(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    checkpoint = await saved(tmp_path, random())
    with pytest.raises(CheckpointError, match=named) as caught:
        check_same(checkpoint, random(**changed), own=True)
    assert exit_code_of(caught.value) == 66
    assert "step-00000003 belongs to another model" in str(caught.value)


async def test_another_configuration_is_refused_also_for_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    checkpoint = await saved(tmp_path, folder(tmp_path / "then"))
    now = folder(tmp_path / "now", num_attention_heads=4)
    for own in (True, False):
        with pytest.raises(CheckpointError, match=r"config\.json: num_attention_heads was 2 and is 4 now"):
            check_same(checkpoint, now, own=own)


async def test_other_weights_of_the_same_shapes_are_another_start(tmp_path: Path) -> None:
    checkpoint = await saved(tmp_path, folder(tmp_path / "base"))
    tuned = folder(tmp_path / "tuned", weight=1.0)
    with pytest.raises(CheckpointError, match=r"file model\.safetensors was '2400\d\d\d bytes, .*' and is '2400"):
        check_same(checkpoint, tuned, own=True)
    check_same(checkpoint, tuned, own=False)  # `restore` may go on from what another model became


async def test_a_random_model_is_not_one_from_a_folder(tmp_path: Path) -> None:
    checkpoint = await saved(tmp_path, random())
    with pytest.raises(CheckpointError, match=r"spec\.model was 'random' and is 'read from a folder' now"):
        check_same(checkpoint, folder(tmp_path / "now"), own=True)


async def test_a_copy_elsewhere_written_by_another_version_is_the_same_model(tmp_path: Path) -> None:
    checkpoint = await saved(tmp_path, folder(tmp_path / "then"))
    check_same(checkpoint, folder(tmp_path / "now", transformers_version="5.9.0", dtype="float32"), own=True)
    check_same(await saved(tmp_path, random()), random(), own=True)


def critic(place: Path, weight: float = 0.0, **fields: Any) -> FixedModel:
    folder(place, **fields)
    save_file({"w": torch.full((600_000,), weight)}, place / "model.safetensors")
    return fixed_model("spec.algorithm.critic.model.source", str(place), None, Path())


def with_critic(of: FixedModel | None) -> Description:
    given = {"hiddenSize": 64, "heads": 2, "tokenizer": {"characters": "0123456789"}}
    return describe(Model.model_validate({"random": given}), Path("not read"), of)


async def test_a_critic_that_starts_from_another_model_is_refused(tmp_path: Path) -> None:
    begun = critic(tmp_path / "begun")
    checkpoint = await saved(tmp_path, with_critic(begun))
    check_same(checkpoint, with_critic(begun), own=True)
    tuned = critic(tmp_path / "tuned", weight=1.0)
    with pytest.raises(
        CheckpointError, match=rf"critic\.model, version was '{begun.version}' and is '{tuned.version}' now"
    ):
        check_same(checkpoint, with_critic(tuned), own=True)
    check_same(checkpoint, with_critic(tuned), own=False)
    other = critic(tmp_path / "other", num_attention_heads=4)
    for own in (True, False):
        with pytest.raises(CheckpointError, match=r"critic\.model, config\.json: num_attention_heads was 2 and is 4"):
            check_same(checkpoint, with_critic(other), own=own)
        with pytest.raises(CheckpointError, match=r"critic\.model was 'its own model' and is 'the policy' now"):
            check_same(checkpoint, with_critic(None), own=own)
    plain = await saved(tmp_path / "plain", with_critic(None))
    with pytest.raises(CheckpointError, match=r"critic\.model was 'the policy' and is 'its own model' now"):
        check_same(plain, with_critic(begun), own=True)
