"""The alert about jobs without progress: its own expression, on what the operator exports of jobs in all states."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from prometheus_client import generate_latest
from promql import evaluate
from simulation import World, job_spec
from test_monitoring import ALERT, RULES

from rljob_api.status import CurrentWait, DriverStatus
from rljob_operator.metrics import Metrics
from rljob_operator.observed import Observed, RayJobView, RayView

EXPRESSIONS: dict[str, str] = dict(re.findall(ALERT, RULES))


def leader_page(*replicas: int, service: str = "rl") -> str:
    """What is scraped of the operator's replicas, with the labels that the ServiceMonitor's targets add."""
    series = [
        f'rljob_leader{{namespace="ops",service="{service}",pod="{index}"}} {leads}'
        for index, leads in enumerate(replicas)
    ]
    return "\n".join(["# TYPE rljob_leader gauge", *series, ""])


@pytest.mark.parametrize(
    ("page", "fires"),
    [
        (leader_page(1, 0), False),
        (leader_page(0, 0), True),
        # All replicas are down: there is nothing to scrape.
        (leader_page(), True),
        # The replica of another release says nothing about ours.
        (leader_page(1, service="other"), True),
    ],
)
def test_an_operator_without_leader(page: str, fires: bool) -> None:
    expression = EXPRESSIONS["RLJobOperatorWithoutLeader"]
    expression = expression.replace("{{ .Release.Namespace }}", "ops").replace('{{ include "operator.name" . }}', "rl")
    assert bool(evaluate(expression, page)) is fires


@pytest.mark.parametrize("others", [{}, {"space": "ops/rljob-operator"}])
def test_two_operators_over_one_namespace(others: dict[str, str]) -> None:
    metrics = Metrics()
    metrics.others = others
    found = evaluate(EXPRESSIONS["RLJobTwoOperators"], generate_latest(metrics.registry).decode())
    told = [dict(labels) for labels, _ in found]
    assert told == [{"namespace": space, "operator": holder} for space, holder in others.items()]


@dataclass
class Troubled(World):
    """A world with drivers that wait, or never begin."""

    waits: bool = False
    pending: bool = False

    def answer(self, driver: object) -> DriverStatus:
        said = super().answer(driver)  # type: ignore[arg-type]
        if not self.waits:
            return said
        return said.model_copy(update={"waiting": CurrentWait(who="trainer", reason="0 of 8 samples", since=self.now)})

    def observed(self) -> Observed:
        found = super().observed()
        if self.pending and found.ray is not None and found.ray.job is not None:
            return replace(found, ray=RayView(True, job=RayJobView("job-a1", "PENDING")), driver=None)
        return found


def trains(world: Troubled) -> None:
    world.settle(8)


def waits(world: Troubled) -> None:
    world.waits = True
    trains(world)


def starts(world: Troubled) -> None:
    world.look()
    world.kuberay()


def is_queued(world: Troubled) -> None:
    world.look()
    world.hold()


def is_suspended(world: Troubled) -> None:
    trains(world)
    world.edit(suspend=True)
    trains(world)


def is_done(world: Troubled) -> None:
    trains(world)
    world.end(world.drivers[0], "succeeded", 0)
    trains(world)


def is_silent(world: Troubled) -> None:
    trains(world)
    world.silent_since = world.now
    world.wait(61)


def does_not_stop(world: Troubled) -> None:
    """Silent for longer than spec.deadlines.progressSeconds; it has been told to stop."""
    trains(world)
    world.silent_since = world.now
    world.wait(3601)


def is_out_of_reach(world: Troubled) -> None:
    trains(world)
    world.reachable = False


def never_begins(world: Troubled) -> None:
    world.pending = True
    trains(world)


@pytest.mark.parametrize(
    ("happens", "status", "fires"),
    [
        (trains, ("True", "Moving"), False),
        (waits, ("True", "Waiting"), False),
        (starts, ("False", "NotRunning"), False),
        (is_queued, ("False", "NotRunning"), False),
        (is_suspended, ("False", "NotRunning"), False),
        (is_done, ("False", "NotRunning"), False),
        (is_silent, ("Unknown", "NoAnswer"), True),
        (does_not_stop, ("False", "Stalled"), True),
        (is_out_of_reach, ("Unknown", "NoAnswer"), True),
        (never_begins, ("False", "NotRunning"), True),
    ],
)
def test_jobs_that_hold_pods_and_get_nowhere(
    happens: Callable[[Troubled], None], status: tuple[str, str], fires: bool
) -> None:
    world = Troubled(spec=job_spec())
    happens(world)
    metrics = Metrics()
    metrics.take(world.observed().job, world.look())
    assert (world.value("Progressing"), world.reason("Progressing")) == status
    found = evaluate(EXPRESSIONS["RLJobStalled"], generate_latest(metrics.registry).decode())
    assert [dict(labels) for labels, _ in found] == ([{"namespace": "space", "job": "job"}] if fires else [])
