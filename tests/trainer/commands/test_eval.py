"""Which model `rljob eval` evaluates: the resolved job. Whole evaluations are in tests/runs/test_run.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_api import JobInvalid
from rljob_api.spec.model import Model
from rljob_trainer.commands import eval as verb

Edit = Callable[[str, str], Path]


@pytest.fixture
def elsewhere(folder: Path, edited: Edit, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder that is not the job file's. The job has a model with a revision and a tokenizer of its own."""
    edited("{source: ./model}", "{source: ./model, revision: v1, tokenizer: ./model}")
    edited("    prompt:", "    validation: [{name: held-out, source: train.jsonl}]\n    prompt:")
    here = folder / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def model_of(*arguments: str) -> Model:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    job, base = verb.job_to_evaluate(parser.parse_args(["../job.yaml", *arguments]))
    assert base == Path("..").resolve()
    return job.spec.model


def test_the_jobs_own_model(elsewhere: Path) -> None:
    model = model_of()
    assert (model.source, model.revision, model.tokenizer) == ("./model", "v1", "./model")


@pytest.mark.parametrize("written", ["mine", "./mine", "../elsewhere/mine", "~/mine"])
def test_a_folder_is_looked_for_from_the_current_one(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))
    (elsewhere.parent / "model").rename(elsewhere / "mine")
    model = model_of("--model", written)
    assert Path(model.source or "").is_absolute()
    assert Path(model.source or "").resolve() == elsewhere / "mine"
    assert (model.revision, model.tokenizer) == (None, None)


@pytest.mark.parametrize("written", ["owner/name", "gpt2", "s3://bucket/model", "pvc://claim/model", "hf://owner/name"])
def test_what_is_no_path_stays_as_it_is(elsewhere: Path, written: str) -> None:
    model = model_of("--model", written)
    assert (model.source, model.revision, model.tokenizer) == (written, None, None)


def test_what_is_set_counts_for_the_other_model(elsewhere: Path) -> None:
    model = model_of("--model", "owner/name", "--set", "model.revision=v2", "--set", "model.tokenizer=owner/words")
    assert (model.source, model.revision, model.tokenizer) == ("owner/name", "v2", "owner/words")


def test_a_random_model_makes_room(elsewhere: Path, edited: Edit) -> None:
    edited(
        "{source: ./model, revision: v1, tokenizer: ./model}",
        "{random: {contextLength: 256, hiddenSize: 128, tokenizer: {characters: '01'}}}",
    )
    model = model_of("--model", "owner/name")
    assert (model.source, model.random) == ("owner/name", None)


def test_a_path_without_a_folder_is_named(elsewhere: Path) -> None:
    with pytest.raises(JobInvalid, match=f"spec.model.source: there is no folder {elsewhere}/none"):
        model_of("--model", "./none")
