"""What `rljob validate` says of jobs that are valid and may still surprise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api import check, resolve
from rljob_api.notes import notes
from rljob_trainer.cli import main

TOOLS = {"type": "tools", "tools": [{"type": "custom", "function": "a:search"}], "maxTurns": 4, "callSeconds": 30}


def job(mode: str = "fullyAsync", environment: dict[str, Any] | None = None, **staleness: Any) -> dict[str, Any]:
    pipeline = {"mode": mode} | ({"staleness": {"maxAge": 4, **staleness}} if mode == "fullyAsync" else {})
    spec = {
        "model": {"source": "m", "chatTemplate": "x"},
        "data": {"train": {"source": "d.jsonl"}, "answer": "answer"},
        "algorithm": {"preset": "grpo"},
        "reward": {"functions": [{"type": "exactMatch"}]},
        "stop": {"steps": 1},
        "rollout": {"environment": environment or TOOLS},
        "pipeline": pipeline,
    }
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "test"}, "spec": spec}


def said(document: dict[str, Any]) -> list[str]:
    made, violations = check(document)
    assert made is not None, violations
    return [str(note) for note in notes(resolve(made))]


def test_tools_that_may_hold_up_the_trainer_are_noted() -> None:
    (note,) = said(job())
    assert note.startswith("spec.pipeline.staleness.onDeadline: an episode can make 24 calls of up to 30 s (search);")
    assert "longer than 4 steps" in note
    (note,) = said(job(environment=TOOLS | {"maxCalls": 5, "maxCallsPerTurn": 2}))
    assert "can make 5 calls" in note


@pytest.mark.parametrize(
    "quiet",
    [
        job(onDeadline="end"),
        job(onDeadline="drop"),
        job("sync"),
        job(environment={"type": "tools", "tools": [{"type": "calculator"}]}),
        job(environment={"type": "singleTurn"}),
        job(environment=TOOLS | {"maxTurns": 1}),
    ],
)
def test_nothing_is_noted_where_nothing_can_be_late(quiet: dict[str, Any]) -> None:
    assert said(quiet) == []


def test_validate_prints_notes_and_the_file_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job()))
    assert main(["validate", "--schema-only", str(path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{path}: valid"
    assert second.startswith("note: spec.pipeline.staleness.onDeadline: ")
    assert main(["validate", "--schema-only", "--quiet", str(path)]) == 0
    assert capsys.readouterr().out == ""


def test_rows_that_several_pods_compute_are_noted() -> None:
    trainer: dict[str, Any] = {"replicas": 2, "gpusPerReplica": 4, "parallelism": {"context": 8}}
    document = job("sync", {"type": "singleTurn"})
    document["spec"] |= {"trainer": trainer, "batch": {"miniBatchGroups": 8}}
    (note,) = said(document)
    assert note.startswith(
        "spec.trainer.parallelism.context: the 8 ranks that share a row do not all fit in one pod of 4 GPUs"
    )
    for loud, words in (
        ({"context": 4, "tensor": 2}, "context: the 8 ranks that share a row"),
        ({"tensor": 8}, "tensor: the 8 tensor-parallel ranks do not all fit in one pod of 4 GPUs"),
    ):
        document["spec"]["trainer"] = trainer | {"parallelism": loud}
        (note,) = said(document)
        assert note.startswith(f"spec.trainer.parallelism.{words}")
    for quiet in (
        trainer | {"parallelism": {"context": 4}},
        trainer | {"parallelism": {"context": 1}},
        trainer | {"parallelism": {"context": 2, "tensor": 2}},
        trainer | {"gpusPerReplica": 0, "parallelism": {"context": 2}},
    ):
        document["spec"]["trainer"] = quiet
        assert said(document) == []
