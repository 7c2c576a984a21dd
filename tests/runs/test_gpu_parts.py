"""The check for GPUs where there is none: the parts of it that a CPU can try, each in its process."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.outcomes import PartOutcome
from benchmarks.gpu.wheels import beside_torch
from packaging.requirements import Requirement


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def figures(outcome: PartOutcome) -> dict[str, float]:
    return {figure.name: figure.value for figure in outcome.figures}


HIDING = """import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset({hidden!r})

class Hiding:
    find_distributions = PathFinder.find_distributions

    def find_spec(name, path=None, target=None):
        return None if path is None and name in HIDDEN else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""Python imports a ``sitecustomize`` before anything else, also in processes that a part starts."""


def with_torch() -> set[str]:
    """The distributions that are there wherever torch is: itself and what it requires."""
    found, coming = set[str](), ["torch"]
    while coming:
        name = re.sub(r"[-_.]+", "-", coming.pop()).lower()
        if name not in found:
            found.add(name)
            try:
                asked = [Requirement(line) for line in requires(name) or ()]
            except PackageNotFoundError:
                continue
            coming += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def hidden() -> list[str]:
    """Every module of this environment that is not there where torch and the wheels beside it are all there is."""
    there = with_torch() | set(re.findall(r"^(\S+?)==", beside_torch(), flags=re.MULTILINE))
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", owner).lower() in there or owner.startswith("rljob") for owner in owners)
    )


@pytest.mark.slow(
    stands_for="tests/benchmarks/test_gpu.py::test_packages_that_are_missing_are_named_and_what_wants_torch_alone_runs"
)
def test_the_parts_that_want_torch_alone_run_with_what_is_carried_beside_it_and_meet_their_goals(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = hidden()
    assert {"ray", "vllm", "pyarrow", "packaging", "accelerate"} & {*away} == {"ray", "vllm", "pyarrow"}
    (tmp_path / "sitecustomize.py").write_text(HIDING.format(hidden=away))
    monkeypatch.setattr(command, "IMPORTABLE", os.pathsep.join([str(tmp_path), command.IMPORTABLE]))
    names = ["attention", "learner", "publication", "publication-ipc", "killed", "compile", "profile", "deterministic"]
    outcomes = command.check(names, "cpu", cache, tmp_path, command.SECONDS)
    assert {name: outcome.reason for name, outcome in outcomes.items()} == dict.fromkeys(names, "")
    missed = [figure for outcome in outcomes.values() for figure in outcome.figures if figure.met is False]
    assert not missed
    # Forward and three gradients: with grouped heads, without, and with capped scores.
    assert len(outcomes["attention"].figures) == 20
    assert figures(outcomes["learner"])["small, bfloat16: update_actor"] > 0
    # As the learner's own tests have it: programs and layers as they are have one gradient.
    assert figures(outcomes["compile"])["compile: gradient, relative difference"] < 1e-5
    # With gradients a layer's pieces in both directions, which all layers share; without, some of their own.
    with_gradients, all_programs = (
        figures(outcomes["compile"])[f"compile: programs for {what}"] for what in ("a gradient", "gradients and scores")
    )
    # The output layer has its own in both directions, and one more without gradients.
    assert 0 < with_gradients < all_programs <= 16
    assert figures(outcomes["compile"])["compile: first pass against scores, compiled, largest difference"] == 0
    shares = [value for name, value in figures(outcomes["profile"]).items() if name.endswith("of its work")]
    assert 0.5 < sum(shares) <= 2.001  # of scoring and of an update
    written = json.loads((tmp_path / "gpu_on_cpu.json").read_text())["results"]
    assert list(written) == names


@pytest.mark.slow(
    stands_for="tests/runs/test_vllm.py::test_requests_run_on_through_publications_and_the_engine_agrees_with_the_trainer"
)
@pytest.mark.vllm
def test_engine_and_learner_agree_and_the_engine_computes_the_same_after_a_sleep(cache: Path) -> None:
    outcome = command.run("agreement", 600, "cpu", cache)
    assert outcome.reason == ""
    assert [figure.met for figure in outcome.figures] == [True, True, True]


@pytest.mark.slow(
    stands_for="tests/runs/test_vllm.py::test_requests_run_on_through_publications_and_the_engine_agrees_with_the_trainer"
)
@pytest.mark.vllm
def test_an_engine_with_its_core_in_its_own_process_takes_weights_sleeps_and_wakes(cache: Path) -> None:
    outcome = command.run("engine-process-weights", 900, "cpu", cache)
    assert outcome.reason == ""
    # Twice the first weights, twice others, and that these are others; what it computes after a sleep.
    assert [figure.met for figure in outcome.figures if figure.met is not None] == [True] * 6
    assert {name for name in figures(outcome) if name.endswith(("ipc", "gloo"))} == {
        "own process, publication by ipc", "own process, publication by gloo"
    }  # fmt: skip
