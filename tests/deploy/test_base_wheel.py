"""`pip install .` and nothing else: the wheel, in an environment with what it asks for itself, from the index."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml
from requirements import install

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the base wheel, as somebody has it who has no checkout."""
    folder = tmp_path_factory.mktemp("base")
    venv.create(folder, symlinks=True)
    built = ["--build-constraints", install.REQUIREMENTS / "build.txt", "--require-build-hashes"]
    pinned = ["--constraints", install.REQUIREMENTS / "cpu.txt"]
    command = [Path(sys.executable).with_name("uv"), "pip", "install", "--python", folder / "bin" / "python"]
    done = subprocess.run(
        [*command, *built, *pinned, ROOT], env=install.index_settings(), cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def said(environment: Path, *arguments: str | Path) -> str:
    """What a verb prints when it ends well."""
    shell = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [environment / "bin" / "rljob", *arguments]
    done = subprocess.run(command, env=shell, cwd=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_example_of_the_wheel_is_validated_explained_and_rendered(environment: Path) -> None:
    example = environment / "share/rljob/examples/gsm8k.yaml"
    assert said(environment, "validate", example) == f"{example}: valid by itself\n"
    assert "learningRate" in said(environment, "explain", "trainer.optimizer")
    kinds = [document["kind"] for document in yaml.safe_load_all(said(environment, "render", example))]
    assert "RayCluster" in kinds


def test_the_operators_command_says_which_extra_it_needs(environment: Path) -> None:
    done = subprocess.run(
        [environment / "bin/rljob-operator", "--help"], cwd=environment, capture_output=True, text=True
    )
    assert done.returncode == 64
    assert done.stderr.count("\n") == 1
    assert "pip install 'rljob[operator]'" in done.stderr


def test_the_wheel_holds_crd_chart_and_examples_as_the_checkout_does(environment: Path) -> None:
    for folder in ("crds", "charts", "examples"):
        there = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
        files = {path.relative_to(ROOT): path.read_bytes() for path in there}
        shipped = environment / "share/rljob"
        held = {p.relative_to(shipped): p.read_bytes() for p in (shipped / folder).rglob("*") if p.is_file()}
        assert held == files


def test_type_checkers_read_all_three_packages(environment: Path) -> None:
    (packages,) = environment.glob("lib/python3.*/site-packages")
    assert {path.parent.name for path in packages.glob("rljob_*/py.typed")} == {
        "rljob_api", "rljob_operator", "rljob_trainer",
    }  # fmt: skip
