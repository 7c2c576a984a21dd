"""What is said of a job that is meant for a cluster: by `rljob validate --cluster` and by `rljob render`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rljob_api import load_jobs, resolve
from rljob_api.on_cluster import cluster_notes, refused
from rljob_trainer.cli import main

JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: test}
spec:
  model: {source: pvc://models/small}
  data: {train: {source: "pvc://data/train.jsonl"}, answer: answer}
  algorithm: {preset: grpo}
  reward: {functions: [{type: exactMatch}]}
  head: {pod: {resources: {requests: {cpu: 1, memory: 4Gi}}}}
  trainer: {pod: {resources: {limits: {memory: 4Gi}}}}
  checkpoint: {uri: "pvc://results/runs"}
  stop: {steps: 1}
"""
"""With everything that pods need."""


def noted(*assignments: str, text: str = JOB) -> list[str]:
    """The paths of the notes."""
    (job,) = load_jobs(text, assignments)
    assert list(refused(resolve(job))) == []
    return [note.path for note in cluster_notes(resolve(job))]


def test_nothing_is_said_of_a_job_that_has_what_pods_need() -> None:
    assert noted() == []
    assert noted("model.source=org/model", "data.train.source=org/data") == []
    assert noted("model.source=/models/small", "data.train.source=s3://data/train-*.jsonl") == []


KEY = "spec.reward.functions[0].judge.apiKeyEnv"
FROM_A_SECRET = "[{name: JUDGE_KEY, valueFrom: {secretKeyRef: {name: keys, key: judge}}}]"


def judged(key: str, pod: str = "") -> str:
    """A job whose judge takes its key from a variable, with more of the head's pod."""
    judge = 'judge: {baseUrl: "https://j/v1", model: m, template: "{response}", apiKeyEnv: %s}'
    text = JOB.replace("{type: exactMatch}", "{type: judge, %s}" % (judge % key))
    return text.replace("head: {pod: {", f"head: {{pod: {{{pod}")


@pytest.mark.parametrize(
    ("pod", "there"),
    [
        ("", False),
        (f"env: {FROM_A_SECRET}, ", True),
        ("env: [{name: OTHER_KEY, value: a}], ", False),
        (f"template: {{spec: {{containers: [{{name: ray, env: {FROM_A_SECRET}}}]}}}}, ", True),
        ("template: {spec: {containers: [{name: ray, envFrom: [{secretRef: {name: keys}}]}]}}, ", True),
        (f"template: {{spec: {{containers: [{{name: proxy, image: a, env: {FROM_A_SECRET}}}]}}}}, ", False),
    ],
)
def test_a_judges_key_that_nobody_sets_on_the_head(pod: str, there: bool) -> None:
    assert noted(text=judged("JUDGE_KEY", pod)) == ([] if there else [KEY])


@pytest.mark.parametrize("name", ["RAY_KEY", "RLJOB_KEY", "RANK"])
def test_a_judges_key_that_no_pod_may_set(name: str) -> None:
    (job,) = load_jobs(judged(name))
    (note,) = cluster_notes(resolve(job))
    assert str(note) == f"{KEY}: no pod may set {name}, which belongs to rljob or Ray; use another name"


@pytest.mark.parametrize(
    ("assignment", "path"),
    [
        ("model.source=./model", "spec.model.source"),
        ("model.source=~/model", "spec.model.source"),
        ("data.train.source=train.jsonl", "spec.data.train.source"),
        ("data.train.source=data/sets/questions", "spec.data.train.source"),
        ("checkpoint.uri=runs", "spec.checkpoint.uri"),
        ("checkpoint.uri=null", "spec.checkpoint.uri"),
        ("head.pod.resources=null", "spec.head.pod.resources"),
        ("placement=separate", "spec.rollout.pod.resources"),
    ],
)
def test_what_a_pod_lacks(assignment: str, path: str) -> None:
    assert noted(assignment) == [path]


def test_resources_of_a_template_count() -> None:
    container = "{spec: {containers: [{name: ray, resources: {limits: {memory: 4Gi}}}]}}"
    assert noted("head.pod.resources=null", f"head.pod.template={container}") == []


OWN = ["reward.functions[0]={type: custom, function: 'my_rewards:score'}"]
TOOL = "rollout.environment={type: tools, tools: [{type: custom, function: 'my_tools:search'}]}"


def test_code_of_one_s_own_is_not_in_a_pod_by_itself() -> None:
    assert noted(*OWN) == ["spec.reward.functions[0].function"]
    assert noted(*OWN, "code=[{configMap: mine}]") == []
    assert noted(TOOL) == ["spec.rollout.environment.tools[0].function"]
    agent = "rollout.environment={type: agent, command: [python, my_agent.py], callFormat: hermes}"
    assert noted(agent) == ["spec.rollout.environment.command"]
    assert noted(agent.replace("my_agent.py", "/opt/my_agent.py")) == []


def test_a_random_model_without_a_place_is_refused_as_the_operator_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = yaml.safe_load(JOB)
    spec["spec"]["model"] = {"random": {"contextLength": 2048, "tokenizer": {"characters": "abc"}}}
    del spec["spec"]["checkpoint"]
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(spec))
    assert main(["validate", "--schema-only", str(job)]) == 0
    assert main(["validate", "--schema-only", "--cluster", str(job)]) == 64
    assert main(["render", str(job)]) == 64
    captured = capsys.readouterr()
    line = (
        "spec.checkpoint.uri: the head pod creates the random model, and the other pods need a place to load it from; "
    )
    assert captured.out.splitlines()[-1].startswith(line)
    assert captured.err.splitlines()[-1].startswith(line)


def test_of_several_jobs_the_one_that_is_refused_is_named_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = yaml.safe_load(JOB)
    other["metadata"]["name"] = "other"
    other["spec"]["model"] = {"random": {"contextLength": 2048, "tokenizer": {"characters": "abc"}}}
    del other["spec"]["checkpoint"]
    job = tmp_path / "jobs.yaml"
    job.write_text(f"{JOB}\n---\n{yaml.safe_dump(other)}")
    assert main(["validate", "--schema-only", "--cluster", str(job)]) == 64
    second = job.read_text()[: job.read_text().index("---")].count("\n") + 1
    (line,) = capsys.readouterr().out.splitlines()
    named = re.match(rf"{job}:(\d+): spec\.checkpoint\.uri: ", line)
    assert named is not None
    assert int(named[1]) > second


def test_both_commands_print_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    missing = ["--set", "data.train.source=train.jsonl"]
    note = (
        "note: spec.data.train.source: train.jsonl is a path of this machine, and no pod has it; copy it to a volume "
        "or a bucket, and write pvc://claim/path or s3://bucket/path"
    )
    assert main(["validate", "--schema-only", str(job), *missing]) == 0
    assert note not in capsys.readouterr().out
    assert main(["validate", "--schema-only", "--cluster", str(job), *missing]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{job}: valid", note]
    assert main(["render", str(job), *missing]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [note]
    assert len(list(yaml.safe_load_all(captured.out))) == 4
