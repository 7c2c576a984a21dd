"""Dashboard and alerts speak of metrics and labels that are really exported, by the operator or by the driver."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from simulation import World, job_spec

from rljob_api.job_status import ProgressStatus
from rljob_api.status import Ages, DriverStatus, Pools, RolloutStatus, Scores, Throughput, TrainerStatus
from rljob_operator.draft import Decision
from rljob_operator.metrics import PROGRESS, SHOWN, Metrics
from rljob_trainer.telemetry.names import METRICS
from rljob_trainer.telemetry.prometheus import exposition

CHART = Path(__file__).parents[2] / "charts" / "rljob-operator"
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
RULES = (CHART / "templates" / "monitoring.yaml").read_text()
ALERT = r"- alert: (\w+)\n(?: +#.*\n)* +expr: (.+)\n"
TARGET_LABELS = {"namespace", "job", "pod", "instance"}


def labels_of(page: str) -> dict[str, set[str]]:
    """Sample names on a page of metrics, with their labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def answer() -> DriverStatus:
    return DriverStatus(
        generation=1,
        attempt=1,
        time="2026-01-01T00:00:00Z",  # type: ignore[arg-type]
        step=3,
        version=3,
        total_steps=9,
        pools=Pools(rollout=RolloutStatus(desired=1, ready=1), trainer=TrainerStatus(desired=1, ready=1)),
        rewards=Scores(mean=0.5, best=0.5),
        ages=Ages(mean=1.0, max=2, bound=4),
        throughput=Throughput(
            step_seconds=2.0,
            generated_tokens_per_second=100.0,
            trained_tokens_per_second=200.0,
            trainer_idle=0.25,
            rollout_idle=0.5,
        ),
    )


def operators() -> Metrics:
    """The operator's metrics after one look at a job that trains."""
    metrics, world = Metrics(), World(spec=job_spec())
    world.settle(8)
    for result in ("done", "retry", "error"):
        metrics.looks.labels(result).inc()
    world.status = world.status.changed(progress=ProgressStatus.of(answer()))
    metrics.take(world.observed().job, Decision())
    metrics.others = {"elsewhere": "ops/rljob-operator"}
    return metrics


def exported() -> dict[str, set[str]]:
    found = labels_of(generate_latest(operators().registry).decode())
    names = {re.sub(r"<[nk]>", "8", name) for name in (metric.name for metric in METRICS)}
    text = exposition({re.sub(r"<\w+>", "x", name): 1.0 for name in names}, {"namespace": "a", "job": "b"})
    drivers = labels_of(text)
    assert not found.keys() & drivers.keys(), "one name, two meanings"
    return found | drivers


EXPORTED = exported()


def queries() -> Iterator[tuple[str, str]]:
    """Every query of dashboard and alerts, with where it stands."""

    def panels(items: list[dict[str, object]]) -> Iterator[dict[str, object]]:
        for item in items:
            yield item
            yield from panels(item.get("panels") or [])  # type: ignore[arg-type]

    for panel in panels(DASHBOARD["panels"]):
        for target in panel.get("targets", ()):  # type: ignore[attr-defined]
            yield f"panel {panel['title']}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]
    for name, expression in re.findall(ALERT, RULES):
        yield f"alert {name}", expression


QUERIES = list(queries())


def test_there_is_something_to_check() -> None:
    places = [place for place, _ in QUERIES]
    assert len([place for place in places if place.startswith("panel")]) >= 25
    assert {"alert RLJobStalled", "alert RLJobSamplesStale", "alert RLJobWaitsForQuota", "alert RLJobRetrying"} <= {
        *places
    }
    assert RULES.count("- alert:") == len([place for place in places if place.startswith("alert")])


@pytest.mark.parametrize(("place", "query"), QUERIES)
def test_every_metric_and_label_exists(place: str, query: str) -> None:
    names = re.findall(r"\brljob_\w+", query)
    assert names, place
    for name in names:
        assert name in EXPORTED, f"{place}: {name} is not exported"
    for name, selectors in re.findall(r"\b(rljob_\w+)\{([^}]*)\}", query):
        labels = set(re.findall(r"(\w+)=~?\"", selectors))
        assert labels
        # What the operator says of itself gets the labels of its Service.
        added = {"namespace", "service"} if not EXPORTED[name] else set()
        assert labels <= EXPORTED[name] | added, f"{place}: {name} has {EXPORTED[name]}"
    for grouped in re.findall(r"by \(([^)]*)\)", query):
        wanted = {label.strip() for label in grouped.split(",")}
        assert all(wanted <= EXPORTED[name] for name in names), place


@pytest.mark.parametrize(("place", "query"), QUERIES)
def test_every_condition_that_is_asked_for_is_shown(place: str, query: str) -> None:
    titles = {kind.title for kind in SHOWN}
    for asked in re.findall(r'condition=~?"([^"]*)"', query):
        assert set(asked.split("|")) <= titles, place


def test_panels_about_jobs_follow_the_choice_of_namespace_and_job() -> None:
    for place, query in QUERIES:
        for name in re.findall(r"\brljob_\w+", query) if place.startswith("panel") else ():
            if "job" in EXPORTED[name]:
                assert 'namespace=~"$namespace",job=~"$job"' in query, place


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    numbers += [inner["id"] for panel in DASHBOARD["panels"] for inner in panel.get("panels", ())]
    assert len(numbers) == len(set(numbers))
    for panel in DASHBOARD["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["type"] == "row" or panel["description"]


def test_prometheus_keeps_the_jobs_labels() -> None:
    """Without honorLabels `job` would become the operator's service, and all alerts would be about that."""
    assert {"namespace", "job"} <= EXPORTED["rljob_condition"]
    assert "honorLabels: true" in RULES


def test_every_field_of_progress_that_is_shown_exists() -> None:
    assert PROGRESS.keys() <= ProgressStatus.model_fields.keys()


def test_a_refused_job_and_a_pool_that_changes_are_shown() -> None:
    metrics, world = Metrics(), World(spec=job_spec())
    world.settle(8)

    def shown(kind: str) -> str:
        metrics.take(world.observed().job, world.look())
        labels = f'rljob_condition{{condition="{kind}",job="job",namespace="space"}} '
        page = generate_latest(metrics.registry).decode()
        return next(line.removeprefix(labels) for line in page.splitlines() if line.startswith(labels))

    assert (shown("Accepted"), shown("Resizing")) == ("1.0", "0.0")
    world.edit(rollout={"replicas": 4})
    assert shown("Resizing") == "1.0"
    world.labels = {"kueue.x-k8s.io/max-exec-time-seconds": "60"}
    assert shown("Accepted") == "0.0"


def test_what_nobody_has_said_is_not_shown_as_false() -> None:
    metrics, world = Metrics(), World(spec=job_spec())
    metrics.take(world.observed().job, world.look())
    page = generate_latest(metrics.registry).decode()
    assert 'condition="Running"' in page
    assert 'condition="WeightsFresh"' not in page
    assert 'condition="Admitted"' not in page


def test_another_leader_shows_the_jobs_alone() -> None:
    metrics = operators()
    assert 'job="job"' in generate_latest(metrics.registry).decode()
    metrics.forget_all()
    assert 'job="job"' not in generate_latest(metrics.registry).decode()
