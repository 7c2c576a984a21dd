"""The GPU's benchmark where there is no GPU: what it says of what is missing, and the parts that a CPU can try."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.environments import ROOT, peer_environment
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import needs
from benchmarks.gpu.model import shaped_model
from benchmarks.gpu.wheels import own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaped_model(tmp_path_factory.mktemp("cache"), small=True)


def run(program: str, *arguments: object) -> None:
    asked = [sys.executable, "-c", program, *map(str, arguments)]
    environment = peer_environment(1, PYTHONPATH=command.IMPORTABLE)
    ended = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


WITHOUT_RAY_AND_VLLM = """
import runpy, sys

sys.modules |= dict.fromkeys(("ray", "vllm", "datasets", "math_verify"))  # as if they were not installed
runpy.run_module("benchmarks.gpu.learner", run_name="__main__")
"""


def test_the_learner_is_measured_with_torch_and_transformers_alone(model: Path, tmp_path: Path) -> None:
    written = tmp_path / "update.json"
    asked = ("--device", "cpu", "--sequences", 16, "--samples", 8, "--tokens", 5)
    run(WITHOUT_RAY_AND_VLLM, "--model", model, "--write", written, *asked)
    update = json.loads(written.read_text())
    assert len(update["seconds"]) == 5
    # 16 responses of 5 tokens, and prompts of 256 at most, which are two.
    assert 16 * (5 + 1) < update["tokens"] <= 16 * (5 + 256)
    assert (update["device"], update["utilisation"]) == ("cpu", None)


@pytest.mark.vllm
def test_our_engine_makes_every_token_that_was_asked_for(model: Path, tmp_path: Path) -> None:
    written = tmp_path / "rounds.json"
    program = "import runpy; runpy.run_module('benchmarks.gpu.engine', run_name='__main__')"
    asked = ("--device", "cpu", "--requests", 3, "--tokens", 4)
    run(program, "ours", "--model", model, "--write", written, *asked)
    assert [made for made, _ in json.loads(written.read_text())] == [12, 12]


def test_without_a_gpu_every_part_is_left_out_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--cache", str(tmp_path), "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" sees no GPU")[0] for line in said] == [
        f"left out: {part}: torch {torch.__version__}" for part in ("engine", "learner", "step")
    ]
    assert not list(tmp_path.iterdir())


def test_packages_that_are_missing_are_named_with_the_ways_to_bring_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name in ("ray", "vllm") else object())
    assert needs.missing("learner", "cuda", tmp_path) is None
    for part, names in (("engine", "no vllm:"), ("step", "no vllm and no ray:")):
        lack = needs.missing(part, "cuda", tmp_path)  # type: ignore[arg-type]
        assert lack is not None
        assert names in lack
        assert "requirements/install.py --accelerator gpu" in lack
        assert "benchmarks.gpu.wheels FOLDER" in lack


def test_where_no_index_is_in_reach_the_step_is_left_out_with_the_way_to_bring_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very thing: uv is asked for the environment, and has nothing but an empty folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(needs, "find_spec", lambda name: object())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    lack = needs.missing("step", "cuda", tmp_path / "cache")
    assert lack is not None
    assert "TRL with vLLM cannot be made" in lack
    assert "benchmarks.gpu.wheels FOLDER" in lack


def test_every_wheel_of_ours_that_is_fetched_has_a_hash() -> None:
    entries = own().replace("\\\n", "").splitlines()
    pinned = [entry for entry in entries if "==" in entry]
    assert all("--hash=sha256:" in entry for entry in pinned)
    names = {entry.partition("==")[0].strip() for entry in pinned}
    # What trains, what installs, and what makes the project's own wheel.
    assert {"torch", "vllm", "ray", "transformers", "uv", "hatchling", "editables"} <= names
