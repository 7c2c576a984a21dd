"""A run on one machine goes on with the job that it began with, as it does on a cluster."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_job import copy_job

from rljob_api import resolve
from rljob_api.loading import load_jobs
from rljob_api.resolved import ResolvedJob
from rljob_trainer.errors import JobFileError
from rljob_trainer.record.same_job import check_unchanged
from rljob_trainer.record.written_job import write_job


def job_of(document: dict[str, Any]) -> ResolvedJob:
    return resolve(load_jobs(yaml.safe_dump(document))[0])


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    document = copy.deepcopy(copy_job())
    for name, fields in sections.items():
        document["spec"].setdefault(name, {}).update(fields)
    return document


def check(folder: Path, document: dict[str, Any]) -> None:
    check_unchanged(folder / "job.yaml", job_of(document), folder, pytest.fail)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_job(tmp_path / "job.yaml", job_of(copy_job()), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("document", "named"),
    [
        (changed(reward={"functions": [{"type": "exactMatch"}]}), "spec.reward.functions"),
        (changed(batch={"groups": 16}), "spec.batch.groups"),
        (changed(rollout={"maxResponseTokens": 4}), "spec.rollout.maxResponseTokens"),
        (changed(model={"dtype": "float32"}), "spec.model.dtype"),
        (copy_job(seed=7), "spec.seed"),
    ],
)
def test_a_field_that_no_job_may_change_is_named(folder: Path, document: dict[str, Any], named: str) -> None:
    with pytest.raises(JobFileError) as caught:
        check(folder, document)
    said = f"holds a run of another job: {named} cannot be changed once a run has started. Set it as in"
    assert said in str(caught.value)
    assert "--resume never" in str(caught.value)


def test_fields_that_a_job_may_change_are_free(folder: Path) -> None:
    free = {"everySteps": 1, "keep": 7}
    check(
        folder, changed(stop={"steps": 600}, checkpoint=free, validation={"every": 2}, trainer={"microBatchTokens": 64})
    )


def test_the_written_job_itself_goes_on_and_a_moved_file_is_the_same_one(tmp_path: Path) -> None:
    place = tmp_path / "old"
    document = copy_job()
    document["spec"]["data"]["train"] = {"source": "train.jsonl"}
    for base in (place, tmp_path / "new"):
        base.mkdir()
        (base / "train.jsonl").touch()
    write_job(tmp_path / "job.yaml", job_of(document), place)
    written = resolve(load_jobs(tmp_path / "job.yaml")[0])
    for job, base in ((written, tmp_path), (job_of(document), tmp_path / "new")):
        check_unchanged(tmp_path / "job.yaml", job, base, pytest.fail)
    document["spec"]["data"]["train"] = {"source": "other.jsonl"}
    (tmp_path / "new" / "other.jsonl").touch()
    with pytest.raises(JobFileError, match=r"spec\.data\.train\.source cannot be changed"):
        check_unchanged(tmp_path / "job.yaml", job_of(document), tmp_path / "new", pytest.fail)


def test_a_written_job_that_is_cut_off_keeps_no_run_from_going_on(folder: Path) -> None:
    (folder / "job.yaml").write_text("")
    told: list[str] = []
    check_unchanged(folder / "job.yaml", job_of(copy_job()), folder, told.append)
    assert len(told) == 1
    assert "job.yaml cannot be read" in told[0]
