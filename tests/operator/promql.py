"""As much of Prometheus' language as the alerts use, evaluated on one page of metrics.

A vector with labels in braces, `max by (...)` or `sum` of one, `(... or vector(0))` around it, a comparison with a
number, and such vectors joined from left to right by `and on (...)` and `unless on (...)`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]
Vector = list[tuple[Labels, float]]

_COMPARE = {"==": operator.eq, "<": operator.lt, ">": operator.gt}
_JOIN = re.compile(r" (and|unless) on \(([^)]*)\) ")
_TERM = re.compile(
    r"\(?(?:(max by|sum)(?: \(([^)]*)\) )?\()?(\w+)(?:\{([^}]*)\})?\)?( or vector\(0\)\))? (==|<|>) (\d+)"
)


def evaluate(expression: str, page: str) -> Vector:
    """The series that an expression leaves: those for which an alert is pending or fires."""
    first, *rest = _JOIN.split(expression)
    found = _term(first, page)
    for kind, on, term in zip(rest[0::3], rest[1::3], rest[2::3], strict=True):
        names = on.split(", ")
        others = [[labels.get(name) for name in names] for labels, _ in _term(term, page)]
        found = [item for item in found if ([item[0].get(name) for name in names] in others) is (kind == "and")]
    return found


def _term(text: str, page: str) -> Vector:
    match = _TERM.fullmatch(text)
    assert match is not None, f"not understood: {text}"
    aggregation, by, name, matchers, or_zero, comparison, number = match.groups()
    vector = _select(name, matchers or "", page)
    if aggregation:
        groups: dict[tuple[tuple[str, str], ...], list[float]] = {}
        for labels, value in vector:
            key = tuple((label, labels[label]) for label in by.split(", ")) if by else ()
            groups.setdefault(key, []).append(value)
        reduce = max if aggregation == "max by" else sum
        vector = [(dict(key), reduce(values)) for key, values in groups.items()]
    if or_zero and not any(not labels for labels, _ in vector):
        vector.append(({}, 0.0))
    return [item for item in vector if _COMPARE[comparison](item[1], float(number))]


def _select(name: str, matchers: str, page: str) -> Vector:
    wanted = re.findall(r'(\w+)(=~?)"([^"]*)"', matchers)
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
        and all(
            re.fullmatch(value if kind == "=~" else re.escape(value), sample.labels.get(label, ""))
            for label, kind, value in wanted
        )
    ]
