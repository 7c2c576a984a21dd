"""What the driver finds out about a job's model before it starts anything: it has it whole, wherever it came from."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_job import copy_job

from rljob_api import check, resolve
from rljob_api.spec.model import Model
from rljob_trainer.driver.assemble import read_inputs
from rljob_trainer.errors import JobFileError
from rljob_trainer.models import materialise


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tiny job on a folder with a model whose context is 16."""
    document = copy_job()
    folder = tmp_path_factory.mktemp("model") / "model"
    materialise(Model.model_validate(document["spec"]["model"]), folder)
    document["spec"]["model"] = {"source": str(folder)}
    return document


@pytest.mark.parametrize(
    ("training", "validation", "field"),
    [
        (10, None, None),
        (11, None, "spec.rollout.maxResponseTokens"),
        (10, 10, None),
        (3, 11, r"spec.data.validation\[0\].sampling.maxResponseTokens"),
    ],
)
def test_lengths_are_held_against_the_models_context(
    document: dict[str, Any], tmp_path: Path, training: int, validation: int | None, field: str | None
) -> None:
    """6 tokens of prompt and 10 of response are 16."""
    spec = copy.deepcopy(document["spec"])
    spec["rollout"]["maxResponseTokens"] = training
    if validation is not None:
        spec["data"]["validation"][0]["sampling"] = {"maxResponseTokens": validation}
    job, violations = check({**document, "spec": spec})
    assert job is not None
    assert violations == []
    if field is None:
        assert read_inputs(resolve(job), tmp_path, tmp_path / "model").model.context_length == 16
        return
    with pytest.raises(JobFileError, match=f"{field}: 11 and spec.data.maxPromptTokens = 6 .* context of 16 tokens"):
        read_inputs(resolve(job), tmp_path, tmp_path / "model")


@pytest.mark.parametrize("own_backend", [False, True])
def test_a_family_that_nobody_here_computes_is_refused_before_anything_starts(
    document: dict[str, Any], own_backend: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "granite"
    shutil.copytree(document["spec"]["model"]["source"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "granite"}))
    spec = {**document["spec"], "model": {"source": str(folder)}, "rollout": {"engine": "vllm", "maxResponseTokens": 3}}
    if own_backend:
        spec["trainer"] = {"backend": "mine:Mine"}
    job, _ = check({**document, "spec": spec})
    assert job is not None
    if own_backend:
        assert read_inputs(resolve(job), tmp_path, tmp_path / "model").model.family == "granite"
        return
    with pytest.raises(JobFileError, match=r"the learner supports the model types .* 'granite', see .*; train another"):
        read_inputs(resolve(job), tmp_path, tmp_path / "model")
