"""The one door to metric names: ``check`` knows them all, ``metric`` fills in the parts a job chooses.

Nobody glues names together: ``metric("validation/<source>/mean@<n>", source="gsm8k", n=8)`` gives
``validation/gsm8k/mean@8`` and refuses what the catalogue does not list. ``python -m rljob_trainer.telemetry.names``
prints ``docs/metrics.md``. The metrics themselves are listed in ``catalogue.py``.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable

from rljob_trainer.telemetry.catalogue import FAMILIES, METRICS, REDUCTIONS, STAGES, Metric

__all__ = ["METRICS", "STAGES", "Metric", "UnknownMetricError", "check", "check_all", "markdown", "metric"]

_PART = re.compile(r"<(\w+)>")
_ALLOWED_IN_PART = r"[A-Za-z0-9_.\-]+"
_NUMBER_PARTS = {"n", "k"}


class UnknownMetricError(ValueError):
    """A metric name that the catalogue does not list: a mistake in the program, not in the job."""


def check(name: str) -> Metric:
    """The catalogue's entry for ``name``. Raises ``UnknownMetricError`` with the nearest names otherwise."""
    found = _find(name)
    if found is None:
        near = difflib.get_close_matches(name, [m.name for m in METRICS], n=3)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise UnknownMetricError(f"{name!r} is not a metric{hint}; add it to telemetry/catalogue.py if it is new")
    return found


def check_all(names: Iterable[str]) -> None:
    """Raises ``UnknownMetricError`` on the first name that the catalogue does not list."""
    for name in names:
        check(name)


def metric(pattern: str, **parts: str | int) -> str:
    """The name that ``pattern`` stands for when its parts are ``parts``.

    Characters of a part that a name cannot hold (such as the slash in ``openai/gsm8k``) become ``-``. Raises
    ``UnknownMetricError`` when the catalogue has no such pattern or the parts are not those it asks for.
    """
    if pattern not in _by_name():
        check(pattern)
    wanted = set(_PART.findall(pattern))
    if wanted != set(parts):
        raise UnknownMetricError(f"{pattern!r} needs the parts {sorted(wanted)}, not {sorted(parts)}")
    return _PART.sub(lambda m: re.sub(r"[^A-Za-z0-9_.\-]+", "-", str(parts[m[1]])) or "-", pattern)


@functools.cache
def _by_name() -> dict[str, Metric]:
    return {m.name: m for m in METRICS}


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    return [(_expression(m.name), m) for m in METRICS if "<" in m.name]


def _expression(name: str) -> re.Pattern[str]:
    pieces = _PART.split(name)  # text, part, text, part, ... text
    parts = [r"\d+" if piece in _NUMBER_PARTS else _ALLOWED_IN_PART for piece in pieces[1::2]]
    texts = [re.escape(piece) for piece in pieces[::2]]
    return re.compile("".join(text + part for text, part in zip(texts, [*parts, ""], strict=True)))


@functools.lru_cache(maxsize=4096)
def _find(name: str) -> Metric | None:
    if "<" in name:
        return None
    if name in _by_name():
        return _by_name()[name]
    return next((m for expression, m in _patterns() if expression.fullmatch(name)), None)


def markdown() -> str:
    """The text of ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "<!-- Generated: python -m rljob_trainer.telemetry.names > docs/metrics.md -->",
        "",
        "The metrics in `metrics.jsonl` (one object per step), TensorBoard, W&B and MLflow. Metrics that do not apply",
        "to a job are absent. A part in angle brackets stands for something that the job chooses: a data source, a",
        "reward function, a number.",
        "",
        "Reductions:",
        "",
        *(f"- **{reduction}**: {meaning}" for reduction, meaning in REDUCTIONS.items()),
    ]
    for family, meaning in FAMILIES.items():
        lines += ["", f"## {family}", "", meaning, "", "| name | unit | reduced | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{m.name}` | {m.unit} | {m.reduction} | {m.description.replace('|', chr(92) + '|')} |"
            for m in METRICS
            if m.family == family
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
