"""The report is made of the folder alone, needs no network, and nothing a model says becomes part of the page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rljob_trainer.errors import DataError
from rljob_trainer.telemetry.catalogue import OUTSIDE_STEPS, STAGES
from rljob_trainer.telemetry.report import write_report
from rljob_trainer.telemetry.report.charts import age_card, stage_seconds
from rljob_trainer.telemetry.report.markup import Markup, join, tag
from rljob_trainer.telemetry.report.page import pair_samples
from rljob_trainer.telemetry.report.record import RunRecord, read_run
from rljob_trainer.telemetry.run_folder import SampleRow
from rljob_trainer.telemetry.summary import AgeCounts
from rljob_trainer.telemetry.timing import Trace, row_of

MakeRun = Callable[..., Path]
_VOID = {"meta"}


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, and the text outside of style and script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for element, attributes in self.elements if element == name]


@pytest.fixture
def page(make_run: MakeRun) -> Page:
    return Page(write_report(make_run()))


def test_every_element_is_closed(page: Page) -> None:
    assert page.open == []


def test_it_says_in_one_sentence_how_the_run_ended(page: Page) -> None:
    # mean@4 is the S-curve 1 / (1 + exp(-12 (s - 0.4))): 0.01 before, 0.999 at the end.
    assert re.search(r"Trained 200 steps in 2 min \d\d s; addition mean@4 rose from 0\.010 to 0\.999\.", page.text)


def test_it_shows_every_curve_the_run_has(page: Page) -> None:
    titles = re.findall(r"<figcaption><b>(.*?)</b>", page.source)
    assert titles == [
        "Reward",
        "Validation",
        "Response length",
        "Entropy",
        "Groups without signal, truncated responses",
        "KL",
        "Clip fraction",
        "Gradient norm",
        "Explained variance",
        "Value loss",
        "Rollout-trainer mismatch",
        "Learning rate",
        "Staleness over the whole run",
        "Throughput",
        "Step time by stage",
    ]
    assert len(page.named("svg")) == len(titles)
    assert all(svg["aria-label"] for svg in page.named("svg"))


@pytest.fixture
def timed(make_run: MakeRun) -> Page:
    """The page of a run with a timeline, in which all stages occur and two versions are sampled."""
    folder = make_run()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in metrics[1:]:
        line.update({f"timing/{stage}_seconds": 0.2 for stage in STAGES if stage not in ("step", *OUTSIDE_STEPS)})
        line["timing/step_seconds"] = 4.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    summary = json.loads((folder / "summary.json").read_text())
    summary["seconds_by_stage"] = dict.fromkeys(STAGES, 10.0)
    (folder / "summary.json").write_text(json.dumps(summary))
    trace = Trace()
    for begin, stage in enumerate(STAGES):
        trace.span(row_of(stage), stage, 1000.0 + begin, 1001.0 + begin)
    for engine in (0, 1):
        for version in (6, 7):
            trace.span(f"engine {engine}", f"version {version}", 1000.0 + version, 1001.0 + version)
    trace.write(folder / "timeline.json")
    return Page(write_report(folder))


def figure_of(page: Page, title: str) -> str:
    """The chart under a title."""
    after = page.source.partition(f">{title}</")[2]
    return after[after.index("<svg") : after.index("</svg>")]


def legend_of(chart: str) -> dict[str, str]:
    """Names with the classes of their colours."""
    entry = r'<rect class="fill ([\w-]+)"[^>]*rx="2"/><text[^>]*>([^<]*)</text>'
    return {name: colour for colour, name in re.findall(entry, chart)}


def test_a_stage_has_the_same_colour_in_all_figures_and_no_other_stage_has_it(timed: Page) -> None:
    stacked, timeline = (
        legend_of(figure_of(timed, title)) for title in ("Step time by stage", "Timeline of the last steps")
    )
    table = {name: colour for colour, name in re.findall(r'<i class="dot ([\w-]+)"></i>([^<]*)</td>', timed.source)}
    bar = dict(re.findall(r'<span class="([\w-]+)" style="flex-grow[^>]* title="(.*?) [\d.]+ %"', timed.source))
    names = {stage.replace("_", " ").replace("log probs", "log-probs") for stage in STAGES if stage != "step"}
    assert set(table) == set(bar.values()) == names
    assert {name: colour for colour, name in bar.items()} == table
    assert stacked.items() <= table.items()
    # Start is in no step; the seconds of generate, score and update are those of the stages in them.
    assert names - stacked.keys() == {"start", "generate", "score", "update"}
    assert {
        name: colour for name, colour in timeline.items() if not name.startswith("sampling")
    }.items() <= table.items()
    themes = re.findall(r":root \{ (--ink.*?)\}", timed.source, re.DOTALL)
    assert len(themes) == 2
    for variables in themes:
        colours = dict(re.findall(r"--([\w-]+): (#\w+);", variables))
        shown = [colours[colour] for colour in {*table.values(), *timeline.values()}]
        assert len(set(shown)) == len(names) + 2


def test_legends_name_everything_that_is_drawn(timed: Page) -> None:
    charts = re.findall(r"<svg.*?</svg>", timed.source)
    for chart in charts:
        drawn = set(re.findall(r'class="[^"]*?(?:fill|stroke) ([\w-]+)', chart))
        assert len(drawn) <= 1 or set(legend_of(chart).values()) == drawn
    assert {"sampling, even version", "sampling, odd version"} <= legend_of(charts[-1]).keys()


@pytest.mark.parametrize("steps", [1, 20])
def test_no_card_stands_alone_beside_an_empty_place(make_run: MakeRun, steps: int) -> None:
    page = Page(write_report(make_run(steps=steps)))
    grids = page.source.split('<div class="grid">')[1:]
    assert len(grids) == 3
    for grid in grids:
        cards = re.findall("<figure.*?</figure>", grid.partition("<section>")[0])
        wide = [card for card in cards if card.startswith('<figure class="wide"')]
        assert (len(cards) + len(wide)) % 2 == 0
        assert wide in ([], cards[:1])
        shapes = {card.partition('viewBox="0 0 ')[2].partition('"')[0] for card in cards if card not in wide}
        assert shapes == {"460 215"}
        assert all('viewBox="0 0 964 215"' in card for card in wide)


def test_three_samples_are_shown_and_the_others_folded(page: Page, make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run(steps=20, folder=tmp_path / "many")
    for step in (0, 20):
        path = folder / "samples" / f"step-{step:06}.jsonl"
        path.write_text("".join(SampleRow("s", f"prompt {n}", f"said {n}").to_json() + "\n" for n in range(9)))
    for shown, more in ((page, "1 more sample"), (Page(write_report(folder)), "6 more samples")):
        unfolded, folded = shown.source.split(f"<details><summary>{more}</summary>")
        assert unfolded.count("<article") == 3
        assert folded.partition("</details>")[0].count("<article") == int(more[0])
        assert folded.partition("</details>")[2].count("<article") == 0


def test_ages_are_shown_as_shares_where_anything_was_stale(make_run: MakeRun) -> None:
    run = read_run(make_run())
    drawn = age_card(run)
    assert drawn is not None
    card = drawn.markup()
    # 400 groups, 100 of age 0 and 300 of age 2; 10,000 tokens.
    assert "mean 1.50" in card
    series = json.loads(html.unescape(re.findall('data-chart="(.*?)"', card)[0]))["series"]
    assert [entry["y"] for entry in series] == [[0.25, 0, 0.75], [0.4, 0.4, 0.2]]
    assert run.summary is not None
    fresh = run.summary.model_copy(update={"ages": AgeCounts(oldest={0: 100}, tokens={0: 4000})})
    assert age_card(replace(run, summary=fresh)) is None


def test_it_holds_tiles_time_validation_samples_job_and_machine(page: Page) -> None:
    assert len([a for a in page.named("div") if a.get("class") == "tile"]) == 7
    for fact in (
        "Where the time went",
        "update actor",
        "30 %",
        "best@4/mean",
        "Samples before and after",
        "What is 12 + 34?",
        "step 0",
        "step 200",
        "job.yaml, resolved",
        "kind: RLJob",
        "A processor, 2 cores, 8 GB",
        "torch 2.13.0",
    ):
        assert fact in page.text, fact


def test_what_a_model_says_stays_text(page: Page) -> None:
    assert "<script>alert('x')</script><img src=https://evil.example/x onerror=alert(1)>" in page.text
    assert "\u2400" in page.text  # its NUL, made visible
    assert "# <script>alert('job')</script>" in page.text
    assert page.named("img") == []
    assert len(page.named("script")) == 1
    assert not [attributes for _, attributes in page.elements if any(name.startswith("on") for name in attributes)]


def test_it_loads_nothing(page: Page) -> None:
    for name in ("link", "iframe", "object", "embed", "base", "form", "a"):
        assert page.named(name) == []
    assert not [attributes for _, attributes in page.elements if {"src", "href", "srcset", "action"} & set(attributes)]
    styles = "".join(re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL))
    assert "url(" not in styles
    assert "@import" not in styles


def test_its_policy_lets_its_own_script_run_and_nothing_else(page: Page) -> None:
    (policy,) = [a["content"] for a in page.named("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*?)</script>\n?</body>", page.source, re.DOTALL)
    fingerprint = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{fingerprint}'"


def test_it_is_small_enough_to_mail(page: Page) -> None:
    assert len(page.source.encode()) < 500_000


def test_a_failed_run_says_why(make_run: MakeRun) -> None:
    page = Page(write_report(make_run(steps=30, outcome="failed")))
    assert "Failed after 30 steps in" in page.text
    assert ": engine 0 died: <b>out of memory</b>; addition mean@4" in page.text
    assert page.open == []


def test_a_run_that_was_killed_has_a_report_too(make_run: MakeRun) -> None:
    folder = make_run(steps=30, outcome=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "rew')
    page = Page(write_report(folder))
    assert "30 steps so far: there is no summary yet" in page.text
    assert "Where the time went" in page.text  # from the metrics


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_of_hardly_any_steps(make_run: MakeRun, steps: int) -> None:
    page = Page(write_report(make_run(steps=steps)))
    assert f"Trained {steps} step{'s' if steps > 1 else ''} in" in page.text
    assert page.open == []


def test_metrics_alone_are_enough(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": null, "actor/grad_norm": null}\n')
    assert Page(write_report(tmp_path)).open == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has neither metrics.jsonl nor summary.json"):
        write_report(tmp_path)


def test_it_can_be_made_anew_from_the_command_line(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    first = write_report(folder).read_text()
    (folder / "report.html").unlink()
    command = [sys.executable, "-m", "rljob_trainer.telemetry.report"]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text() == first
    refused = subprocess.run([*command, str(folder.parent / "nowhere")], capture_output=True, text=True, check=False)
    assert refused.returncode == 65
    assert "no run to report on" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_samples_of_other_prompts_in_between_do_not_hide_the_last_answers(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    other = SampleRow(source="training", prompt="What is 1 + 1?", response="something else")
    (folder / "samples/step-000021.jsonl").write_text(other.to_json() + "\n")
    page = Page(write_report(folder))
    assert "step 20" in page.text
    assert "something else" not in page.text


def test_samples_without_a_common_prompt_are_shown_one_by_one(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    other = SampleRow(source="training", prompt="What is 1 + 1?", response="something else")
    (folder / "samples/step-000020.jsonl").write_text(other.to_json() + "\n")
    page = Page(write_report(folder))
    assert "What is 12 + 34?" in page.text
    assert "something else" in page.text


def test_who_said_what_in_an_episode_of_several_turns_is_told_apart(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    said = [("model", "? \ud800"), ("environment", "told <b>1</b>"), ("rewritten history", "all"), ("model", "yes")]
    turns: list[dict[str, str | float]] = [{"by": by, "text": text} for by, text in said]
    turns[-1]["earned"] = 0.25
    row = SampleRow(source="training", prompt="What is it?", response="? told 1 yes", turns=turns)
    (folder / "samples/step-000020.jsonl").write_text(row.to_json() + "\n")
    page = Page(write_report(folder))
    for by, text in said[:-1]:
        assert f"{by}{text}".replace("\ud800", "\\ud800") in page.text
    assert "model, earned 0.250yes" in page.text
    assert "? told 1 yes" not in page.text


def test_samples_of_one_prompt_pair_up_in_order() -> None:
    def row(prompt: str, response: str) -> SampleRow:
        return SampleRow(source="s", prompt=prompt, response=response)

    before = [row("p", "1"), row("q", "2"), row("p", "3"), row("gone", "4")]
    after = [row("q", "a"), row("p", "b"), row("p", "c"), row("new", "d")]
    assert [(a.response, b.response) for a, b in pair_samples(before, after)] == [("1", "b"), ("2", "a"), ("3", "c")]


def test_markup_escapes_what_is_not_markup() -> None:
    assert tag("b", "<i>", Markup("<u>x</u>"), None, class_='a"b', hidden=True) == (
        '<b class="a&quot;b" hidden>&lt;i&gt;<u>x</u></b>'
    )
    assert isinstance(join("a", "b"), Markup)


def test_stages_that_ran_at_the_same_time_share_the_time_of_their_stage() -> None:
    """Actor and critic of one rank on CPUs: 1.5 s and 0.5 s within an update of 1 s."""
    timing = {"step": 1.25, "update": 1.0, "update_actor": 1.5, "update_critic": 0.5}
    run = RunRecord("run", [{"step": 1, **{f"timing/{stage}_seconds": value for stage, value in timing.items()}}])
    stages = {stage: values[0] for stage, values in stage_seconds(run).seconds.items()}
    assert stages == pytest.approx({"update_actor": 0.75, "update_critic": 0.25, "other": 0.25})
