"""What a rank does first."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_trainer.errors import LearnerError
from rljob_trainer.learner.process import prepare
from rljob_trainer.learner.settings import LearnerSettings


def test_a_rank_with_a_gpu_and_a_cpu_build_of_torch_says_which_image_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(LearnerError, match=r"is a CPU build: use the GPU image \(docker build .*ACCELERATOR=gpu"):
        prepare(LearnerSettings(Path("nowhere"), device="cuda"))
