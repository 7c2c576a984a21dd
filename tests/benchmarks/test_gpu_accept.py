"""What has to be there before known results are looked for on a GPU: all of it is said before the first run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.environments import ROOT
from benchmarks.gpu import accept, parts


class Ready:
    """Arguments with which a run would begin, and what they name."""

    def __init__(self, folder: Path) -> None:
        self.models, self.runs, self.results = folder / "models", folder / "runs", folder / "results"
        self.rljob = folder / "rljob"
        self.rljob.write_text("#!/bin/sh\n")
        self.rljob.chmod(0o755)
        for name in (accept.QWEN25, accept.QWEN3):
            (self.models / name).mkdir(parents=True)
            for file in ("config.json", "model.safetensors", "tokenizer.json"):
                (self.models / name / file).write_text("{}")

    @property
    def arguments(self) -> list[str]:
        return [f"--models={self.models}", f"--runs={self.runs}", f"--results={self.results}"]


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ready:
    made = Ready(tmp_path)
    monkeypatch.setattr(accept, "gpu_count", lambda python: 1)
    monkeypatch.setattr(accept, "RLJOB", made.rljob)

    def begin(*_: object) -> None:
        raise RuntimeError("a run began")

    monkeypatch.setattr(accept.Acceptance, "measure", begin)
    monkeypatch.setattr(accept, "ENDED_BY", ())
    return made


def refused(ready: Ready) -> str:
    with pytest.raises(SystemExit) as ended:
        accept.main(ready.arguments)
    assert isinstance(ended.value.code, str)
    assert "\n" not in ended.value.code
    return ended.value.code


def test_with_everything_there_the_first_run_begins(ready: Ready) -> None:
    with pytest.raises(RuntimeError, match="a run began"):
        accept.main(ready.arguments)


def test_without_a_gpu_nothing_is_made(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "gpu_count", lambda python: 0)
    monkeypatch.setattr(parts, "cuda_of_torch", lambda python: None)
    assert refused(ready).startswith("this Python's torch is a CPU build")
    assert not ready.runs.exists()


def test_a_wrong_folder_of_models_is_told_before_a_missing_gpu(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "gpu_count", lambda python: 0)
    ready.models = ready.models.with_name("elsewhere")
    assert refused(ready).startswith(f"{ready.models}/Qwen2.5-0.5B-Instruct has no config.json; ")


@pytest.mark.parametrize(("commit", "stays"), [("c070a5e", True), ("c070a5e-dirty", False), ("unknown", False)])
def test_what_was_run_with_code_that_is_not_committed_is_not_used_again(
    ready: Ready, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commit: str, stays: bool
) -> None:
    monkeypatch.setattr("benchmarks.machine._commit", lambda: commit)
    earlier = [ready.runs / f"ppo-{commit}" / "metrics.jsonl", ready.runs / "accept-ppo.json"]
    for file in earlier:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    with pytest.raises(RuntimeError, match="a run began"):
        accept.main(ready.arguments)
    assert [file.exists() for file in earlier] == [stays, stays]
    assert ("nothing of earlier runs is used" in capsys.readouterr().out) is not stays


def spoil_rljob(ready: Ready) -> None:
    ready.rljob.unlink()


def make_runs_a_file(ready: Ready) -> None:
    ready.runs.write_text("")


def take_the_place_of_results(ready: Ready) -> None:
    ready.results.write_text("")


def lose_weights(ready: Ready) -> None:
    (ready.models / accept.QWEN3 / "model.safetensors").unlink()


def lose_the_tokenizer(ready: Ready) -> None:
    (ready.models / accept.QWEN25 / "tokenizer.json").unlink()


def lose_a_shard(ready: Ready) -> None:
    folder = ready.models / accept.QWEN3
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def tear_the_index(ready: Ready) -> None:
    (ready.models / accept.QWEN3 / "model.safetensors.index.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (spoil_rljob, "rljob: `make install ACCELERATOR=gpu`"),
        (make_runs_a_file, "runs: File exists; choose another --runs"),
        (take_the_place_of_results, "results: File exists; choose another --results"),
        (lose_weights, "Qwen3-0.6B has no model.safetensors: download"),
        (lose_a_shard, "Qwen3-0.6B has no model-2.safetensors: download"),
        (tear_the_index, "Qwen3-0.6B has no model.safetensors.index.json that can be read: download"),
        (lose_the_tokenizer, "Qwen2.5-0.5B-Instruct has no tokenizer.json and no vocab.json + merges.txt: download"),
    ],
)
def test_what_is_missing_is_said_before_the_first_run(
    ready: Ready, spoil: Callable[[Ready], None], expected: str
) -> None:
    spoil(ready)
    assert expected in refused(ready)


@pytest.mark.parametrize("name", ["runs", "results"])
def test_a_folder_that_nobody_may_write_into_is_said_before_the_first_run(
    ready: Ready, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Root may write everywhere, so the file system's answer is played."""
    folder = ready.runs.with_name(name)
    usual = tempfile.TemporaryFile

    def answer(*, dir: Path) -> object:
        if dir == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return usual(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", answer)
    assert f"{folder}: Permission denied; choose another --{name}" in refused(ready)


def test_make_says_that_the_models_were_not_named() -> None:
    mades = ("MODELS", "MAKEFLAGS", "MAKELEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in mades}
    done = subprocess.run(["make", "gpu-accept"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "make gpu-accept MODELS=FOLDER" in done.stderr
    assert "Traceback" not in done.stderr
