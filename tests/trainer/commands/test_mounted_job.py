"""A job as it is mounted in a pod: the generation it has to have, claims as paths, and where its state belongs."""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rljob_api import JobInvalid, cluster
from rljob_trainer.commands.mounted_job import mounted_job, options_of
from rljob_trainer.control.http import Listening
from rljob_trainer.errors import DeadlineError, JobFileError
from rljob_trainer.storage.bucket import ObjectBucket

LISTENING = Listening(0)


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """A job of which everything lies in claims."""
    storage = tmp_path / "mnt"
    (storage / "data").mkdir(parents=True)
    (storage / "data" / "train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 3)
    write(tmp_path, generation=3)
    return tmp_path / "job.json"


def write(folder: Path, generation: int, **spec: Any) -> None:
    tokenizer = {"characters": "0123456789+?"}
    document = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny", "annotations": {cluster.GENERATION_ANNOTATION: str(generation)}},
        "spec": {
            "model": {"random": {"contextLength": 64, "tokenizer": tokenizer}},
            "data": {
                "train": {"source": "pvc://data/train.jsonl"},
                "prompt": "question",
                "answer": "answer",
                "maxPromptTokens": 16,
            },
            "reward": {"functions": [{"type": "exactMatch"}]},
            "algorithm": {"preset": "grpo"},
            "rollout": {"engine": "torch", "maxResponseTokens": 4},
            "checkpoint": {"uri": "pvc://state/runs"},
            **spec,
        },
    }
    (folder / "job.json").write_text(json.dumps(document))


def arguments(file: Path) -> argparse.Namespace:
    return argparse.Namespace(file=file, storage=file.parent / "mnt", attempt=4, generation=3)


def test_claims_become_paths_and_state_has_a_place_of_its_own(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = mounted.parent / "mnt"
    job = mounted_job(mounted, 3, storage)
    assert job.spec.data.train.sources[0].source == str(storage / "data" / "train.jsonl")
    for name, value in {"RAY_ADDRESS": "x", "RLJOB_NAMESPACE": "team", "RLJOB_NAME": "tiny", "RLJOB_UID": "u1"}.items():
        monkeypatch.setenv(name, value)
    options = options_of(job, arguments(mounted), LISTENING)
    assert options.output == storage / "state" / "runs" / "team" / "tiny-u1"
    assert (options.attempt, options.resume, options.by_role, options.keeps_state) == (4, "auto", True, True)


def test_a_reward_model_in_a_claim_becomes_a_path_and_other_texts_of_rewards_stay(mounted: Path) -> None:
    storage = mounted.parent / "mnt"
    (folder := storage / "models" / "reward").mkdir(parents=True)
    config = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    model = {"type": "rewardModel", "rewardModel": {"source": "pvc://models/reward"}}
    write(mounted.parent, generation=3, reward={"functions": [{"type": "pattern", "pattern": "pvc://a/b"}, model]})
    pattern, scored = mounted_job(mounted, 3, storage).spec.reward.functions
    assert scored.reward_model is not None
    assert scored.reward_model.source == str(folder)
    assert pattern.pattern == "pvc://a/b"


def test_a_judge_in_a_claim_becomes_a_path_and_its_template_stays(mounted: Path) -> None:
    storage = mounted.parent / "mnt"
    (folder := storage / "models" / "judge").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    judge = {"type": "judge", "judge": {"template": "pvc://a/{response}"}}
    pool = {"model": {"source": "pvc://models/judge", "chatTemplate": "pvc://a/b"}}
    write(mounted.parent, generation=3, reward={"functions": [judge]}, judge=pool)
    spec = mounted_job(mounted, 3, storage).spec
    assert spec.judge is not None
    assert (spec.judge.model.source, spec.judge.model.chat_template) == (str(folder), "pvc://a/b")
    (function,) = spec.reward.functions
    assert function.judge is not None
    assert function.judge.template == "pvc://a/{response}"


def test_what_a_critic_starts_from_in_a_claim_becomes_a_path(mounted: Path) -> None:
    storage = mounted.parent / "mnt"
    critic = {"model": {"source": "pvc://models/scores"}}
    write(mounted.parent, generation=3, algorithm={"preset": "ppo", "critic": critic})
    with pytest.raises(JobInvalid, match=r"critic\.model\.source: there is no folder .*/mnt/models/scores"):
        mounted_job(mounted, 3, storage)


def test_a_corpus_in_a_claim_becomes_a_path(mounted: Path) -> None:
    storage = mounted.parent / "mnt"
    tool = {"type": "search", "corpus": {"source": "pvc://corpora/a.jsonl"}}
    (storage / "models" / "any").mkdir(parents=True)
    write(
        mounted.parent,
        generation=3,
        model={"source": "pvc://models/any"},
        rollout={"engine": "torch", "maxResponseTokens": 4, "environment": {"type": "tools", "tools": [tool]}},
    )
    with pytest.raises(JobInvalid, match=r"corpus\.source: there is no file .*/mnt/corpora/a\.jsonl"):
        mounted_job(mounted, 3, storage)


def test_another_job_s_checkpoint_is_taken_once(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "x")
    storage = mounted.parent / "mnt"
    other = storage / "state" / "other"
    other.mkdir(parents=True)
    write(mounted.parent, generation=3, restore={"from": "pvc://state/other"})
    job = mounted_job(mounted, 3, storage)
    options = options_of(job, arguments(mounted), LISTENING)
    assert options.restore == str(other)
    (options.output / "checkpoints" / "step-00000001").mkdir(parents=True)
    # From now on the other's may be removed: the next attempt doesn't need it.
    other.rmdir()
    job = mounted_job(mounted, 3, storage)
    assert options_of(job, arguments(mounted), LISTENING).restore is None


def test_state_in_a_bucket_has_a_working_copy_on_the_head(
    mounted: Path, monkeypatch: pytest.MonkeyPatch, object_store: Any
) -> None:
    uri = object_store.place()
    write(mounted.parent, generation=3, checkpoint={"uri": f"{uri}/"}, restore={"from": "pvc://state/other"})
    other = mounted.parent / "mnt" / "state" / "other"
    other.mkdir(parents=True)
    for name, value in {"RAY_ADDRESS": "x", "RLJOB_NAMESPACE": "team", "RLJOB_NAME": "tiny", "RLJOB_UID": "u1"}.items():
        monkeypatch.setenv(name, value)
    options = options_of(mounted_job(mounted, 3, mounted.parent / "mnt"), arguments(mounted), LISTENING)
    assert options.output == Path("/tmp/rljob/team/tiny-u1")
    assert options.state == f"{uri}/team/tiny-u1"
    assert options.keeps_state
    assert options.restore == str(other)

    ObjectBucket(options.state).write("checkpoints/step-00000002-0123abcd/manifest.json", b"{}")
    other.rmdir()
    options = options_of(mounted_job(mounted, 3, mounted.parent / "mnt"), arguments(mounted), LISTENING)
    assert options.restore is None


def test_another_job_s_checkpoint_that_is_not_there_is_named(mounted: Path) -> None:
    write(mounted.parent, generation=3, restore={"from": "pvc://state/none"})
    with pytest.raises(JobInvalid, match=r"spec\.restore\.from: there is no folder .*/mnt/state/none"):
        mounted_job(mounted, 3, mounted.parent / "mnt")


def test_without_storage_nothing_is_kept(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "x")
    write(mounted.parent, generation=3, checkpoint={})
    options = options_of(mounted_job(mounted, 3, mounted.parent / "mnt"), arguments(mounted), LISTENING)
    assert not options.keeps_state


def test_a_file_that_is_not_yet_up_to_date_is_waited_for(mounted: Path) -> None:
    def update() -> None:
        time.sleep(0.3)
        write(mounted.parent, generation=4, checkpoint={"uri": "pvc://state/later"})

    threading.Thread(target=update).start()
    job = mounted_job(mounted, 4, mounted.parent / "mnt")
    assert job.spec.checkpoint.uri == str(mounted.parent / "mnt" / "state" / "later")
    with pytest.raises(DeadlineError, match="still has generation 4 after 0 s, but generation 5 is required"):
        mounted_job(mounted, 5, mounted.parent / "mnt", patience=0.0)


def test_what_the_operator_did_not_write_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"job\.json cannot be read"):
        mounted_job(tmp_path / "job.json", 1, tmp_path)
    (tmp_path / "job.json").write_text("- a list")
    with pytest.raises(JobFileError, match=r"is not .*JSON written by the operator"):
        mounted_job(tmp_path / "job.json", 1, tmp_path)


def test_texts_beside_places_stay_as_they_are(mounted: Path) -> None:
    model = {
        "random": {"contextLength": 64, "tokenizer": {"characters": "0123456789+?pvc:/a"}},
        "chatTemplate": "pvc://a/{{ messages[0].content }}",
    }
    write(mounted.parent, generation=3, model=model)
    assert mounted_job(mounted, 3, mounted.parent / "mnt").spec.model.chat_template == model["chatTemplate"]
