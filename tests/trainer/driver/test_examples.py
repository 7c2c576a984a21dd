"""The example files are valid, and GSM8K's has the published setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api import load_jobs, resolve
from rljob_trainer.cli import main

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_valid(file: Path) -> None:
    assert main(["validate", "--schema-only", str(file)]) == 0


def test_gsm8k_has_the_published_setting() -> None:
    (job,) = load_jobs(EXAMPLES / "gsm8k.yaml")
    spec = resolve(job).spec
    assert (spec.batch.groups, spec.batch.mini_batch_groups, spec.batch.samples_per_prompt) == (256, 64, 1)
    assert (spec.data.max_prompt_tokens, spec.rollout.max_response_tokens) == (1024, 512)
    assert (spec.algorithm.advantage.estimator, spec.trainer.optimizer.learning_rate) == ("gae", 1e-6)
    assert spec.algorithm.critic is not None
    assert spec.algorithm.critic.learning_rate == 1e-5
