"""The version of a model's folder changes with whatever changes what the model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.version import version_of

pytestmark = pytest.mark.integrity


@pytest.mark.parametrize("count", [10, 100_000, 10_000_000])
@pytest.mark.parametrize("place", [0, -1])
def test_one_other_number_at_either_end_is_another_version(count: int, place: int, tmp_path: Path) -> None:
    weights = torch.zeros(count)
    save_file({"weight": weights}, tmp_path / "model.safetensors")
    before = version_of(tmp_path)
    assert version_of(tmp_path) == before
    weights[place] = 1.0
    save_file({"weight": weights}, tmp_path / "model.safetensors")
    assert version_of(tmp_path) != before


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "merges.txt"]
)
def test_another_file_of_tokens_or_settings_is_another_version(name: str, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    versions = {version_of(tmp_path)}
    for text in ("{}", "{ }"):
        (tmp_path / name).write_text(text)
        versions.add(version_of(tmp_path))
    assert len(versions) == 3


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"has no \*\.safetensors"):
        version_of(tmp_path)
