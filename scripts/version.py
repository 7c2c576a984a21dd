"""Writes the version of pyproject.toml wherever a file has to say it that can't ask: image names, labels, the chart.

python scripts/version.py
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NUMBER = r"\d+\.\d+\.\d+\b"
PLACES = {
    "Dockerfile": (r"rljob/(?:operator|trainer):", r'image\.version="'),
    "Makefile": (r"rljob/trainer:",),
    "charts/rljob-operator/Chart.yaml": (r"^version: ", r'^appVersion: "'),
    "charts/rljob-operator/values.yaml": (r"rljob/trainer:",),
    "deploy/kind/up.sh": (r"^VERSION=",),
    "deploy/testcluster/building.py": (r'^VERSION = "',),
    "docs/cluster.md": (r"rljob/trainer:",),
    "docs/operator/README.md": (r"rljob/trainer:",),
    "docs/operator/gitops.md": (r"targetRevision: v",),
    "docs/real-cluster.md": (r"rljob/(?:operator|trainer):",),
    "examples/cluster/gpu-check.yaml": (r"rljob/trainer:",),
    "examples/cluster/storage.yaml": (r"rljob/trainer:",),
    "examples/reasoning-gym/Dockerfile": (r"TRAINER=rljob/trainer:", r"REGISTRY/rljob/trainer:"),
    "examples/reasoning-gym/grpo-1.5b.yaml": (r"rljob/trainer:",),
    "operator/rljob_operator/settings.py": (r"rljob/trainer:",),
    "tests/support/documented.yaml": (r"rljob/(?:operator|trainer):",),
}
"""What stands before the version, by file; each is found at least once. The chart's README follows its Chart.yaml."""


def version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def rewritten(number: str) -> Iterator[tuple[Path, str]]:
    """The files and what they say when ``number`` is the version. LookupError for a place that is gone."""
    for name, before in PLACES.items():
        text = (ROOT / name).read_text()
        for pattern in before:
            text, count = re.subn(f"({pattern}){_NUMBER}", rf"\g<1>{number}", text, flags=re.MULTILINE)
            if not count:
                raise LookupError(f"{name} has no version behind {pattern}: correct PLACES in scripts/version.py")
        yield ROOT / name, text


if __name__ == "__main__":
    for path, text in rewritten(version()):
        path.write_text(text)
