"""One version: that of pyproject.toml, and what repeats it is written by a script."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from types import ModuleType

import pytest

from testcluster.building import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("version", ROOT / "scripts" / "version.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_says_the_version_of_the_project(script: ModuleType) -> None:
    stale = [path.name for path, text in script.rewritten(script.version()) if path.read_text() != text]
    assert stale == [], "make generate writes them"


def test_another_version_leaves_no_mention_of_this_one(script: ModuleType) -> None:
    """In any file of the project: pins, records, and what is generated from these files aside."""
    number = re.compile(rf"(?<![\d.]){re.escape(script.version())}(?![\d.])")
    changed = dict(script.rewritten("98.7.6"))
    aside = re.compile(
        r"^pyproject\.toml$|go\.(mod|sum)$|^requirements/|/results/|/snapshots/|^charts/rljob-operator/README\.md$"
    )
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    left = []
    for name in names:
        path = ROOT / name
        if aside.search(name) or not path.is_file():
            continue
        text = changed.get(path) or path.read_bytes().decode(errors="ignore")
        left += [f"{name}: {line.strip()}" for line in text.splitlines() if number.search(line)]
    assert left == []
