"""``--set path=value``."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api import JobInvalid, load_jobs
from rljob_api.overrides import apply

DOCUMENT: dict[str, Any] = {
    "metadata": {"name": "a"},
    "spec": {"batch": {"groups": 4}, "reward": {"functions": [{"type": "gsm8k"}]}, "stop": None},
}


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("batch.groups=8", ("spec", "batch", "groups"), 8),
        ("spec.batch.groups=8", ("spec", "batch", "groups"), 8),
        ("trainer.optimizer.learningRate=1e-6", ("spec", "trainer", "optimizer", "learningRate"), 1e-6),
        ("stop.steps=3", ("spec", "stop", "steps"), 3),
        ("reward.functions[0].weight=2", ("spec", "reward", "functions", 0, "weight"), 2),
        ("reward.functions.0.weight=2", ("spec", "reward", "functions", 0, "weight"), 2),
        ("reward.functions[1]={type: math}", ("spec", "reward", "functions", 1), {"type": "math"}),
        ("code[0].configMap=mine", ("spec", "code", 0, "configMap"), "mine"),
        ("trainer.pod.nodeSelector[kubernetes.io/arch]=arm64",
         ("spec", "trainer", "pod", "nodeSelector", "kubernetes.io/arch"), "arm64"),
        ("metadata.name=b", ("metadata", "name"), "b"),
        ("suspend=yes", ("spec", "suspend"), True),
        ('model.source="yes"', ("spec", "model", "source"), "yes"),
        ("data.prompt=a=b", ("spec", "data", "prompt"), "a=b"),
        ("rollout.sampling={temperature: 0.5}", ("spec", "rollout", "sampling"), {"temperature": 0.5}),
    ],
)  # fmt: skip
def test_assignment(assignment: str, path: tuple[str | int, ...], value: object) -> None:
    result: Any = apply(DOCUMENT, [assignment])
    for part in path:
        result = result[part]
    assert result == value


def test_assignments_come_one_after_the_other_and_leave_the_original_alone() -> None:
    before = repr(DOCUMENT)
    result = apply(DOCUMENT, ["batch.groups=8", "batch.groups=16", "stop={steps: 5}", "stop.epochs=1"])
    assert result["spec"]["batch"]["groups"] == 16
    assert result["spec"]["stop"] == {"steps": 5, "epochs": 1}
    assert repr(DOCUMENT) == before


@pytest.mark.parametrize("assignment", ["batch.groups=null", "batch.groups=", "batch.groups=~"])
def test_null_removes(assignment: str) -> None:
    assert apply(DOCUMENT, [assignment])["spec"]["batch"] == {}


def test_null_removes_an_item() -> None:
    assert apply(DOCUMENT, ["reward.functions[0]=null"])["spec"]["reward"]["functions"] == []


@pytest.mark.parametrize(
    ("assignment", "phrase"),
    [
        ("batch.groups", "has no '='"),
        ("=3", "has no path"),
        ("batch..groups=3", "malformed path"),
        ("batch.=3", "malformed path"),
        (".batch=3", "malformed path"),
        ("reward.functions[0=3", "malformed path"),
        ("reward.functions[0]type=3", "malformed path"),
        ("batch.groups.more=3", "spec.batch.groups is neither a map nor a list"),
        ("reward.functions[2].weight=3", "is a list of 1"),
        ("reward.functions.type=x", "'type' is not a position"),
        ("batch.groups=[1", "the value is not YAML"),
        ("batch.groups=.nan", "the value is not YAML"),
    ],
)
def test_what_cannot_be_assigned(assignment: str, phrase: str) -> None:
    with pytest.raises(ValueError) as caught:
        apply(DOCUMENT, [assignment])
    assert phrase in str(caught.value)
    assert repr(assignment) in str(caught.value)


def test_assignments_are_validated_like_the_file(minimal_text: str) -> None:
    (job,) = load_jobs(minimal_text, ["stop.steps=7", "algorithm.preset=ppo"])
    assert job.spec.stop is not None
    assert (job.spec.stop.steps, job.spec.algorithm.preset) == (7, "ppo")
    with pytest.raises(JobInvalid, match=r"spec\.stop\.stepps: there is no such field; did you mean steps\?"):
        load_jobs(minimal_text, ["stop.stepps=7"])
    with pytest.raises(JobInvalid, match="the document: must be a map"):
        load_jobs("[1,\n 2]\n", ["stop.steps=1"])
    with pytest.raises(JobInvalid, match="--set: 'stop' has no '='"):
        load_jobs(minimal_text, ["stop"])
