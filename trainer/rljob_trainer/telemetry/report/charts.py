"""Which curves a report shows, in which order, and what is written under them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rljob_trainer.telemetry.catalogue import NESTED_STAGES, OUTSIDE_STEPS, STAGES
from rljob_trainer.telemetry.colours import stage_class
from rljob_trainer.telemetry.figures import number, percent, readable
from rljob_trainer.telemetry.report.markup import Markup, tag
from rljob_trainer.telemetry.report.record import RunRecord
from rljob_trainer.telemetry.svg import Axes, Series, bar_chart, line_chart, stacked_chart


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric and what the legend calls it."""

    metric: str
    name: str


@dataclass(frozen=True, slots=True)
class Card:
    """A figure: title, latest value, caption, chart."""

    title: str
    caption: str
    latest: str
    chart: Callable[..., str]
    """Draws it, by default as wide as a column."""

    def markup(self, *, wide: bool = False) -> Markup:
        """``wide``: over the whole width of the page, as high as the others."""
        heading = tag("figcaption", tag("b", self.title), tag("output", self.latest), tag("small", self.caption))
        chart = self.chart(width=_WIDE) if wide else self.chart()
        return tag("figure", heading, Markup(chart), class_=wide and "wide")


_WIDE = 964  # at the scale of two columns


@dataclass(frozen=True, slots=True)
class Plot:
    """What a card shows. Curves that the run does not have, or that are zero all along, are left out, and so is a
    plot without any; ``even_if_zero`` keeps one that is news even then."""

    title: str
    caption: str
    curves: tuple[Curve, ...]
    percent: bool = False
    from_zero: bool = False
    smoothed: bool = True
    even_if_zero: bool = False


LEARNING = (
    Plot("Reward", "mean score of the step's samples", (Curve("reward/mean", "reward"),), even_if_zero=True),
    Plot(
        "Response length",
        "tokens",
        (Curve("response/length/mean", "mean"), Curve("response/length/max", "longest")),
        from_zero=True,
    ),
    Plot("Entropy", "of the policy, nats per token", (Curve("actor/entropy", "entropy"),), from_zero=True),
    Plot(
        "Groups without signal, truncated responses",
        "all samples of a group score the same: no advantage, no gradient",
        (
            Curve("reward/no_signal_ratio", "groups without signal"),
            Curve("response/length/clip_ratio", "truncated responses"),
        ),
        percent=True,
        from_zero=True,
    ),
)
STABILITY = (
    Plot(
        "KL",
        "nats per token, to the reference and per step",
        (
            Curve("kl/reference", "to the reference"),
            Curve("kl/in_loss", "in the loss"),
            Curve("actor/approx_kl", "of the step"),
        ),
    ),
    Plot(
        "Clip fraction",
        "tokens whose update is clipped",
        (
            Curve("actor/clip_fraction", "actor"),
            Curve("actor/dual_clip_fraction", "dual clip"),
            Curve("critic/clip_fraction", "critic"),
        ),
        percent=True,
        from_zero=True,
    ),
    Plot(
        "Gradient norm",
        "before clipping",
        (Curve("actor/grad_norm", "actor"), Curve("critic/grad_norm", "critic")),
        from_zero=True,
    ),
    Plot(
        "Explained variance",
        "of the returns, by the critic; 1 is perfect, 0 a constant",
        (Curve("critic/explained_variance", "critic"),),
    ),
    Plot("Value loss", "of the critic", (Curve("critic/value_loss", "critic"),), from_zero=True),
    Plot(
        "Rollout-trainer mismatch",
        "mean absolute difference of the log-probs of the same tokens, nats",
        (Curve("mismatch/log_prob/mean", "mean"),),
        from_zero=True,
    ),
    Plot(
        "Staleness",
        "age of the tokens: policy versions between sampling and training",
        (Curve("age/mean", "mean"), Curve("age/max", "oldest")),
        from_zero=True,
    ),
    Plot(
        "Learning rate",
        "",
        (Curve("actor/learning_rate", "actor"), Curve("critic/learning_rate", "critic")),
        from_zero=True,
        smoothed=False,
    ),
)
SPEED = (
    Plot(
        "Throughput",
        "tokens per second over the whole step",
        (
            Curve("throughput/tokens_per_second", "prompt and response"),
            Curve("throughput/generated_tokens_per_second", "generated"),
        ),
        from_zero=True,
    ),
    Plot(
        "Model FLOPs utilisation",
        "share of the devices' peak",
        (
            Curve("throughput/model_flops_utilisation/actor", "actor"),
            Curve("throughput/model_flops_utilisation/critic", "critic"),
        ),
        percent=True,
        from_zero=True,
    ),
)

_VALIDATION_MEAN = re.compile(r"validation/([^/]+)/(mean@\d+|maj@\d+/mean|best@\d+/mean)")


def cards(run: RunRecord, plots: Sequence[Plot]) -> list[Card]:
    """The plots that this run has data for."""
    return [card for card in (_card(run, plot) for plot in plots) if card is not None]


def _card(run: RunRecord, plot: Plot) -> Card | None:
    worth_showing = run.has if plot.even_if_zero else (lambda metric: any(run.values(metric)))
    curves = [curve for curve in plot.curves if worth_showing(curve.metric)]
    if not curves:
        return None
    span = len(run.steps) // 25
    series = [
        Series(curve.name, *run.column(curve.metric), smoothing=span if span > 2 and plot.smoothed else 0)
        for curve in curves
    ]
    axes = Axes(percent=plot.percent, from_zero=plot.from_zero)
    last = run.values(curves[0].metric)[-1]
    shown = (percent if plot.percent else number)(last)
    return Card(plot.title, plot.caption, shown, partial(line_chart, series, axes))


def validation_card(run: RunRecord) -> Card | None:
    """The held-out sets: one curve per data source and measure, points where it was measured."""
    found = sorted(name for name in run.names() if _VALIDATION_MEAN.fullmatch(name) and run.has(name))
    names = _most_telling(found)
    if not names:
        return None
    sources = {_parts(name)[0] for name in names}
    series = []
    for name in names:
        source, measure = _parts(name)
        label = measure if len(sources) == 1 else f"{source} {measure}"
        series.append(Series(label, *run.column(name), markers=True, dashed=not measure.startswith("mean")))
    caption = f"data source {next(iter(sources))}" if len(sources) == 1 else "by data source"
    return Card("Validation", caption, number(run.values(names[0])[-1]), partial(line_chart, series))


def _parts(name: str) -> tuple[str, str]:
    _, source, measure = name.split("/")[:3]
    return source, measure


def _most_telling(names: Sequence[str]) -> list[str]:
    """Per source the mean, the majority vote and the best over most samples; at most eight curves, means first."""
    largest: dict[tuple[str, str], tuple[int, str]] = {}
    for name in names:
        source, measure = _parts(name)
        kind, _, count = measure.partition("@")
        largest[source, kind] = max(largest.get((source, kind), (0, "")), (int(count), name))
    order = {"mean": 0, "maj": 1, "best": 2}
    ranked = sorted(largest.items(), key=lambda entry: (order[entry[0][1]], entry[0][0]))
    # With one sample per prompt, best and majority are the mean again.
    return [name for (_, kind), (count, name) in ranked if kind == "mean" or count > 1][:8]


_NEGLIGIBLE = 0.003


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of every timed step by stage, largest stage first, ``other`` last."""

    steps: Sequence[float]
    seconds: Mapping[str, Sequence[float]]

    @property
    def totals(self) -> dict[str, float]:
        return {stage: sum(values) for stage, values in self.seconds.items()}


def stage_seconds(run: RunRecord) -> StageSeconds:
    """Stages without those nested in them. What no stage claims, and stages of hardly any time, are ``other``."""
    timed = [record for record in run.steps if record.get("timing/step_seconds") is not None]
    seconds = {
        stage: [_seconds(record, stage) for record in timed]
        for stage in STAGES
        if stage not in ("step", *OUTSIDE_STEPS)
    }
    seconds = {stage: values for stage, values in seconds.items() if any(values)}
    for outer in set(NESTED_STAGES.values()) & set(seconds):
        nested = [inner for inner, of in NESTED_STAGES.items() if of == outer and inner in seconds]
        for i, whole in enumerate(seconds[outer]):
            inside = sum(seconds[inner][i] for inner in nested)
            if inside > whole:  # they ran at the same time: each is shown with its share
                for inner in nested:
                    seconds[inner][i] *= whole / inside
            seconds[outer][i] = max(0.0, whole - inside)
    steps = [_seconds(record, "step") for record in timed]
    shown = {stage: values for stage, values in seconds.items() if sum(values) > _NEGLIGIBLE * sum(steps)}
    ranked = dict(sorted(shown.items(), key=lambda entry: -sum(entry[1])))
    claimed = [sum(values[i] for values in ranked.values()) for i in range(len(timed))]
    other = [max(0.0, step - c) for step, c in zip(steps, claimed, strict=True)]
    return StageSeconds([float(record["step"]) for record in timed], ranked | ({"other": other} if any(other) else {}))


def _seconds(record: Mapping[str, Any], stage: str) -> float:
    return float(record.get(f"timing/{stage}_seconds") or 0.0)


def stage_card(run: RunRecord) -> Card | None:
    """Seconds of each step, stage upon stage."""
    timed = stage_seconds(run)
    if not timed.seconds:
        return None
    layers = [
        Series(readable(stage), timed.steps, values, colour=stage_class(stage))
        for stage, values in timed.seconds.items()
    ]
    mean = sum(timed.totals.values()) / len(timed.steps)
    return Card("Step time by stage", "seconds", f"{number(mean)} s", partial(stacked_chart, layers))


def age_card(run: RunRecord) -> Card | None:
    """How often each age occurred in the run: of groups by their oldest token, and of tokens. Where everything was
    trained in the version that made it there is nothing to see."""
    ages = None if run.summary is None else run.summary.ages
    if ages is None or not any(ages.oldest):
        return None
    span = [float(age) for age in range(max(ages.oldest) + 1)]
    series = [
        Series(name, span, [counts.get(int(age), 0) / max(1, sum(counts.values())) for age in span])
        for name, counts in (("groups, by their oldest token", ages.oldest), ("tokens", ages.tokens))
    ]
    mean = sum(age * count for age, count in ages.oldest.items()) / sum(ages.oldest.values())
    axes = Axes(x_label="age in versions", percent=True)
    chart = partial(bar_chart, series, axes)
    return Card("Staleness over the whole run", "share of the trained data by age", f"mean {number(mean)}", chart)
