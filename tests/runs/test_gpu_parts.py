"""The check for GPUs where there is none: the parts of it that a CPU can try, each in its process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benchmarks.gpu import __main__ as command


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def figures(outcome: command.PartOutcome) -> dict[str, float]:
    return {figure.name: figure.value for figure in outcome.figures}


def test_the_parts_that_want_torch_alone_run_without_ray_and_vllm_and_meet_their_goals(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ray", "vllm"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('there is no {name} here')")
    monkeypatch.setattr(command, "IMPORTABLE", os.pathsep.join([str(tmp_path), command.IMPORTABLE]))
    names = ["attention", "learner", "publication", "publication-ipc", "killed", "compile"]
    outcomes = command.check(names, "cpu", cache, tmp_path, command.SECONDS)
    assert {name: outcome.reason for name, outcome in outcomes.items()} == dict.fromkeys(names, "")
    missed = [figure for outcome in outcomes.values() for figure in outcome.figures if figure.met is False]
    assert not missed
    # Forward and three gradients: with grouped heads, without, and with capped scores.
    assert len(outcomes["attention"].figures) == 12
    assert figures(outcomes["learner"])["small, bfloat16: update_actor"] > 0
    # As the learner's own tests have it: programs and layers as they are have one gradient.
    assert figures(outcomes["compile"])["compile: gradient, relative difference"] < 1e-5
    written = json.loads((tmp_path / "gpu_on_cpu.json").read_text())["results"]
    assert list(written) == names


@pytest.mark.vllm
def test_engine_and_learner_agree_and_the_engine_computes_the_same_after_a_sleep(cache: Path) -> None:
    outcome = command.run("agreement", 600, "cpu", cache)
    assert outcome.reason == ""
    assert [figure.met for figure in outcome.figures] == [True, True, True]
