"""The operator's Prometheus metrics: how it works, and how the jobs are."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rljob_operator.conditions import Type
from rljob_operator.draft import Decision
from rljob_operator.observed import JobView

SHOWN = (Type.RUNNING, Type.CLUSTER_READY, Type.PROGRESSING, Type.WEIGHTS_FRESH, Type.SUCCEEDED, Type.FAILED)


class Metrics:
    """All metrics, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("namespace", "job")
        self.looks = Counter("rljob_reconcile", "Looks at a job.", ("result",), registry=self.registry)
        self.seconds = Histogram("rljob_reconcile_seconds", "Time of one look.", registry=self.registry)
        self.queue = Gauge("rljob_queue_depth", "Jobs that wait for a look.", registry=self.registry)
        self.queue_wait = Gauge("rljob_queue_wait_seconds", "Longest present wait for a look.", registry=self.registry)
        self.leads = Gauge("rljob_leader", "1: this replica acts.", registry=self.registry)
        self.condition = Gauge(
            "rljob_condition", "1: the condition is True.", (*labels, "condition"), registry=self.registry
        )
        self.step = Gauge("rljob_step", "Steps done.", labels, registry=self.registry)
        self.reward = Gauge("rljob_reward", "Mean reward of the last step.", labels, registry=self.registry)
        self.age = Gauge("rljob_sample_age", "Largest age of samples in the last step.", labels, registry=self.registry)
        self.attempt = Gauge("rljob_attempt", "Number of the attempt.", labels, registry=self.registry)
        self.failures = Gauge("rljob_failures", "Failures since the last checkpoint.", labels, registry=self.registry)
        self.pool = Gauge("rljob_pool_replicas", "Replicas.", (*labels, "pool", "state"), registry=self.registry)
        self._shown: dict[tuple[str, str], set[str]] = {}

    def take(self, job: JobView, decision: Decision) -> None:
        """Shows a job as it is after a look."""
        status = decision.status or job.status
        labels = (job.namespace, job.name)
        for kind in SHOWN:
            self.condition.labels(*labels, kind.title).set(status.is_true(kind))
        for gauge, name in ((self.step, "step"), (self.reward, "reward"), (self.age, "maxAge")):
            if name in status.progress:
                gauge.labels(*labels).set(float(status.progress[name]))
        self.attempt.labels(*labels).set(status.attempt)
        self.failures.labels(*labels).set(status.failures)
        for name, pool in status.pools.items():
            self.pool.labels(*labels, name, "desired").set(pool.desired)
            self.pool.labels(*labels, name, "ready").set(pool.ready)
        self._shown[labels] = set(status.pools)

    def forget(self, namespace: str, name: str) -> None:
        """Removes the series of a job that is gone."""
        labels = (namespace, name)
        pools = self._shown.pop(labels, None)
        if pools is None:
            return
        for gauge in (self.step, self.reward, self.age, self.attempt, self.failures):
            _remove(gauge, *labels)
        for kind in SHOWN:
            _remove(self.condition, *labels, kind.title)
        for pool in pools:
            for state in ("desired", "ready"):
                _remove(self.pool, *labels, pool, state)


def _remove(gauge: Gauge, *labels: str) -> None:
    try:
        gauge.remove(*labels)
    except KeyError:
        # A job that never ran has no step and no reward.
        return
