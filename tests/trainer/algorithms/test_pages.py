"""docs/algorithms keeps up with the code: its figures are what the code gives, and every method is on its page."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from rljob_trainer.algorithms import advantage_estimators, aggregations, kl_estimators, policy_losses

PAGES = Path(__file__).parents[3] / "docs" / "algorithms"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PAGES)
    return importlib.import_module("figures")


def test_figures_are_what_the_code_gives(figures: ModuleType) -> None:
    for figure in figures.FIGURES:
        drawn = figures.file_of(figure).read_text(encoding="utf-8")
        assert drawn == figure(), f"{figure.__name__} has changed, run: python docs/algorithms/figures.py"


def test_every_figure_is_on_a_page(figures: ModuleType) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    files = {figures.file_of(figure) for figure in figures.FIGURES}
    assert files == set(PAGES.glob("*.svg"))
    assert all(f"]({file.name})" in text for file in files)


def test_every_loss_has_its_clip_regions(figures: ModuleType) -> None:
    titles = " ".join(figures.REGIONS).replace(",", " ").split()
    assert set(policy_losses) <= set(titles)


@pytest.mark.parametrize(
    ("page", "methods"),
    [
        ("advantages", advantage_estimators),
        ("policy-losses", policy_losses),
        ("aggregation", aggregations),
        ("kl-entropy-value", kl_estimators),
    ],
)
def test_every_method_is_on_its_page(page: str, methods: dict[str, object]) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    assert [name for name in methods if name not in text] == []
