"""Charts: round ticks, honest curves, well-formed SVG."""

from __future__ import annotations

import json
import math
import re
import statistics
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.telemetry.scales import nice_ticks, smooth, thin, tick_label, value_range
from rljob_trainer.telemetry.svg import Axes, Series, bar_chart, line_chart, stacked_chart

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (-0.03, 0.97, [-0.2, 0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 4.1e-6, [0, 1e-6, 2e-6, 3e-6, 4e-6, 5e-6]),
        (17_000, 21_000, [17_000, 18_000, 19_000, 20_000, 21_000]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
def test_ticks_cover_the_range_evenly(low: float, length: float) -> None:
    high = low + length
    if not high - low > 1e-9 * abs(low):
        return
    ticks = nice_ticks(low, high)
    step = ticks[1] - ticks[0]
    assert 3 <= len(ticks) <= 12
    assert ticks[0] <= low + 1e-6 * step
    assert ticks[-1] >= high - 1e-6 * step
    assert [b - a for a, b in pairwise(ticks)] == pytest.approx([step] * (len(ticks) - 1), rel=1e-3)


def test_whole_numbers_get_whole_ticks() -> None:
    assert nice_ticks(1, 3, count=6, smallest=1) == [1, 2, 3]


@pytest.mark.parametrize("bounds", [(1, 1), (2, 1), (0, math.inf), (math.nan, 1)])
def test_ticks_of_nothing_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="finite bounds in rising order"):
        nice_ticks(*bounds)


@pytest.mark.parametrize(
    ("value", "step", "label"),
    [
        (0.4, 0.2, "0.4"),
        (0.25, 0.05, "0.25"),
        (3, 1, "3"),
        (1500, 500, "1,500"),
        (15_000, 5_000, "15k"),
        (5_000, 5_000, "5k"),
        (12_500, 500, "12.5k"),
        (2e6, 1e6, "2M"),
        (3e9, 1e9, "3G"),
        (3e-6, 1e-6, "3e-6"),
        (1.5e-5, 5e-6, "1.5e-5"),
        (0, 1e-6, "0"),
    ],
)
def test_tick_labels(value: float, step: float, label: str) -> None:
    assert tick_label(value, step) == label


def test_tick_labels_in_percent() -> None:
    assert tick_label(0.25, 0.05, percent=True) == "25 %"
    assert tick_label(0.0025, 0.0005, percent=True) == "0.25 %"


def test_smoothing_keeps_a_constant_and_a_straight_line() -> None:
    assert smooth([3.0] * 50, 10) == pytest.approx([3.0] * 50)
    line = smooth([float(i) for i in range(101)], 5)
    assert line[50] == pytest.approx(50)  # it does not lag


def test_smoothing_calms_noise_and_leaves_gaps() -> None:
    noisy = [(-1.0) ** i for i in range(100)]
    calm = smooth(noisy, 20)
    assert max(abs(v) for v in calm[20:80] if v is not None) < 0.1
    assert smooth([1.0, None, math.nan, 3.0], 3)[1:3] == [None, None]
    assert smooth([1.0, 5.0], 0) == [1.0, 5.0]


def test_thinning_keeps_the_mean() -> None:
    x, y = list(range(1000)), [float(i % 7) for i in range(1000)]
    thin_x, thin_y = thin(x, y, 100)
    assert len(thin_x) == len(thin_y) == 100
    assert statistics.fmean(v for v in thin_y if v is not None) == pytest.approx(statistics.fmean(y))
    assert thin([1, 2], [None, math.inf], 10) == ([1, 2], [None, None])


def test_one_spike_does_not_flatten_a_curve() -> None:
    low, high = value_range([0.4 + 0.01 * (i % 20) for i in range(200)] + [1e6])
    assert high < 1.0
    assert low > 0.0
    # A curve that merely rises is shown whole.
    low, high = value_range([i / 100 for i in range(101)])
    assert (low, high) == (0, pytest.approx(1.04))


@pytest.mark.parametrize("values", [[], [math.nan], [2.0], [0.0, 0.0], [-1.0, -1.0]])
def test_there_is_always_a_range(values: list[float]) -> None:
    low, high = value_range(values)
    assert low < high
    nice_ticks(low, high)


def test_a_line_chart_is_well_formed_and_says_what_it_shows() -> None:
    steps = list(range(1, 101))
    series = [
        Series("ours <fast>", steps, [i / 100 for i in steps], smoothing=5),
        Series("theirs & slow", steps, [i / 200 for i in steps], dashed=True, markers=True),
    ]
    svg = line_chart(series, Axes(y_label="reward"), title="Race <1>", standalone=True)
    shown = texts(svg)
    assert {"ours <fast>", "theirs & slow", "Race <1>", "step", "reward", "0", "0.6", "100"} <= set(shown)
    paths = parsed(svg).findall(f"{SVG}path")
    assert [p.get("class") for p in paths] == ["raw stroke s0", "curve stroke s0", "curve stroke s1 dashed"]
    assert len(parsed(svg).findall(f"{SVG}circle")) == 100
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_data_lie_where_the_axes_say() -> None:
    svg = line_chart([Series("a", [0, 10], [0.0, 1.0])], standalone=True)
    left, top, width, height = json.loads(parsed(svg).get("data-chart") or "")["plot"]
    (path,) = parsed(svg).findall(f"{SVG}path")
    (x0, y0), (x1, y1) = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path.get("d") or "")]
    assert (x0, x1) == pytest.approx((left, left + width), abs=0.2)
    assert y0 == pytest.approx(top + height, abs=0.2)
    tick_one = next(t for t in parsed(svg).iter(f"{SVG}text") if t.text == "1.0")
    assert y1 == pytest.approx(float(tick_one.get("y") or 0) - 4, abs=0.2)


def test_a_gap_breaks_the_line() -> None:
    svg = line_chart([Series("a", [1, 2, 3, 4, 5], [1.0, 2.0, None, math.nan, 3.0])], standalone=True)
    (path,) = parsed(svg).findall(f"{SVG}path")
    assert (path.get("d") or "").count("M") == 2


@pytest.mark.parametrize("series", [[], [Series("a", [], [])], [Series("a", [], []), Series("b", [], [])]])
def test_no_data_is_said(series: list[Series]) -> None:
    assert "no data" in texts(line_chart(series, standalone=True))
    assert "no data" in texts(stacked_chart(series, standalone=True))
    assert "no data" in texts(bar_chart(series, standalone=True))


def test_a_single_point_is_a_dot() -> None:
    assert len(parsed(line_chart([Series("a", [3], [1.0])], standalone=True)).findall(f"{SVG}circle")) == 1


def test_layers_stand_on_one_another() -> None:
    x = [1.0, 2.0, 3.0]
    svg = stacked_chart([Series("a", x, [1.0, 1.0, 1.0]), Series("b", x, [2.0, None, 2.0])], standalone=True)
    lower, upper = parsed(svg).findall(f"{SVG}path")
    points = [re.findall(r"([\d.]+) ([\d.]+)", path.get("d") or "") for path in (lower, upper)]
    assert points[0][:3] == points[1][5:2:-1]  # the top of a is the floor of b
    floor, at_one, at_three = (float(points[0][3][1]), float(points[0][0][1]), float(points[1][0][1]))
    assert (floor - at_three) / (floor - at_one) == pytest.approx(3, abs=0.01)
    assert points[1][1] == points[0][1]  # what is missing is zero


def test_bars_of_one_x_stand_side_by_side_around_it() -> None:
    series = [Series("a", [0, 1], [1.0, 4.0]), Series("b", [0, 1], [2.0, 0.0])]
    svg = bar_chart(series, Axes(x_label="age"), standalone=True)
    left, top, width, height = json.loads(parsed(svg).get("data-chart") or "")["plot"]
    bars = [r for r in parsed(svg).findall(f"{SVG}rect") if r.get("rx") is None]
    assert [r.get("class") for r in bars] == ["fill s0", "fill s0", "fill s1"]  # nothing is drawn for zero
    tall = [float(r.get("height") or 0) for r in bars]
    assert (tall[1] / tall[0], tall[2] / tall[0]) == pytest.approx((4, 2), abs=0.02)
    feet = [float(r.get("y") or 0) + h for r, h in zip(bars, tall, strict=True)]
    assert feet == pytest.approx([top + height] * 3, abs=0.2)
    # Each of the two x has half of the width: the middle of the first is at a quarter, where a ends and b begins.
    ends = float(bars[0].get("x") or 0) + float(bars[0].get("width") or 0)
    assert ends == pytest.approx(left + width / 4, abs=0.2)
    assert float(bars[2].get("x") or 0) == pytest.approx(ends, abs=0.2)


def test_many_points_are_thinned_and_a_long_legend_wraps() -> None:
    x = list(range(50_000))
    svg = line_chart(
        [Series(f"a long name number {i}", x, [float(v % 5) for v in x]) for i in range(6)], standalone=True
    )
    assert len(svg) < 120_000
    names = [t for t in parsed(svg).iter(f"{SVG}text") if (t.text or "").startswith("a long")]
    assert len({t.get("y") for t in names}) >= 2
    assert all(float(t.get("x") or 0) < 460 for t in names)
