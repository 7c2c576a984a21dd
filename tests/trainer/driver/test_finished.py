"""What a run has trained is read from its checkpoints, whatever trained it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from rljob_api.spec.model import Model, RandomModel, RandomTokenizer
from rljob_trainer.checkpoints.folder import FolderCheckpoints
from rljob_trainer.cli import main
from rljob_trainer.driver.finished import find_trained, load_actor
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.models import materialise
from rljob_trainer.record.output import START
from rljob_trainer.telemetry.run_folder import JOB

NOT_DRAWN = 0.375
"""A value that no random weight has, exact in float32."""


async def trained(output: Path, optimizer: Literal["adamw", "muon"], critic: bool) -> None:
    """The output folder of a run after one update: its model, its job, and a checkpoint."""
    random = RandomModel(hiddenSize=32, layers=2, heads=1, contextLength=16, tokenizer=RandomTokenizer(characters="01"))
    model = materialise(Model(random=random), output / START)
    settings = OptimizerSettings(optimizer)
    rank = Fsdp2().start(LearnerSettings(model.path, actor=settings, critic=settings if critic else None))
    with torch.no_grad():
        for parameter in rank.live_model.parameters():
            parameter.fill_(NOT_DRAWN)

    async def save(place: str) -> None:
        rank.save(place)

    (output / JOB).write_text("spec: {model: {}}")
    await FolderCheckpoints(output / "checkpoints", keep=1).write(1, {"step": 1}, save)


@pytest.mark.parametrize(("optimizer", "critic"), [("muon", False), ("muon", True), ("adamw", True)])
async def test_the_policy_is_exported_and_loaded_whichever_optimizer_trained_it(
    optimizer: Literal["adamw", "muon"], critic: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await trained(tmp_path / "run", optimizer, critic)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "exported")]) == 0, capsys.readouterr().err
    for name, tensor in load_file(tmp_path / "exported" / "model.safetensors").items():
        assert bool((tensor == NOT_DRAWN).all()), name
    # What `rljob eval --run` begins with.
    found = find_trained(tmp_path / "run", None, tmp_path / "scratch", report=pytest.fail)
    for name, parameter in load_actor(found).live_model.named_parameters():
        assert bool((parameter == NOT_DRAWN).all()), name
