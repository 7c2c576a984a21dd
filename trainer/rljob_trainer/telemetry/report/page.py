"""The page of a report: outcome, key figures, curves, where the time went, samples, the job."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import re
import statistics
from collections.abc import Iterator, Sequence

from rljob_trainer.telemetry.catalogue import STAGES
from rljob_trainer.telemetry.colours import stage_class, theme
from rljob_trainer.telemetry.figures import duration, number, percent, readable
from rljob_trainer.telemetry.gantt import gantt_chart
from rljob_trainer.telemetry.report import charts
from rljob_trainer.telemetry.report.charts import Card
from rljob_trainer.telemetry.report.markup import Markup, join, tag
from rljob_trainer.telemetry.report.record import RunRecord
from rljob_trainer.telemetry.run_folder import SampleRow
from rljob_trainer.telemetry.summary import ValidationResult
from rljob_trainer.telemetry.svg import RULES

_MOST_SAMPLES = 12
_UNFOLDED_SAMPLES = 3
_MOST_CHARACTERS = 4000


def page(run: RunRecord) -> str:
    """The whole document. It loads nothing: styles, script and charts are inside, and its policy forbids the rest."""
    script = _asset("hover.js")
    fingerprint = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Text from the model is escaped; should that ever fail, the policy lets no script but this one run.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{fingerprint}'"
    head = tag(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("title", f"{run.name}: report"),
        Markup(f"<style>{_style()}</style>"),
    )
    body = tag("body", tag("main", *sections(run)), Markup(f"<script>{script}</script>"))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _style() -> str:
    return f"{theme(':root')}\n{_asset('style.css')}{RULES}"


@functools.cache
def _asset(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def sections(run: RunRecord) -> Iterator[Markup | None]:
    yield _header(run)
    yield _tiles(run)
    validation = charts.validation_card(run)
    learning = charts.cards(run, charts.LEARNING)
    yield _section("Learning", _grid([*learning[:1], *([validation] if validation else []), *learning[1:]]))
    ages = charts.age_card(run)
    yield _section("Stability", _grid([*charts.cards(run, charts.STABILITY), *([ages] if ages else [])]))
    stages = charts.stage_card(run)
    yield _section("Speed", _grid([*charts.cards(run, charts.SPEED), *([stages] if stages else [])]))
    yield _where_time_went(run)
    yield _timeline(run)
    yield _validation_table(run)
    yield _samples(run)
    yield _job(run)
    yield _footer(run)


def _section(title: str, content: Markup | None) -> Markup | None:
    return tag("section", tag("h2", title), content) if content else None


def _grid(cards: Sequence[Card]) -> Markup | None:
    """Cards in two columns. Of an odd number the first, the one that says most, takes a row."""
    odd = len(cards) % 2 == 1
    drawn = [card.markup(wide=odd and place == 0) for place, card in enumerate(cards)]
    return tag("div", *drawn, class_="grid") if cards else None


def _header(run: RunRecord) -> Markup:
    summary = run.summary
    outcome = summary.outcome if summary else "unfinished"
    facts = [summary.algorithm, summary.model, f"{summary.started_at:%d %B %Y, %H:%M} UTC"] if summary else []
    return tag(
        "header",
        tag("p", tag("span", outcome, class_=f"badge {outcome}"), " ".join(["", " · ".join(filter(None, facts))])),
        tag("h1", run.name),
        tag("p", outcome_sentence(run), class_="lead"),
    )


def outcome_sentence(run: RunRecord) -> str:
    """How the run ended and what it reached, in one sentence."""
    steps = run.last_step
    count = f"{steps:,} step{'' if steps == 1 else 's'}"
    if run.summary is None:
        start = f"{count} so far: there is no summary yet, so the run is still active or was killed"
    else:
        verb = {"succeeded": "Trained", "failed": "Failed after", "interrupted": "Interrupted after"}[
            run.summary.outcome
        ]
        start = f"{verb} {count} in {duration(run.summary.seconds)}"
        if run.summary.outcome != "succeeded":
            start += f": {run.summary.reason}"
    return f"{start}{_gain(run)}."


def _gain(run: RunRecord) -> str:
    headline = headline_validation(run)
    if headline is not None:
        name, result = headline
        first, last = result.first, result.last
        if first.step == last.step:
            return f"; {name} is {number(last.value)}"
        return f"; {name} {_went(first.value, last.value)}"
    rewards = run.values("reward/mean")
    return f"; the reward {_went(rewards[0], rewards[-1])}" if len(rewards) > 1 else ""


def _went(first: float, last: float) -> str:
    verb = "rose" if last > first else "fell" if last < first else "stayed"
    return f"stayed at {number(last)}" if verb == "stayed" else f"{verb} from {number(first)} to {number(last)}"


def headline_validation(run: RunRecord) -> tuple[str, ValidationResult] | None:
    """The validation figure that stands for the run: mean@n of the first data source, or None."""
    for source, metrics in sorted(run.validation.items()):
        means = {name: result for name, result in metrics.items() if name.startswith("mean@")}
        if source and means:
            name, result = max(means.items(), key=lambda entry: int(entry[0].removeprefix("mean@")))
            return f"{source} {name}", result
    return None


def _tiles(run: RunRecord) -> Markup:
    return tag("div", *_tile_list(run), class_="tiles")


def _tile_list(run: RunRecord) -> Iterator[Markup]:
    headline = headline_validation(run)
    if headline is not None:
        name, result = headline
        yield _tile("best validation", number(result.best.value), f"{name}, step {result.best.step:,}")
    rewards = run.values("reward/mean")
    if rewards:
        tail = rewards[-10:]
        yield _tile("reward", number(statistics.fmean(tail)), f"last {len(tail)} steps, {number(rewards[0])} at first")
    total = f"of {run.summary.total_steps:,}" if run.summary and run.summary.total_steps else ""
    version = f"policy version {run.summary.version:,}" if run.summary else ""
    yield _tile("steps", f"{run.last_step:,}", ", ".join(filter(None, (total, version))))
    if run.summary:
        seconds = run.summary.seconds
        yield _tile("wall-clock time", duration(seconds), f"{duration(seconds / max(1, run.summary.steps))} per step")
        tokens = run.summary.prompt_tokens + run.summary.response_tokens
        yield _tile("tokens", number(tokens), f"{number(run.summary.response_tokens)} generated")
        yield _tile("samples", number(run.summary.samples), "trained on")
    speeds = run.values("throughput/tokens_per_second")
    if speeds:
        yield _tile("tokens/s", number(statistics.median(speeds)), "median of the steps")


def _tile(label: str, value: str, note: str) -> Markup:
    return tag("div", tag("span", label), tag("strong", value), tag("small", note), class_="tile")


def _where_time_went(run: RunRecord) -> Markup | None:
    seconds = dict(run.summary.seconds_by_stage) if run.summary else {}
    if not seconds:
        seconds = charts.stage_seconds(run).totals
    # The step itself contains all others; exclusively it is what no stage claims.
    seconds["other"] = seconds.pop("other", 0.0) + seconds.pop("step", 0.0)
    ranked = sorted(((s, v) for s, v in seconds.items() if v > 0), key=lambda e: (e[0] == "other", -e[1]))
    whole = sum(value for _, value in ranked)
    if not whole:
        return None
    bar = tag("div", *(_bar_piece(stage, value / whole) for stage, value in ranked), class_="bar")
    rows = [
        tag(
            "tr",
            tag("td", tag("i", class_=f"dot {stage_class(stage)}"), readable(stage)),
            tag("td", duration(value)),
            tag("td", percent(value / whole)),
            tag("td", STAGES.get(stage, "")),
        )
        for stage, value in ranked
    ]
    return _section(
        "Where the time went", tag("div", bar, tag("table", tag("tbody", *rows), class_="stages"), class_="card")
    )


def _bar_piece(stage: str, share: float) -> Markup:
    name = readable(stage)
    about = {"style": f"flex-grow:{share:.4f}", "title": f"{name} {percent(share)}"}
    return tag("span", name if share > 0.09 else "", class_=stage_class(stage), **about)


def _timeline(run: RunRecord) -> Markup | None:
    """What ran at the same time in the last steps; a run that was killed has left no timeline."""
    if not run.timeline:
        return None
    return _section("Timeline of the last steps", tag("div", Markup(gantt_chart(run.timeline)), class_="card scroll"))


def _validation_table(run: RunRecord) -> Markup | None:
    rows = [
        tag(
            "tr",
            tag("td", source),
            tag("td", name),
            tag("td", number(result.first.value)),
            tag("td", number(result.last.value)),
            tag("td", number(result.best.value)),
            tag("td", f"{result.best.step:,}"),
        )
        for source, metrics in sorted(run.validation.items())
        for name, result in sorted(metrics.items(), key=lambda entry: (not entry[0].startswith("mean@"), entry[0]))
        if source and "@" in name and not re.search(r"\bstd\b", name)
    ]
    if not rows:
        return None
    titles = tag("tr", *(tag("th", title) for title in ("data source", "measure", "first", "last", "best", "at step")))
    table = tag("table", tag("thead", titles), tag("tbody", *rows), class_="numbers")
    return _section("Validation", tag("div", table, class_="card scroll"))


def _samples(run: RunRecord) -> Markup | None:
    if run.before is None:
        return None
    if run.after is None:
        step, rows = run.before
        return _section("Samples", _folded([_exchange(row, [(step, row)]) for row in rows[:_MOST_SAMPLES]]))
    (first, before), (last, after) = run.before, run.after
    pairs = pair_samples(before, after)
    if pairs:
        content = [_exchange(a, [(first, a), (last, b)]) for a, b in pairs[:_MOST_SAMPLES]]
    else:
        content = [_exchange(row, [(step, row)]) for step, rows in (run.after, run.before) for row in rows[:4]]
    return _section("Samples before and after", _folded(content))


def _folded(samples: Sequence[Markup]) -> Markup:
    """The first samples; a click shows the others."""
    shown, rest = samples[:_UNFOLDED_SAMPLES], samples[_UNFOLDED_SAMPLES:]
    more = f"{len(rest)} more sample{'' if len(rest) == 1 else 's'}"
    return join(*shown, tag("details", tag("summary", more), *rest) if rest else None)


def pair_samples(before: Sequence[SampleRow], after: Sequence[SampleRow]) -> list[tuple[SampleRow, SampleRow]]:
    """The samples of the same prompts, in the order of ``before``; several of one prompt pair up in order."""
    waiting: dict[tuple[str, str], list[SampleRow]] = {}
    for row in after:
        waiting.setdefault((row.source, row.prompt), []).append(row)
    pairs = []
    for row in before:
        partners = waiting.get((row.source, row.prompt))
        if partners:
            pairs.append((row, partners.pop(0)))
    return pairs


def _exchange(row: SampleRow, answers: Sequence[tuple[int, SampleRow]]) -> Markup:
    answer = tag("p", "expected ", tag("code", row.answer), class_="expected") if row.answer is not None else None
    columns = [
        tag("div", tag("div", tag("b", f"step {step:,}"), *_verdict(said), class_="who"), _said(said))
        for step, said in answers
    ]
    prompt = tag("div", _text(row.prompt), answer, class_="prompt")
    return tag("article", prompt, tag("div", *columns, class_="answers"), class_="card sample")


def _said(row: SampleRow) -> Markup:
    """The response, or who said what in turn."""
    if not row.turns:
        return _text(row.response)
    said = []
    for turn in row.turns:
        by, earned = str(turn["by"]), turn.get("earned")
        who = by if earned is None else f"{by}, earned {number(float(earned))}"
        said.append(tag("div", tag("small", who), _text(str(turn["text"])), class_=f"turn {by.partition(' ')[0]}"))
    return join(*said)


_ENDED = {"length": ", truncated", "deadline": ", ended because its group was late"}


def _verdict(row: SampleRow) -> Iterator[Markup]:
    if row.score is not None:
        right = row.correct if row.correct is not None else row.score > 0
        yield tag("span", number(row.score), class_="score good" if right else "score")
    if row.tokens is not None:
        yield tag("small", f"{row.tokens:,} tokens" + _ENDED.get(row.finish or "", ""))


# A browser drops control characters; a reader wants to know that the model wrote them.
_VISIBLE_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}


def _text(text: str) -> Markup:
    text = text.translate(_VISIBLE_CONTROLS)
    if len(text) > _MOST_CHARACTERS:
        rest = len(text) - _MOST_CHARACTERS
        return tag("pre", text[:_MOST_CHARACTERS], tag("em", f" … {rest:,} more characters"))
    return tag("pre", text or " ")


def _job(run: RunRecord) -> Markup | None:
    if run.job_yaml is None:
        return None
    return _section(
        "The job", tag("details", tag("summary", "job.yaml, resolved"), tag("pre", run.job_yaml), class_="card job")
    )


def _footer(run: RunRecord) -> Markup | None:
    if run.summary is None:
        return None
    machine = run.summary.machine
    memory = f"{machine.memory_gigabytes:.0f} GB" if machine.memory_gigabytes else ""
    cores = f"{machine.cores} core{'' if machine.cores == 1 else 's'}" if machine.cores else ""
    facts = [*machine.devices, machine.processor, cores, memory, machine.platform]
    packages = ", ".join(f"{name} {version}" for name, version in run.summary.packages.items())
    checkpoint = f"checkpoint {run.summary.checkpoint}" if run.summary.checkpoint else ""
    lines = [checkpoint, ", ".join(filter(None, facts)), packages]
    return tag("footer", *(tag("p", line) for line in lines if line))
