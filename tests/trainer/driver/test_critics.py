"""What the driver looks at of the model that a critic starts from, before anything is started."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import made
from safetensors.torch import load_file, save_file
from tiny_job import copy_job
from transformers import AutoTokenizer

from rljob_api import check, resolve
from rljob_api.spec.model import Model
from rljob_trainer.driver.assemble import Inputs, read_inputs
from rljob_trainer.errors import JobFileError
from rljob_trainer.models import materialise
from rljob_trainer.models.version import version_of

CHARACTERS = "0123456789="
FIELD = r"spec\.algorithm\.critic\.model\.source: "


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    materialise(Model.model_validate(copy_job()["spec"]["model"]), folder)
    return folder


@pytest.fixture
def critic(tmp_path: Path) -> Path:
    """A reward model with the policy's characters, of another size."""
    return made(tmp_path / "critic", characters=CHARACTERS)


def read(policy: Path, critic: Path, tmp_path: Path, **spec: Any) -> Inputs:
    document = copy_job(model={"source": str(policy)}, **spec)
    document["spec"]["algorithm"] = {"preset": "ppo", "critic": {"model": {"source": str(critic)}}}
    job, violations = check(copy.deepcopy(document))
    assert job is not None
    assert violations == []
    return read_inputs(resolve(job), tmp_path, tmp_path / "model")


@pytest.mark.parametrize("labels", [1, 0], ids=["reward model", "language model"])
def test_it_is_found_with_its_version(policy: Path, tmp_path: Path, labels: int) -> None:
    folder = made(tmp_path / "critic", labels=labels, characters=CHARACTERS)
    found = read(policy, folder, tmp_path).critic
    assert found is not None
    assert (found.folder(), found.version) == (folder, version_of(folder))


def test_a_copy_of_the_policy_needs_none(policy: Path, tmp_path: Path) -> None:
    job, _ = check(copy_job(model={"source": str(policy)}, algorithm={"preset": "ppo"}))
    assert job is not None
    assert read_inputs(resolve(job), tmp_path, tmp_path / "model").critic is None


def configured(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "has num_labels 2"),
        ({"architectures": ["LlamaForTokenClassification"]}, "is a LlamaForTokenClassification; use a language"),
        ({"model_type": "granite"}, "the learner supports the model types .* 'granite'"),
        ({"max_position_embeddings": 8}, "its context is 8 tokens, but .* add up to 9"),
        ({"num_hidden_layers": 3}, "has the weights of 2"),
        ({"hidden_size": 64}, "requires"),
    ],
)
def test_what_its_configuration_says_against_it(
    policy: Path, critic: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    configured(critic, **changes)
    with pytest.raises(JobFileError, match=f"{FIELD}.*{words}"):
        read(policy, critic, tmp_path)


def test_a_head_that_is_missing_or_of_another_kind(policy: Path, critic: Path, tmp_path: Path) -> None:
    file = critic / "model.safetensors"
    stored = load_file(file)
    head = stored.pop("score.weight")
    for others, words in (({}, "missing"), ({"score.weight": torch.cat([head, head])}, r"of the shape \[2, 32\]")):
        save_file(stored | others, file, metadata={"format": "pt"})
        with pytest.raises(JobFileError, match=rf"{FIELD}.*score\.weight \[1, 32\] is {words}"):
            read(policy, critic, tmp_path)


def test_values_that_are_no_numbers(policy: Path, critic: Path, tmp_path: Path) -> None:
    file = critic / "model.safetensors"
    stored = load_file(file)
    stored["score.weight"][0, 3] = float("nan")
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(JobFileError, match=r"score\.weight contains NaN"):
        read(policy, critic, tmp_path)


def test_a_tokenizer_that_is_another_or_none(policy: Path, tmp_path: Path) -> None:
    """With the same characters in another order every id is there, and means something else."""
    other = made(tmp_path / "other", characters=CHARACTERS[::-1])
    ours = AutoTokenizer.from_pretrained(policy).get_vocab()
    first = min((number, token) for token, number in ours.items() if token in CHARACTERS[:-6])
    with pytest.raises(
        JobFileError, match=rf"{FIELD}its tokenizer differs from the policy's: '{first[1]}' has the id {first[0]} there"
    ):
        read(policy, other, tmp_path)
    bare = tmp_path / "bare"
    shutil.copytree(other, bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(JobFileError, match=f"{FIELD}.* has no tokenizer"):
        read(policy, bare, tmp_path)


def test_an_embedding_without_a_row_for_each_id(policy: Path, tmp_path: Path) -> None:
    fewer = made(tmp_path / "fewer", characters=CHARACTERS[:-2])
    with pytest.raises(JobFileError, match=f"{FIELD}its embedding has .* rows, but the policy's has"):
        read(policy, fewer, tmp_path)


def test_heads_that_the_ranks_cannot_divide(policy: Path, critic: Path, tmp_path: Path) -> None:
    trainer = {"replicas": 3, "parallelism": {"context": 3}}
    with pytest.raises(JobFileError, match=f"{FIELD}its 4 attention heads cannot be divided .*context 3"):
        read(policy, critic, tmp_path, trainer=trainer)
