"""The YAML that README and docs show is what the API takes: whole jobs as they stand, parts laid over an example;
values of the chart, which say so in their first line, are among those that it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api import check_text
from rljob_api.overrides import merged
from rljob_api.yaml_reading import read_documents

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(EXAMPLES.rglob("*.md"))]


def shown() -> Iterator[tuple[str, str]]:
    """Where a block of YAML begins, and its text."""
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start()) + 1
            # Objects of others (Argo CD's, Flux's) are theirs to check.
            if "apiVersion:" not in block[1] or "apiVersion: rljob.dev/" in block[1]:
                yield f"{page.relative_to(ROOT)}:{line}", block[1]


BLOCKS = dict(shown())


VALUES = {place: block for place, block in BLOCKS.items() if block.startswith("# values.yaml\n")}


def is_whole(block: str) -> bool:
    return "kind: RLJob" in block


@pytest.mark.parametrize("place", [place for place, block in BLOCKS.items() if is_whole(block)])
def test_a_whole_job_is_valid(place: str) -> None:
    outcomes = check_text(BLOCKS[place])
    assert [str(violation) for outcome in outcomes for violation in outcome.violations] == []
    assert all(outcome.job is not None for outcome in outcomes)


@pytest.mark.parametrize("place", [p for p, block in BLOCKS.items() if not is_whole(block) and p not in VALUES])
def test_a_part_fits_into_a_job(place: str) -> None:
    (document,) = read_documents(BLOCKS[place])
    part = document.data if "spec" in document.data else {"spec": document.data}
    (outcome,) = check_text((EXAMPLES / "own-data.yaml").read_text(), overlays=[part])
    assert [str(violation) for violation in outcome.violations] == []


@pytest.mark.parametrize("place", VALUES)
def test_the_chart_has_these_values(place: str) -> None:
    (shown,), (chart,) = map(read_documents, (VALUES[place], (ROOT / "charts/rljob-operator/values.yaml").read_text()))
    assert unknown(shown.data, chart.data) == []


def unknown(shown: dict[str, Any], known: dict[str, Any]) -> list[str]:
    nested = [(known.get(key), value) for key, value in shown.items() if isinstance(value, dict)]
    return [key for key in shown if key not in known] + [
        key for below, value in nested if isinstance(below, dict) for key in unknown(value, below)
    ]


def test_readmes_job_says_nothing_that_the_quick_start_does_not() -> None:
    (readme,) = [block for place, block in BLOCKS.items() if place.startswith("README.md:") and is_whole(block)]
    (shortened,), (example,) = (read_documents(text) for text in (readme, (EXAMPLES / "quickstart.yaml").read_text()))
    whole: dict[str, Any] = example.data
    assert merged(whole, shortened.data) == whole
