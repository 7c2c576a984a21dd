"""README's pictures are drawn from the records that are committed beside the benchmarks, and README shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.pictures import FOLDER, ROOT, pictures
from benchmarks.quickstart.curve import curve


def test_pictures_are_what_the_records_say() -> None:
    committed = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert committed == {name: f"{picture}\n" for name, picture in pictures().items()}, "run make generate"


@pytest.mark.parametrize("path", FOLDER.iterdir(), ids=lambda path: path.name)
def test_a_picture_is_a_small_file_that_loads_nothing(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 6000
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"href|url\(|@import|<script", text)


def test_readme_shows_each_picture_and_says_what_it_is() -> None:
    shown = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert {path for _, path in shown} == {f"docs/images/{path.name}" for path in FOLDER.iterdir()}
    assert all(len(words) > 20 for words, _ in shown)


def test_readmes_figures_are_those_of_the_records() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    quick, real = (
        json.loads((ROOT / "benchmarks" / record).read_text())["results"]
        for record in ("quickstart/results/curve.json", "real_model/results/real_model.json")
    )
    reached = next(step for step, share in zip(quick["steps"], quick["accuracy"], strict=True) if share >= 0.95)
    assert f"{quick['accuracy'][-1]:.1%}".replace("%", " %") in readme
    assert f"after {reached} steps" in readme
    assert (
        f"from {real['first_three']:.0%} to {real['last_three']:.0%} in {real['steps']} steps".replace("%", " %")
        in readme
    )


def test_the_curve_of_a_run_has_its_validations_and_its_seed(tmp_path: Path) -> None:
    scored = "validation/held-out/mean@1"
    rows = [{"step": 0, scored: 0.0}, {"step": 1}, {"step": 2, scored: 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "job.yaml").write_text("spec: {seed: 3}\n")
    seen = curve(tmp_path)
    assert (seen.seed, seen.steps, seen.accuracy) == (3, [0, 2], [0.0, 0.5])
