"""The record of memory: of all examples for GPUs, and no further from the plan than a plan may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from benchmarks.memory.__main__ import CARD, RESULTS, page, read, verdict
from benchmarks.memory.examples import EXAMPLES, fullest
from benchmarks.memory.jobs import JOBS, NOT_MEASURED, PPO_7B, PPO_7B_CHECKPOINTING

from rljob_api.memory import known_shape
from rljob_api.memory.inputs import MemoryInputs


def is_for_gpus(file: Path) -> bool:
    """Whether a job, or what is laid over one, trains on GPUs."""
    parts = [part for part in yaml.safe_load_all(file.read_text()) if isinstance(part, dict)]
    trainers = [part.get("spec", {}).get("trainer") or {} for part in parts]
    return any(trainer.get("gpusPerReplica", 0) for trainer in trainers)


def test_every_example_for_gpus_is_measured_or_has_a_reason() -> None:
    found = {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*.yaml") if is_for_gpus(file)}
    measured = {file for example in JOBS.values() for file in example.files}
    assert found == {file for file in measured if is_for_gpus(EXAMPLES / file)} | set(NOT_MEASURED)
    assert not measured & set(NOT_MEASURED)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", [*JOBS])
def test_the_record_is_within_3_percent_of_the_plan(name: str, offload: bool) -> None:
    measured = read((RESULTS / "memory.json").read_text())[name][offload]
    job = JOBS[name].resolved(offload=offload)
    shape = known_shape(job.spec.model.source or "")
    assert shape is not None
    assert fullest(MemoryInputs.of(job, shape, CARD).rank()) == pytest.approx(measured.counted.peak, rel=0.03)


def test_the_record_says_what_ppo_at_7b_on_four_gpus_needs() -> None:
    """Activation checkpointing. Offload takes the reference away, an eighth of what is left: critic and actor and the
    moments of both are there throughout an update."""
    record = read((RESULTS / "memory.json").read_text())
    assert (RESULTS / "memory.md").read_text() == page(record)
    assert list(record) == list(JOBS)
    verdicts = {name: verdict(*both) for name, both in record.items()}
    assert verdicts.pop(PPO_7B).startswith("needs more ranks, trainer.activationCheckpointing")
    assert set(verdicts.values()) == {"fits"}
    plain, offloaded = record[PPO_7B_CHECKPOINTING]
    parameters, ranks = 7_615_616_512, 4
    # Two bytes for each of the reference's parameters, cut over the ranks.
    assert plain.counted.peak - offloaded.counted.peak == pytest.approx(2 * parameters / ranks, rel=0.01)
    # Of actor and critic four bytes and two moments of four each; the critic has no output matrix.
    critic = parameters - 152064 * 3584
    assert plain.counted.state == pytest.approx((12 * (parameters + critic) + 2 * parameters) / ranks, rel=0.001)
