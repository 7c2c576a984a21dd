"""The simulator predicts published step times from published compute times."""

from __future__ import annotations

from benchmarks.simulation.published import ASYNC_LIMIT, LARGE, alone, comparisons, exponential

SATURATION = 194
"""What ``fitted_speed`` finds from staleness 0 (23 s)."""


def test_the_predictions_are_within_15_percent_of_the_published_steps() -> None:
    lengths = exponential(ASYNC_LIMIT)
    speed = alone(lengths, LARGE.engines, LARGE.generation, SATURATION)
    rows = {row.name: row for row in comparisons(lengths, speed, steps=12)}
    assert sum(not row.fitted for row in rows.values()) == 8
    for row in rows.values():
        assert abs(row.deviation) < (0.03 if row.fitted else 0.15), row.name
