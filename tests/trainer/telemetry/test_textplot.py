"""Sparks and Braille curves show the shape of the data."""

from __future__ import annotations

import math

import pytest

from rljob_trainer.telemetry.textplot import braille, shrink, spark


def test_a_spark_runs_from_lowest_to_highest() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert spark([5, 5, 5], 8) == "▁▁▁"
    assert spark([0, math.nan, 1], 8) == "▁ █"
    assert spark([], 8) == ""
    assert spark([math.nan], 8) == ""


def test_shrinking_takes_means_of_equal_stretches() -> None:
    assert shrink([0, 2, 4, 6], 2) == [1, 5]
    assert shrink([1, 2], 5) == [1, 2]
    assert shrink([1, math.nan, math.nan, math.nan], 2)[0] == 1
    assert math.isnan(shrink([1, math.nan, math.nan, math.nan], 2)[1])


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """(x, y) of every dot, y upwards, by the Unicode numbering of Braille dots."""
    place = {0: (0, 3), 1: (0, 2), 2: (0, 1), 3: (1, 3), 4: (1, 2), 5: (1, 1), 6: (0, 0), 7: (1, 0)}
    return {
        (2 * column + place[bit][0], 4 * (len(lines) - 1 - row) + place[bit][1])
        for row, line in enumerate(lines)
        for column, cell in enumerate(line)
        for bit in range(8)
        if (ord(cell) - 0x2800) >> bit & 1
    }


def test_a_straight_line_is_a_diagonal_of_dots() -> None:
    assert dots(braille(range(8), width=4, height=2)) == {(i, i) for i in range(8)}


def test_few_points_are_joined_over_the_whole_width() -> None:
    assert dots(braille([0, 1], width=4, height=2)) == {(i, i) for i in range(8)}


def test_a_constant_lies_in_the_middle() -> None:
    assert {y for _, y in dots(braille([3, 3, 3], width=2, height=2))} == {3}


@pytest.mark.parametrize("values", [[], [math.nan, math.nan]])
def test_nothing_to_draw_is_blank(values: list[float]) -> None:
    assert braille(values, 3, 2) == ["⠀⠀⠀"] * 2


def test_a_gap_is_not_bridged() -> None:
    assert {x for x, _ in dots(braille([1, math.nan, math.nan, math.nan, 1], width=4, height=1))} == {0, 7}
