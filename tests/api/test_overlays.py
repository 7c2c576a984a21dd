"""Files laid over a job: merged field by field, validated as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api import JobInvalid, load_jobs
from rljob_api.overrides import merged

BASE = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: base}
spec:
  model: {source: some/model}
  data: {train: {source: some/data}, answer: answer}
  reward: {functions: [{type: math}, {type: gsm8k}]}
  algorithm: {preset: grpo}
  batch: {groups: 64, samplesPerPrompt: 8}
  stop: {steps: 10}
"""


def files(folder: Path, *texts: str) -> list[Path]:
    paths = []
    for number, text in enumerate(texts):
        path = folder / f"{number}.yaml"
        path.write_text(text)
        paths.append(path)
    return paths


def test_merging_follows_rfc_7386() -> None:
    """Cases of the RFC's appendix A."""
    cases = [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "foo"}, "bar", "bar"),
    ]
    for document, overlay, expected in cases:
        assert merged(document, overlay) == expected


def test_overlays_apply_in_order_and_assignments_last(tmp_path: Path) -> None:
    base, *overlays = files(
        tmp_path,
        BASE,
        "metadata: {name: larger}\nspec:\n  batch: {groups: 128}\n  reward: {functions: [{type: exactMatch}]}\n",
        "spec:\n  batch: {groups: 256, samplesPerPrompt: null}\n",
    )
    [job] = load_jobs(base, ["stop.steps=20"], overlays)
    assert job.metadata.name == "larger"
    assert (job.spec.batch.groups, job.spec.batch.samples_per_prompt) == (256, None)
    assert [function.type for function in job.spec.reward.functions] == ["exactMatch"]
    assert job.spec.stop is not None
    assert job.spec.stop.steps == 20


def test_the_job_is_checked_as_a_whole(tmp_path: Path) -> None:
    base, overlay = files(tmp_path, BASE, "spec:\n  batch: {miniBatchGroups: 60}\n  pipline: {mode: sync}\n")
    with pytest.raises(JobInvalid) as caught:
        load_jobs(base, overlays=[overlay])
    assert {v.path for v in caught.value.violations} == {"spec.batch.miniBatchGroups", "spec.pipline"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "an overlay is a map"),
        ("spec: {}\n---\nspec: {}\n", "contains 2 documents"),
        ("", "contains 0 documents"),
        ("spec: {\n", "fix the YAML syntax here"),
    ],
)
def test_what_is_no_overlay_is_refused(tmp_path: Path, text: str, message: str) -> None:
    base, overlay = files(tmp_path, BASE, text)
    with pytest.raises(JobInvalid, match=message):
        load_jobs(base, overlays=[overlay])


def test_the_bucket_overlay_makes_a_valid_job_of_another() -> None:
    examples = Path(__file__).parents[2] / "examples"
    [job] = load_jobs(examples / "gsm8k.yaml", overlays=[examples / "overlays" / "bucket.yaml"])
    assert job.spec.checkpoint.uri == "s3://results/runs"
    pods = (job.spec.head.pod, job.spec.rollout.pod, job.spec.trainer.pod)
    names = [[variable.name for variable in pod.env] for pod in pods]
    assert names == [["AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]] * 3
