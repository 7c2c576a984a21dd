"""Writes the chart's README from its Chart.yaml and from the comments of its values.yaml (`# -- what a value means`).

python scripts/chart_readme.py charts/rljob-operator/README.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "charts" / "rljob-operator"
_KEY = re.compile(r"( *)([A-Za-z]\w*):")
Names = tuple[str, ...]
"""Names from the top to a value."""
_COMMENT = re.compile(r" *# -- (.+)")

INSTALL = """```sh
kubectl create namespace team-a
helm install rljob-operator charts/rljob-operator --namespace rljob --create-namespace --set 'watchNamespaces={team-a}'
```

Name the namespaces whose jobs it is to run: then it has rights there alone. Without `watchNamespaces` it watches every
namespace, and has its rights in all of them.

What it installs, what the operator may do, OpenShift, how to upgrade, to remove it and to install it again:
[docs/operator](../../docs/operator/README.md). Install it once per cluster, or once per set of namespaces: then each
release has a name of its own, after which its cluster-wide roles are called, and all but one have
`crds.enabled: false`. An unknown value is an error.
"""


def page(chart: Path = CHART) -> str:
    """The whole README as Markdown.

    Raises:
        ValueError: a value has no comment that says what it means.
    """
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    versions = f"Version {about['version']}, for Kubernetes {about['kubeVersion'].removesuffix('-0')}"
    lines = [
        f"# {about['name']}",
        "",
        "Made by `scripts/chart_readme.py` from `Chart.yaml` and `values.yaml`: change it there.",
        "",
        f"{about['description']}. {versions}.",
        "",
        INSTALL,
        "| value | meaning | default |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} | `{default}` |" for name, meaning, default in rows(chart)]
    return "\n".join(lines) + "\n"


def rows(chart: Path) -> Iterator[tuple[str, str, str]]:
    """(path, meaning, default as JSON) of every documented value, in the order of the file."""
    text = (chart / "values.yaml").read_text()
    values = yaml.safe_load(text)
    meanings = dict(_meanings(text))
    for path, default in _leaves(values, (), meanings):
        if path not in meanings:
            raise ValueError(f"values.yaml: {'.'.join(path)} has no comment that begins with # --")
        yield ".".join(path), meanings[path], json.dumps(default)


def _meanings(text: str) -> Iterator[tuple[Names, str]]:
    path: list[tuple[int, str]] = []
    comment = ""
    for line in text.splitlines():
        if found := _COMMENT.fullmatch(line):
            comment = found[1]
        elif found := _KEY.match(line):
            indentation = len(found[1])
            path = [*(step for step in path if step[0] < indentation), (indentation, found[2])]
            if comment:
                yield tuple(name for _, name in path), comment
            comment = ""


def _leaves(
    value: Any, path: tuple[str, ...], known: dict[tuple[str, ...], str]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value and path not in known:
        for name, item in value.items():
            yield from _leaves(item, (*path, name), known)
    else:
        yield path, value


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else CHART / "README.md").write_text(page(), encoding="utf-8")
