"""Numbers read the way people write them."""

from __future__ import annotations

import math

import pytest

from rljob_trainer.telemetry.figures import clock, duration, number, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (0, "0"),
        (0.1, "0.100"),
        (0.012345, "0.012"),
        (-0.5, "-0.500"),
        (1.5, "1.50"),
        (12.34, "12.3"),
        (412.4, "412"),
        (1234, "1,234"),
        (9999, "9,999"),
        (12_345, "12.3k"),
        (135_000_000, "135M"),
        (0.34e6, "340k"),
        (4.1e9, "4.10G"),
        (1e-6, "1e-6"),
        (2.5e-5, "2.5e-5"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_numbers_fit_a_column() -> None:
    values = [
        sign * digit * 10.0**power
        for sign in (1, -1)
        for digit in (1, 9.9949, 9.9951, 9.9999)
        for power in range(-9, 15)
    ]
    assert max(len(number(value)) for value in values) <= 7


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.0421, "4.2 %"), (0.37, "37 %"), (0.0999, "10 %"), (1, "100 %"), (None, "–")]
)
def test_percent(share: float | None, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("seconds", "text", "short"),
    [
        (0.24, "240 ms", "0s"),
        (3.21, "3.2 s", "3s"),
        (59.7, "1 min 00 s", "1m00s"),
        (125, "2 min 05 s", "2m05s"),
        (11_220, "3 h 07 min", "3h07m"),
        (187_200, "2 d 04 h", "2d04h"),
        (None, "–", "–"),
    ],
)
def test_duration_and_clock(seconds: float | None, text: str, short: str) -> None:
    assert duration(seconds) == text
    assert clock(seconds) == short
