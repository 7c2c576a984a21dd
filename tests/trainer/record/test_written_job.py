"""The output folder's job.yaml means the same job, wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api import resolve
from rljob_api.loading import load_jobs
from rljob_trainer.record.written_job import write_job

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: tiny}
spec:
  model: {source: SOURCE}
  data:
    train: {source: data/train-*.jsonl}
    validation:
      - {name: held-out, source: ./test.jsonl}
      - {name: hub, source: openai/gsm8k, split: test}
    prompt: question
    answer: answer
  reward: {functions: [{type: gsm8k}]}
  algorithm: {preset: grpo}
"""


@pytest.mark.parametrize("model", ["model", "org/model", "s3://bucket/model"])
def test_paths_of_files_that_are_there_become_absolute(tmp_path: Path, model: str) -> None:
    base, output = tmp_path / "jobs", tmp_path / "runs" / "tiny"
    for folder in (base / "data", base / "model", output):
        folder.mkdir(parents=True)
    for file in ("data/train-0.jsonl", "test.jsonl"):
        (base / file).touch()
    (job,) = load_jobs(JOB.replace("SOURCE", model))
    write_job(output / "job.yaml", resolve(job), base)
    (written,) = load_jobs(output / "job.yaml")
    spec = written.spec
    assert spec.model.source == (str(base / "model") if model == "model" else model)
    assert spec.data.train.source == str(base / "data" / "train-*.jsonl")
    assert [held_out.source for held_out in spec.data.validation] == [str(base / "test.jsonl"), "openai/gsm8k"]
    # And nothing else was changed.
    sources = {"model": job.spec.model, "data": job.spec.data}
    assert resolve(written.model_copy(update={"spec": spec.model_copy(update=sources)})) == resolve(job)


def test_each_part_of_the_training_data_is_found_from_anywhere(tmp_path: Path) -> None:
    base, output = tmp_path / "jobs", tmp_path / "runs"
    for folder in (base, output):
        folder.mkdir()
    (base / "easy.jsonl").touch()
    parts = "train: {parts: [{name: easy, source: easy.jsonl}, {name: hub, source: openai/gsm8k, split: train}]}"
    (job,) = load_jobs(JOB.replace("train: {source: data/train-*.jsonl}", parts).replace("SOURCE", "org/model"))
    write_job(output / "job.yaml", resolve(job), base)
    (written,) = load_jobs(output / "job.yaml")
    assert [part.source for part in written.spec.data.train.parts] == [str(base / "easy.jsonl"), "openai/gsm8k"]


def test_reward_models_are_found_from_anywhere(tmp_path: Path) -> None:
    base, output = tmp_path / "jobs", tmp_path / "runs"
    for folder in (base / "scores", output):
        folder.mkdir(parents=True)
    functions = "".join(
        f"{{type: rewardModel, name: {name}, rewardModel: {{source: {source}}}}}, "
        for name, source in (("here", "scores"), ("hub", "org/scores"))
    )
    (job,) = load_jobs(JOB.replace("{type: gsm8k}", functions).replace("SOURCE", "org/model"))
    write_job(output / "job.yaml", resolve(job), base)
    (written,) = load_jobs(output / "job.yaml")
    found = [f.reward_model.source for f in written.spec.reward.functions if f.reward_model is not None]
    assert found == [str(base / "scores"), "org/scores"]


def test_the_model_of_a_judge_is_found_from_anywhere(tmp_path: Path) -> None:
    base, output = tmp_path / "base", tmp_path / "output"
    for folder in (base / "judges", output):
        folder.mkdir(parents=True)
    text = JOB.replace("{type: gsm8k}", "{type: judge, judge: {template: '{response}'}}").replace("SOURCE", "org/model")
    (job,) = load_jobs(text.rstrip() + "\n  judge: {model: {source: judges}}\n")
    write_job(output / "job.yaml", resolve(job), base)
    (written,) = load_jobs(output / "job.yaml")
    assert written.spec.judge is not None
    assert written.spec.judge.model.source == str(base / "judges")


def test_the_model_of_a_critic_is_found_from_anywhere(tmp_path: Path) -> None:
    base, output = tmp_path / "base", tmp_path / "output"
    for folder in (base / "scores", output):
        folder.mkdir(parents=True)
    algorithm = "algorithm: {preset: ppo, critic: {model: {source: scores}}}"
    (job,) = load_jobs(JOB.replace("algorithm: {preset: grpo}", algorithm).replace("SOURCE", "org/model"))
    write_job(output / "job.yaml", resolve(job), base)
    (written,) = load_jobs(output / "job.yaml")
    assert written.spec.algorithm.critic is not None
    assert written.spec.algorithm.critic.model is not None
    assert written.spec.algorithm.critic.model.source == str(base / "scores")


def test_a_corpus_is_found_from_anywhere(tmp_path: Path) -> None:
    base, output = tmp_path / "base", tmp_path / "output"
    for folder in (base, output):
        folder.mkdir()
    (base / "facts.jsonl").touch()
    tools = [f"{{type: search, name: {name}, corpus: {{source: {name}.jsonl}}}}" for name in ("facts", "absent")]
    rollout = f"  rollout: {{environment: {{type: tools, tools: [{', '.join(tools)}]}}}}\n"
    (job,) = load_jobs(JOB.replace("SOURCE", "org/model").rstrip() + "\n" + rollout)
    write_job(output / "job.yaml", resolve(job), base)
    (written,) = load_jobs(output / "job.yaml")
    found = [tool.corpus.source for tool in written.spec.rollout.environment.tools if tool.corpus is not None]
    assert found == [str(base / "facts.jsonl"), "absent.jsonl"]


def test_the_interpreter_of_a_task_is_found_from_anywhere(tmp_path: Path) -> None:
    base, output = tmp_path / "base", tmp_path / "output"
    for folder in (base / "venv" / "bin", output):
        folder.mkdir(parents=True)
    (base / "venv" / "bin" / "python").touch()
    task = "train: {task: {type: reasoningGym, name: chain_sum, size: 8, python: venv/bin/python}}"
    (job,) = load_jobs(
        JOB.replace("train: {source: data/train-*.jsonl}", task)
        .replace("SOURCE", "org/model")
        .replace("{type: gsm8k}", "{type: gsm8k}, {type: reasoningGym, sources: [chain_sum]}")
    )
    write_job(output / "job.yaml", resolve(job), base)
    (written,) = load_jobs(output / "job.yaml")
    assert written.spec.data.train.task is not None
    assert written.spec.data.train.task.python == str(base / "venv" / "bin" / "python")
