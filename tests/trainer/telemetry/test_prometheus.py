"""Metrics in Prometheus' text format: names from the catalogue, parts as labels, nothing that a scraper refuses."""

from __future__ import annotations

import math
import re

from rljob_trainer.telemetry.names import METRICS
from rljob_trainer.telemetry.prometheus import _family, exposition, gauge

_LINE = re.compile(r'[a-z_][a-z0-9_]*(\{[a-z_]+="([^"\\]|\\.)*"(,[a-z_]+="([^"\\]|\\.)*")*\})? \S+')


def samples(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(_LINE.fullmatch(line) for line in lines)
    return lines


def test_a_plain_metric_has_help_type_and_value() -> None:
    text = exposition({"reward/mean": 0.25}, {"job": "tiny"})
    help_line, type_line, value = text.splitlines()
    assert help_line.startswith("# HELP rljob_reward_mean ")
    assert type_line == "# TYPE rljob_reward_mean gauge"
    assert value == 'rljob_reward_mean{job="tiny"} 0.25'


def test_what_a_job_chooses_becomes_a_label() -> None:
    metrics = {"validation/gsm8k/mean@8": 0.5, "validation/aime/mean@8": 0.75}
    assert samples(exposition(metrics, {})) == [
        'rljob_validation_source_mean_at_n{source="gsm8k",n="8"} 0.5',
        'rljob_validation_source_mean_at_n{source="aime",n="8"} 0.75',
    ]


def test_numbers_that_are_not_finite_stay_out() -> None:
    assert exposition({"reward/mean": math.nan, "reward/max": math.inf}, {}) == ""


def test_no_two_entries_of_the_catalogue_share_a_name() -> None:
    families = [_family(entry.name) for entry in METRICS]
    assert len(set(families)) == len(families)
    assert all(re.fullmatch("[a-z][a-z0-9_]*", family) for family in families)


def test_label_values_are_escaped() -> None:
    assert samples(gauge("rljob_x", "x", {'a"\\\n': 1}, "k", {})) == ['rljob_x{k="a\\"\\\\\\n"} 1.0']
