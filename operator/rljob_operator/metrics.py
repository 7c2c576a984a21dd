"""The operator's Prometheus metrics: how it works, and how the jobs are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rljob_operator.conditions import Type
from rljob_operator.draft import Decision
from rljob_operator.observed import JobView

SHOWN = (
    Type.ACCEPTED,
    Type.ADMITTED,
    Type.CLUSTER_READY,
    Type.RUNNING,
    Type.PROGRESSING,
    Type.RESIZING,
    Type.WEIGHTS_FRESH,
    Type.SUSPENDED,
    Type.SUCCEEDED,
    Type.FAILED,
)
PROGRESS = {
    "step": ("rljob_step", "Completed steps."),
    "total_steps": ("rljob_steps_wanted", "Steps after which the job ends."),
    "reward": ("rljob_reward", "Mean reward of the last step."),
    "oldest_age": ("rljob_sample_age", "Largest age of samples in the last step, in policy versions."),
    "age_bound": ("rljob_sample_age_bound", "Maximum age that the job allows, in policy versions."),
    "step_seconds": ("rljob_step_seconds", "Duration of a step."),
    "tokens_per_second": ("rljob_tokens_per_second", "Response tokens per second of all engines."),
    "trainer_idle": ("rljob_trainer_idle_ratio", "Fraction of time that the trainer waits."),
    "rollout_idle": ("rljob_rollout_idle_ratio", "Fraction of time that an engine has no request, mean over engines."),
}
"""Fields of status.progress, and the gauges that show them."""


class Shown(NamedTuple):
    """What the metrics of one job say."""

    conditions: tuple[tuple[str, bool], ...]
    progress: tuple[tuple[str, float], ...]
    attempt: int
    failures: int
    pools: tuple[tuple[str, int, int], ...]
    """Name, replicas desired, replicas ready."""


class Jobs(Collector):
    """The series of all jobs, made when somebody asks.

    A gauge with labels keeps an object for each of its values, 20 KB for a job: five thousand jobs would take 100 MB.
    """

    def __init__(self) -> None:
        self.shown: dict[tuple[str, str], Shown] = {}
        """What is shown of each job, by its namespace and name."""
        self.others: Mapping[str, str] = {}
        """See `Metrics.others`."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ("namespace", "job")
        condition = GaugeMetricFamily(
            "rljob_condition", "1: the condition is True; 0: it is False or Unknown.", labels=(*labels, "condition")
        )
        progress = {
            field: GaugeMetricFamily(name, meaning, labels=labels) for field, (name, meaning) in PROGRESS.items()
        }
        attempt = GaugeMetricFamily("rljob_attempt", "Number of the attempt.", labels=labels)
        failures = GaugeMetricFamily("rljob_failures", "Failures since the last checkpoint.", labels=labels)
        pool = GaugeMetricFamily("rljob_pool_replicas", "Replicas.", labels=(*labels, "pool", "state"))
        # In one step: the event loop goes on while another thread makes the page.
        for job, shown in list(self.shown.items()):
            for kind, true in shown.conditions:
                condition.add_metric((*job, kind), true)
            for field, value in shown.progress:
                progress[field].add_metric(job, value)
            attempt.add_metric(job, shown.attempt)
            failures.add_metric(job, shown.failures)
            for name, desired, ready in shown.pools:
                pool.add_metric((*job, name, "desired"), desired)
                pool.add_metric((*job, name, "ready"), ready)
        yield from (condition, *progress.values(), attempt, failures, pool)
        other = GaugeMetricFamily(
            "rljob_other_operator",
            "1: another operator manages the jobs of the namespace, and this one does nothing there.",
            labels=("namespace", "operator"),
        )
        for place in sorted(self.others.items()):
            other.add_metric(place, 1)
        yield other


class Metrics:
    """All metrics, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.looks = Counter("rljob_reconcile", "Reconciliations of a job.", ("result",), registry=self.registry)
        self.seconds = Histogram("rljob_reconcile_seconds", "Duration of a reconciliation.", registry=self.registry)
        self.queue = Gauge("rljob_queue_depth", "Jobs waiting for reconciliation.", registry=self.registry)
        self.queue_wait = Gauge(
            "rljob_queue_wait_seconds", "Longest current wait for reconciliation.", registry=self.registry
        )
        self.leads = Gauge("rljob_leader", "1: this replica is the leader.", registry=self.registry)
        self._jobs = Jobs()
        self.registry.register(self._jobs)

    @property
    def others(self) -> Mapping[str, str]:
        """The namespaces that are watched and belong to another operator, and to which."""
        return self._jobs.others

    @others.setter
    def others(self, found: Mapping[str, str]) -> None:
        self._jobs.others = found

    def take(self, job: JobView, decision: Decision) -> None:
        """Shows a job as it is after a look."""
        status = decision.status or job.status
        said, progress = status.by_type, dict(status.progress or {})
        self._jobs.shown[job.namespace, job.name] = Shown(
            # What nobody has said yet is not false: a job whose samples have no age yet is not stale.
            tuple((kind.title, status.is_true(kind)) for kind in SHOWN if kind.title in said),
            tuple((field, float(progress[field])) for field in PROGRESS if progress.get(field) is not None),
            status.attempt,
            status.failures,
            tuple((name, pool.desired, pool.ready) for name, pool in status.pools.items()),
        )

    def forget_all(self) -> None:
        """Removes the series of all jobs: another replica leads and shows them."""
        self._jobs.shown.clear()

    def forget(self, namespace: str, name: str) -> None:
        """Removes the series of a job that is gone."""
        self._jobs.shown.pop((namespace, name), None)
