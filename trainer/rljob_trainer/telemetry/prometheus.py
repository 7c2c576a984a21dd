"""The step's metrics in Prometheus' text format, under the names of the catalogue.

``reward/mean`` becomes ``rljob_reward_mean``; what a job chooses becomes a label: ``validation/gsm8k/mean@8`` is
``rljob_validation_source_mean_at_n{source="gsm8k",n="8"}``. All are gauges: the value of the last step that had it.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Mapping

from rljob_trainer.telemetry.names import Metric, check

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PART = re.compile(r"<(\w+)>")
_NUMBERS = {"n", "k"}


def exposition(metrics: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """The text that ``GET /metrics`` answers. ``labels`` stand on every sample; numbers that are not finite stay out.

    Raises ``UnknownMetricError`` for a name that the catalogue does not list.
    """
    families: defaultdict[str, list[str]] = defaultdict(list)
    described: dict[str, str] = {}
    for name, value in metrics.items():
        if not math.isfinite(value):
            continue
        family, own, description = _parsed(name)
        described[family] = description
        families[family].append(f"{family}{_braces({**labels, **dict(own)})} {float(value)!r}")
    return _text(families, described)


def gauge(name: str, description: str, samples: Mapping[str, float], label: str, labels: Mapping[str, str]) -> str:
    """A gauge beside the catalogue, one sample for each value of ``label``."""
    lines = [f"{name}{_braces({**labels, label: value})} {float(number)!r}" for value, number in samples.items()]
    return _text({name: lines}, {name: description}) if lines else ""


def _text(families: Mapping[str, list[str]], described: Mapping[str, str]) -> str:
    lines: list[str] = []
    for family in sorted(families):
        description = described[family].replace("\\", r"\\").replace("\n", " ")
        lines += [f"# HELP {family} {description}", f"# TYPE {family} gauge", *families[family]]
    return "".join(f"{line}\n" for line in lines)


def _braces(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@functools.lru_cache(maxsize=4096)
def _parsed(name: str) -> tuple[str, tuple[tuple[str, str], ...], str]:
    """Prometheus' name, the labels that stand in ours, and the description."""
    metric = check(name)
    description = f"{metric.description} ({metric.unit})" if metric.unit else metric.description
    return _family(metric.name), _labels(metric, name), description


def _family(pattern: str) -> str:
    return "rljob_" + re.sub(r"[^a-zA-Z0-9]+", "_", pattern.replace("@", "_at_")).strip("_")


def _labels(metric: Metric, name: str) -> tuple[tuple[str, str], ...]:
    pieces = _PART.split(metric.name)  # text, part, text, part, ... text
    groups = [rf"(?P<{part}>\d+)" if part in _NUMBERS else rf"(?P<{part}>.+)" for part in pieces[1::2]]
    texts = [re.escape(piece) for piece in pieces[::2]]
    match = re.fullmatch("".join(text + group for text, group in zip(texts, [*groups, ""], strict=True)), name)
    assert match is not None
    return tuple(match.groupdict().items())
